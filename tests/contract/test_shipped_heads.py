"""The heads that come with Foredraft, on the model that they were trained for: its text, in fewer runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from foredraft.heads.catalog import shipped_heads
from foredraft.llm import LLM
from foredraft.models.catalog import open_checkpoint
from foredraft.outputs import RequestOutput
from foredraft.params import SamplingParams

QUESTIONS = ["Why does ice float on water?", "Write a Python function that reverses a list."]
FEWEST_TOKENS_PER_RUN = {"eagle": 1.8, "dflash": 1.8, "draft_model": 1.6}
TEMPERATURES = (0.0, 0.8)


@pytest.fixture(scope="module")
def llm(default_model: Path) -> LLM:
    return LLM(str(default_model), spec="off")


def answers(llm: LLM, temperature: float, spec: str) -> list[RequestOutput]:
    params = SamplingParams(max_tokens=32, temperature=temperature, seed=5)
    return llm.chat([[{"role": "user", "content": question}] for question in QUESTIONS], params, spec=spec)


@pytest.fixture(scope="module")
def plain(llm: LLM) -> dict[float, list[list[int]]]:
    return {
        temperature: [output.token_ids for output in answers(llm, temperature, "off")] for temperature in TEMPERATURES
    }


def test_all_of_them_are_found(default_model: Path) -> None:
    assert set(shipped_heads(open_checkpoint(default_model))) == set(FEWEST_TOKENS_PER_RUN)


@pytest.mark.parametrize("kind", FEWEST_TOKENS_PER_RUN)
def test_the_text_is_that_of_plain_decoding_in_fewer_runs(
    llm: LLM, plain: dict[float, list[list[int]]], kind: str
) -> None:
    for temperature in TEMPERATURES:
        outputs = answers(llm, temperature, kind)
        assert [output.token_ids for output in outputs] == plain[temperature]
        if temperature == 0:
            runs = sum(output.metrics.target_runs for output in outputs)
            assert sum(len(output.token_ids) for output in outputs) / runs > FEWEST_TOKENS_PER_RUN[kind]
