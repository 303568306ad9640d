"""`min_tokens`: the output does not end before, whatever would end it, and speculation changes nothing about it."""

from __future__ import annotations

from typing import Any

import pytest

from foredraft.llm import LLM
from foredraft.params import SamplingParams
from tests.tiny_models import random_model, save_model

PROMPT = [5, 6, 7, 5, 6, 7, 5, 6]
SPECS = ["off", "ngram", "suffix", "quantised:k=4", "early_exit:k=3,width=2"]


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    return LLM(str(save_model(random_model("llama"), tmp_path_factory.mktemp("tiny"))), threads=1)


def write(llm: LLM, spec: str = "off", **fields: Any) -> Any:
    params = SamplingParams(**{"max_tokens": 24, "temperature": 1.0, "seed": 3, **fields})
    return llm.generate(PROMPT, params, spec=spec)[0]


@pytest.mark.parametrize("min_tokens", [0, 1, 7, 24])
@pytest.mark.parametrize("acceptance", ["match", "rejection", "block"])
def test_an_end_that_the_model_prefers_comes_right_behind_them(llm: LLM, min_tokens: int, acceptance: str) -> None:
    (end, *_) = sorted(llm.engine.eos_token_ids)
    for spec in SPECS:
        output = write(llm, spec, min_tokens=min_tokens, logit_bias={end: 100}, acceptance=acceptance)
        assert end not in output.token_ids[:min_tokens]
        assert len(output.token_ids) == min(24, min_tokens + 1)
        assert output.finish_reason == ("stop" if min_tokens < 24 else "length")


@pytest.mark.parametrize("spec", SPECS[1:])
def test_speculation_changes_nothing(llm: LLM, spec: str) -> None:
    for seed in range(6):
        fields: dict[str, Any] = {"seed": seed, "min_tokens": 10, "logit_bias": dict.fromkeys((1, 2, 7), 4)}
        fields["stop_token_ids"] = [7]
        assert write(llm, spec, **fields).token_ids == write(llm, **fields).token_ids


def test_stop_tokens_and_stop_strings_wait_too(llm: LLM) -> None:
    free = write(llm, ignore_eos=True, temperature=0)
    stop = write(llm, ignore_eos=True, temperature=0, stop=free.text[:2])
    assert stop.finish_reason == "stop" and len(stop.token_ids) < 4
    late = write(llm, ignore_eos=True, temperature=0, stop=free.text[:2], min_tokens=12)
    assert late.token_ids[:12] == free.token_ids[:12]
    banned = write(llm, ignore_eos=True, stop_token_ids=[9], logit_bias={9: 100}, min_tokens=5)
    assert banned.token_ids.index(9) == 5 and banned.outputs[0].stop_reason == 9


def test_a_grammar_that_ends_earlier_ends_the_output(llm: LLM) -> None:
    pytest.importorskip("llguidance")
    output = write(llm, grammar={"choice": ["yes", "no"]}, min_tokens=20)
    assert output.text in ("yes", "no") and output.finish_reason == "stop"
    longer = write(llm, "grammar", grammar={"regex": "[ab]*"}, min_tokens=9, max_tokens=60)
    assert len(longer.token_ids) > 9 and set(longer.text) <= {"a", "b"}
