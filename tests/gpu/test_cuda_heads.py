"""Heads on the CUDA backend give the logits of their modules, and draft what they draft on the CPU.

Without a device, TRITON_INTERPRET=1 runs this slowly on the CPU, without graphs.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from foredraft.llm import LLM
from foredraft.params import SamplingParams
from foredraft.sampling import likely
from foredraft.types import Draft
from tests.contract.test_heads import CASES, REFERENCES
from tests.contract.test_mtp import NAMES as BROUGHT
from tests.contract.test_mtp import compare as compare_brought
from tests.contract.test_mtp import written
from tests.contract.test_published_heads import SERVED, Model, compare
from tests.contract.test_run_ahead import CASES as AHEAD_CASES
from tests.contract.test_run_ahead import drafts_of
from tests.served_heads import CHAIN, TOKENS, TREE, Target
from tests.tiny_heads import KINDS, random_head, save_head, save_heads, tiny_config
from tests.tiny_models import VOCAB, random_model, save_model

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not INTERPRETED and not torch.cuda.is_available(), reason="needs a CUDA device"),
]
DEVICE = "cpu" if INTERPRETED else "cuda"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(random_model("llama"), tmp_path_factory.mktemp("tiny"))


@pytest.fixture(autouse=True)
def cuda_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    from foredraft.backends.cuda.backend import CudaBackend

    if INTERPRETED:
        for module in ("engine.loading", "heads.propose"):
            monkeypatch.setattr(
                f"foredraft.{module}.choose_backend", lambda name, dtype, device, *more: CudaBackend(dtype, device)
            )
            monkeypatch.setattr(CudaBackend, "warm_plans", lambda *shape: [])


@pytest.mark.parametrize("draft", [CHAIN, TREE], ids=["chain", "tree"])
@pytest.mark.parametrize(("kind", "correction", "rows"), CASES)
def test_served_logits_are_those_of_the_module(
    folder: Path, tmp_path: Path, kind: str, correction: str, rows: str, draft: Draft
) -> None:
    head = random_head(tiny_config(kind, folder, correction, block_input=rows))
    target = Target(folder, save_head(head, tmp_path), dtype="float32", exact=False, device=DEVICE)
    sequence = target.sequence(TOKENS)
    with torch.no_grad():
        expected = REFERENCES[kind](head, target, sequence, draft)
    for row, module_row in zip(target.served(sequence, draft), expected, strict=True):
        known = row > -torch.inf
        there = torch.full((VOCAB,), -torch.inf).index_copy_(0, head.token_ids, module_row)
        assert (row - there)[known].abs().max() < 1e-3 * expected.std()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return Model(tmp_path_factory.mktemp("published"))


@pytest.mark.parametrize("name", SERVED)
def test_heads_of_others_give_the_logits_of_their_publishers(name: str, model: Model, tmp_path: Path) -> None:
    compare(name, model, tmp_path, 1e-3, exact=False, device=DEVICE)


@pytest.mark.parametrize("name", BROUGHT)
def test_a_layer_that_a_model_brings_gives_the_logits_of_its_publisher(name: str, tmp_path: Path) -> None:
    compare_brought(written(name, tmp_path), name, tmp_path, 1e-3, exact=False, device=DEVICE)


@pytest.mark.skipif(INTERPRETED, reason="takes minutes")
@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("kind", KINDS)
def test_the_text_is_that_of_plain_decoding(folder: Path, tmp_path: Path, kind: str, temperature: float) -> None:
    """In a batch, with graphs that are captured at one step and replayed at others."""
    few = dict.fromkeys(range(6), 9.0)
    params = SamplingParams(max_tokens=60, temperature=temperature, seed=4, ignore_eos=True, logit_bias=few)
    prompts = [[(7 * seed + 3 * place) % VOCAB for place in range(10 + 15 * seed)] for seed in range(5)]
    llm = LLM(str(folder), head=str(save_heads(folder, tmp_path)), spec="off", device=DEVICE)
    off, on = (llm.generate(prompts, params, spec=spec) for spec in ("off", kind))
    assert [one.token_ids for one in on] == [one.token_ids for one in off]
    assert sum(one.metrics.accepted_tokens for one in on) > 20


@pytest.mark.skipif(INTERPRETED, reason="takes minutes")
@pytest.mark.parametrize(("spec", "temperature", "limits"), AHEAD_CASES)
def test_whole_drafts_are_those_of_the_host(
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    spec: str,
    temperature: float,
    limits: dict[str, Any],
) -> None:
    """With all levels in one graph, and level by level. Of two almost equal probabilities either may be the larger."""
    from foredraft.backends.cuda.backend import CudaBackend

    params = SamplingParams(max_tokens=12, temperature=temperature, seed=3, ignore_eos=True, **limits)
    heads = str(save_heads(folder, tmp_path))
    if spec.startswith("draft_model"):
        spec += f",model={folder}"
    monkeypatch.setattr(likely, "CONTENDERS", VOCAB)
    found = []
    for runs_ahead in (False, True):
        if not runs_ahead:
            monkeypatch.setattr("foredraft.proposers.model.run_ahead.RunAhead.__call__", lambda *given: None)
        else:
            monkeypatch.undo()
            monkeypatch.setattr(likely, "CONTENDERS", VOCAB)
        llm = LLM(str(folder), head=heads, spec="off", dtype="float32", device=DEVICE, exact=False)
        assert isinstance(llm.engine.runner.backend, CudaBackend)
        found.append(drafts_of(llm, spec, params))
    host, device = found
    same = sum(one.keys() == other.keys() for one, other in zip(host, device, strict=False))
    assert len(host) > 8 and same >= 0.9 * max(len(host), len(device))
