"""A draft model that was distilled from its target and knows the most frequent tokens, as it comes with Foredraft."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from foredraft.backends.choose import choose_backend
from foredraft.batch import pack
from foredraft.errors import InvalidModel, InvalidSpec
from foredraft.heads.base import HeadConfig
from foredraft.heads.draft_model.serve import load_draft_model
from foredraft.heads.draft_model.train import as_head
from foredraft.heads.engines import Engine
from foredraft.heads.export import export
from foredraft.heads.files import read_tensors, read_weights, target_digest, write_head
from foredraft.heads.weights import HeadWeights
from foredraft.llm import LLM
from foredraft.models.catalog import open_checkpoint
from foredraft.params import SamplingParams
from foredraft.runtime.kv import KVCache
from foredraft.runtime.runner import Runner
from foredraft.types import Sequence, Work
from tests.backends import BACKENDS
from tests.tiny_models import VOCAB, random_model, save_model

KNOWN = torch.arange(3, VOCAB, 2)
PROMPTS = [[3, 8, 4, 15, 5], [9, 2, 6, 5, 3, 5, 200, 201], [8, 9, 7]]  # even tokens are unknown
ACCEPTANCE = [0.6, 0.5]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(random_model("llama"), tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def llama() -> Any:
    """Its weights are bfloat16, so that its file holds them as they are."""
    model = random_model("llama-tied", seed=7)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.bfloat16())
    return model


@pytest.fixture(scope="module")
def trained(folder: Path, llama: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A draft model as training writes it."""
    place = save_model(llama, tmp_path_factory.mktemp("trained"))
    file = place / "config.json"
    record = {"target_name": "tiny", "target_digest": target_digest(open_checkpoint(folder))}
    record |= {"acceptance": ACCEPTANCE, "provenance": {"steps": 1}}
    file.write_text(json.dumps({**json.loads(file.read_text()), "foredraft": record}))
    return place


@pytest.fixture(scope="module")
def head(folder: Path, trained: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("head")
    write_head(place, *as_head(trained, open_checkpoint(folder), KNOWN))
    return place


@pytest.mark.parametrize("backend_name", BACKENDS)
def test_its_logits_are_those_of_the_whole_model_with_the_embeddings_of_other_tokens_made_from_the_targets(
    folder: Path, llama: Any, head: Path, backend_name: str
) -> None:
    tokens = [(7 * place * place + 4 * place + 3) % VOCAB for place in range(40)]  # every other one is unknown
    backend = choose_backend(backend_name, "float32", torch.device("cpu"), threads=2)
    config, theirs = HeadConfig.read(head), open_checkpoint(folder).weight("model.embed_tokens.weight")
    decoder = load_draft_model(
        HeadWeights(config, read_weights(head, config), "float32", True, backend), theirs, 64, backend
    )
    kv = KVCache(num_blocks=4, block_size=16)
    runner = Runner(decoder, backend, kv.add_group("draft", decoder.config, backend))
    params = SamplingParams(prompt_logprobs=0)  # asks for the logits of every prompt position
    sequence = Sequence(0, "", 0, tokens, len(tokens), params, seed=0, max_tokens=1, block_table=[3, 2, 1, 0])
    found = runner.forward(pack([Work(sequence, len(tokens))], kv.block_size)).logits

    table = llama.get_input_embeddings().weight.detach()
    rows = table.clone()
    unknown = torch.ones(VOCAB, dtype=torch.bool).index_fill_(0, KNOWN, False)
    rows[unknown] = theirs.dense()[unknown] @ read_tensors(head, config)["unknown_proj.weight"].float().T
    with torch.no_grad():
        expected = llama(inputs_embeds=rows[tokens][None]).logits[0][:, KNOWN]
    assert (found - expected).abs().max() < 1e-4 * expected.std()


SPECS = ["draft_model", "draft_model:k=3,width=2", "staged:chain=ngram>draft_model", "suffix+draft_model:dtype=int8"]


@pytest.mark.parametrize("acceptance", ["match", "rejection", "block"])
@pytest.mark.parametrize("spec", SPECS)
def test_it_drafts_what_it_knows_and_changes_no_text(
    folder: Path, head: Path, spec: str, acceptance: str, caplog: pytest.LogCaptureFixture
) -> None:
    if acceptance == "block" and "width" in spec:
        spec = "draft_model:k=3"
    llm = LLM(str(folder), head=str(head), spec="off")
    params = SamplingParams(max_tokens=30, temperature=0.0, seed=2, ignore_eos=True, acceptance=acceptance)
    sampled = replace(params, temperature=0.8)
    for each in (params, sampled) if acceptance == "match" else (params,):
        plain, drafted = (llm.generate(PROMPTS, each, spec=one) for one in ("off", spec))
        assert [one.token_ids for one in drafted] == [one.token_ids for one in plain]
        assert all(one.metrics.drafted_by_origin.get(spec.split(":")[0].split("+")[-1], 0) > 0 for one in drafted)
    assert all(one.error is None for one in llm.generate(PROMPTS, sampled, spec=spec))
    assert not caplog.records, "no proposer failed"


def test_it_brings_its_measured_acceptance(folder: Path, head: Path) -> None:
    llm = LLM(str(folder), head=str(head), spec="off")
    llm.generate(PROMPTS, SamplingParams(max_tokens=2), spec="draft_model")
    proposer: Any = llm.engine.speculation.assignments.proposers["draft_model"].proposer
    assert list(proposer.acceptance) == ACCEPTANCE
    assert llm.engine.runner.taps is None, "it reads tokens alone"


def test_without_one_a_sentence_says_what_to_write(folder: Path) -> None:
    sentence = "draft_model needs a model, because none was loaded .* draft_model:model=NAME_OR_PATH, or train one"
    with pytest.raises(InvalidSpec, match=sentence):
        LLM(str(folder), spec="off").generate("x", spec="draft_model")


def test_what_does_not_fit_is_refused(folder: Path, head: Path, trained: Path, tmp_path: Path) -> None:
    other = save_model(random_model("llama", seed=9), tmp_path / "other")
    with pytest.raises(InvalidModel, match="the head was trained for tiny, whose weights are not those of"):
        LLM(str(other), head=str(head))
    with pytest.raises(InvalidModel, match="the head was trained for tiny, whose weights are not those of"):
        as_head(trained, open_checkpoint(other), KNOWN)
    with pytest.raises(InvalidModel, match="other engines do not load; export the folder that `foredraft train draft`"):
        export(head, Engine.vllm, tmp_path / "out", open_checkpoint(folder), "org/tiny")
    config = json.loads((head / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "taps": [1]}))
    with pytest.raises(InvalidModel, match=r"field taps is \[1\], but a draft model reads none"):
        HeadConfig.read(tmp_path)
