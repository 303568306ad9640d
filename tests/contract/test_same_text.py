"""Architectures whose layers do something of their own with rows: windows, experts. The bits of a request are the same
alone, in a batch, in pieces of any size, after a hit of the prefix cache, and with drafts of every proposer that needs
nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from foredraft.llm import LLM
from foredraft.outputs import RequestOutput
from foredraft.params import SamplingParams
from tests.backends import BACKENDS
from tests.tiny_models import VOCAB, random_model, save_model

ARCHITECTURES = ["gemma3", "qwen3-moe", "gpt-oss"]
PROMPT = [(11 * place * place + 3) % VOCAB for place in range(90)]  # several windows long
OTHERS = [[(7 * place + index) % VOCAB for place in range(5 + 17 * index)] for index in range(5)]
COMMON: dict[str, Any] = {"max_tokens": 20, "logprobs": 2, "ignore_eos": True}
MODES = {
    "greedy": SamplingParams(temperature=0, **COMMON),
    "seeded": SamplingParams(temperature=0.9, top_p=0.95, seed=5, **COMMON),
}


@pytest.fixture(scope="module", params=ARCHITECTURES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(random_model(request.param), tmp_path_factory.mktemp("tiny"))


def same(left: RequestOutput, right: RequestOutput) -> None:
    assert left.token_ids == right.token_ids
    assert left.logprobs == right.logprobs  # floats compared for equality: the bits


# Torch's kernels are slow: there, one proposer that drafts trees.
SPECS = {"torch": ["early_exit:k=3,width=2"], "native": ["ngram:k=5", "suffix", "lookahead", "early_exit:k=3,width=2"]}


@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.slow)])
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_request_gives_the_same_bits_however_it_is_run(folder: Path, backend: str, dtype: str) -> None:
    def engine(**options: Any) -> LLM:
        return LLM(str(folder), dtype=dtype, backend=backend, device="cpu", spec="off", threads=2, **options)

    llm = engine(max_num_seqs=8)
    alone = {mode: llm.generate([PROMPT], params)[0] for mode, params in MODES.items()}
    for mode, params in MODES.items():
        again = llm.generate([PROMPT], params)[0]
        assert again.metrics.cached_tokens > 60, "the second call hits the prefix cache"
        same(alone[mode], again)
        same(alone[mode], llm.generate([*OTHERS, PROMPT], params)[-1])
        for spec in SPECS[backend]:
            same(alone[mode], llm.generate([*OTHERS[:2], PROMPT], params, spec=spec)[-1])
    for options in ({"max_num_batched_tokens": 8}, {"max_num_batched_tokens": 77}, {"kv_cache_tokens": 160}):
        llm = engine(max_num_seqs=4, prefix_caching=False, **options)
        for mode, params in MODES.items():
            same(alone[mode], llm.generate([*OTHERS[:2], PROMPT], params)[-1])
