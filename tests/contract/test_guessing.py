"""Proposers that misbehave cost nobody anything: not the text, not the request, not the other requests."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from collections.abc import Sequence as Items
from pathlib import Path

import pytest

from foredraft.llm import LLM
from foredraft.params import SamplingParams
from foredraft.proposers.registry import ProposerChoice, Spec
from foredraft.types import Commit, Draft, Sequence
from tests.tiny_models import random_model, save_model

PROMPTS = [[3, 1, 4, 1, 5], [9, 2, 6, 5, 3, 5], [8, 9, 7]]
PARAMS = SamplingParams(max_tokens=40, temperature=0.8, seed=4, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(random_model("llama"), tmp_path_factory.mktemp("tiny"))


class Broken:
    """Guesses nonsense, and raises in one of its methods at the third call."""

    name = "broken"
    taps: frozenset[int] = frozenset()
    free = True
    wants_said = False
    num_lookahead_tokens = 4

    def __init__(self, where: str) -> None:
        self.where = where
        self.calls = 0

    def propose(self, sequences: Items[Sequence], budgets: Items[int]) -> list[Draft]:
        self._maybe_raise("propose")
        if self.where == "too few" and len(sequences) > 1:
            return [Draft()]
        return [Draft((1,), (-1,), (0.9,), (self.name,)) for _ in sequences]

    def observe(self, commits: Items[Commit]) -> None:
        self._maybe_raise("observe")

    def release(self, sequence_ids: Iterable[int]) -> None:
        self._maybe_raise("release")

    def clear(self) -> None: ...

    def _maybe_raise(self, where: str) -> None:
        if where == self.where:
            self.calls += 1
            if self.calls >= 3:
                raise RuntimeError("a bug in a proposer")


@pytest.mark.parametrize("adaptive", [False, True])
@pytest.mark.parametrize("where", ["propose", "observe", "release", "too few"])
def test_a_proposer_that_fails_is_left_alone(
    folder: Path, where: str, adaptive: bool, caplog: pytest.LogCaptureFixture
) -> None:
    plain = LLM(str(folder)).generate(PROMPTS, PARAMS, spec="off")
    llm = LLM(str(folder))
    broken = llm.engine.guesser.proposers["broken"] = Broken(where)
    spec = Spec((ProposerChoice("broken"), ProposerChoice("ngram")), adaptive=adaptive)
    for index, prompt in enumerate(PROMPTS):
        llm.engine.add(str(index), prompt, PARAMS, spec)
    outputs = {}
    with caplog.at_level(logging.ERROR):
        while llm.engine.has_work:
            outputs.update({event.request_id: event.output for event in llm.engine.step() if event.output})
    assert [outputs[str(index)].token_ids for index in range(3)] == [output.token_ids for output in plain]
    if where in ("propose", "observe"):
        assert broken.calls == 3, "it is not asked again"
        assert len([record for record in caplog.records if "broken failed" in record.message]) == 1
        assert sum(output.metrics.decisions.get("proposer failed", 0) for output in outputs.values()) > 30


def test_every_step_of_an_adaptive_request_has_its_reason(folder: Path) -> None:
    (output,) = LLM(str(folder)).generate([PROMPTS[0]], PARAMS, spec="auto")
    assert sum(output.metrics.decisions.values()) >= output.metrics.target_runs - 1, "the last token needs no guess"
    (plain,) = LLM(str(folder)).generate([PROMPTS[0]], PARAMS, spec="ngram")
    assert plain.metrics.decisions == {}
