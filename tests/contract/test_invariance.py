"""One seed, one text: the default model gives the same ids and logprob bits however a request is run."""

from __future__ import annotations

import gc
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from foredraft.config import DTYPES
from foredraft.llm import LLM
from foredraft.outputs import RequestOutput
from foredraft.params import SamplingParams

PASSAGE = (
    "The lighthouse keeper wrote in the log each evening: the wind, the height of the sea, the ships that passed, and "
    "whether the lamp had burned without a fault. In thirty years he had missed only two nights. "
)
PROMPT = "Summarise these notes in one paragraph.\n\n" + PASSAGE * 3 + "\n\nSummary:"
THINGS = ["a clock", "two rivers", "the number seven", "an old map", "snow", "a lost key", "the night train"]
OTHERS = [f"Write a short story about {thing}." for thing in THINGS]
COMMON: dict[str, Any] = {"max_tokens": 12, "logprobs": 3, "ignore_eos": True}
MODES = {
    "greedy": SamplingParams(temperature=0, **COMMON),
    "seeded": SamplingParams(temperature=0.8, top_p=0.95, seed=7, **COMMON),
}


def same(left: RequestOutput, right: RequestOutput) -> None:
    assert left.token_ids == right.token_ids
    assert left.logprobs == right.logprobs  # floats compared for equality: the bits


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "dtype",
    [dtype if dtype == "int4" else pytest.param(dtype, marks=pytest.mark.slow) for dtype in DTYPES],
)
def test_a_request_gives_the_same_bits_however_it_is_run(default_model: Path, dtype: str) -> None:
    check(default_model, dtype, "auto")


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_torch_backend_too(default_model: Path, dtype: str) -> None:
    check(default_model, dtype, "torch")


def check(model: Path, dtype: str, backend: str) -> None:
    def engine(**options: Any) -> LLM:
        gc.collect()
        return LLM(str(model), dtype=dtype, backend=backend, max_num_seqs=8, spec="off", **options)

    llm = engine()
    alone = {mode: llm.generate(PROMPT, params)[0] for mode, params in MODES.items()}
    assert alone["greedy"].metrics.cached_tokens == 0
    for mode, params in MODES.items():
        again = llm.generate(PROMPT, params)[0]
        assert again.metrics.cached_tokens > 100, "the second call hits the prefix cache"
        same(alone[mode], again)
        same(alone[mode], llm.generate([*OTHERS, PROMPT], params)[-1])

    for budget in (8, 77):
        llm = engine(max_num_batched_tokens=budget, prefix_caching=False)
        for mode, params in MODES.items():
            same(alone[mode], llm.generate([*OTHERS[:2], PROMPT], params)[-1])

    # Room for the prompt beside three short ones, but not for what those go on to write: the youngest is set aside.
    num_blocks = -(-len(alone["greedy"].prompt_token_ids) // 16) + 4
    llm = engine(kv_cache_tokens=num_blocks * 16, prefix_caching=False)
    for mode, params in MODES.items():
        output = llm.generate([*OTHERS[:3], PROMPT], [replace(params, max_tokens=40)] * 3 + [params])[-1]
        assert output.metrics.preemptions > 0, "the pool was meant to be too small"
        same(alone[mode], output)
