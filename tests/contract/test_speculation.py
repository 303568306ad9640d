"""Proposers that misbehave cost nobody anything: not the text, not the request, not the other requests."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable
from collections.abc import Sequence as Items
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch

from foredraft.control.controller import Candidate
from foredraft.control.reasons import RESTING
from foredraft.engine.calibration import Calibrator
from foredraft.llm import LLM
from foredraft.outputs import CompletionOutput
from foredraft.params import SamplingParams
from foredraft.proposers.base import Proposer
from foredraft.proposers.registry import ProposerChoice, Spec, parse_spec
from foredraft.types import Commit, Draft, Sequence
from tests.steady_controller import SteadyController
from tests.tiny_models import VOCAB, random_model, save_model

PROMPTS = [[3, 1, 4, 1, 5], [9, 2, 6, 5, 3, 5], [8, 9, 7]]
PARAMS = SamplingParams(max_tokens=40, temperature=0.8, seed=4, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(random_model("llama"), tmp_path_factory.mktemp("tiny"))


class Broken(Proposer):
    """Guesses nonsense, and raises in one of its methods at the third call."""

    name = "broken"
    num_lookahead_tokens = 4

    def __init__(self, where: str) -> None:
        self.where = where
        self.calls = 0

    def propose(self, sequences: Items[Sequence], budgets: Items[int], min_score: float) -> list[Draft]:
        self._maybe_raise("propose")
        if self.where == "too few" and len(sequences) > 1:
            return [Draft()]
        return [Draft((1,), (-1,), (0.9,), (self.name,)) for _ in sequences]

    def observe(self, commits: Items[Commit]) -> None:
        self._maybe_raise("observe")

    def release(self, sequence_ids: Iterable[int]) -> None:
        self._maybe_raise("release")

    def _maybe_raise(self, where: str) -> None:
        if where == self.where:
            self.calls += 1
            if self.calls >= 3:
                raise RuntimeError("a bug in a proposer")


_P = TypeVar("_P", bound=Proposer)


def install(llm: LLM, proposer: _P, name: str = "broken") -> _P:
    """Let requests name a proposer that was made here."""
    llm.engine.speculation.assignments.install(ProposerChoice(name), proposer)
    return proposer


@pytest.mark.parametrize("adaptive", [False, True])
@pytest.mark.parametrize("where", ["propose", "observe", "release", "too few"])
def test_a_proposer_that_fails_is_left_alone(
    folder: Path, where: str, adaptive: bool, caplog: pytest.LogCaptureFixture
) -> None:
    plain = LLM(str(folder)).generate(PROMPTS, PARAMS, spec="off")
    llm = LLM(str(folder))
    llm.engine.speculation.controller = SteadyController()  # a tiny model gains less than deciding takes
    broken = install(llm, Broken(where))
    spec = Spec((ProposerChoice("broken"), ProposerChoice("ngram")), adaptive=adaptive)
    with caplog.at_level(logging.ERROR):
        outputs = run(llm, [spec] * 3)
    assert [output.token_ids for output in outputs] == [output.token_ids for output in plain]
    if where in ("propose", "observe"):
        # Proposing for the batch fails, then for each of its three sequences; commits are told one by one.
        assert broken.calls == {"propose": 6, "observe": 5}[where], "after three failures in a row it is given up"
        assert len([record for record in caplog.records if "broken failed;" in record.message]) == 3
        assert len([record for record in caplog.records if "given up" in record.message]) == 1
        assert sum(output.metrics.decisions.get("proposer failed", 0) for output in outputs) > 30


@pytest.mark.parametrize("where", ["propose", "observe", "release"])
def test_requests_one_after_the_other_give_a_broken_proposer_up(
    folder: Path, where: str, caplog: pytest.LogCaptureFixture
) -> None:
    """What it does right in between does not help. A proposer that only fails to clean up goes on."""
    llm = LLM(str(folder))
    broken = install(llm, Broken(where))
    broken.calls = 2  # so that every call fails
    outputs: list[CompletionOutput] = []
    for _ in range(5):
        llm.engine.add("0", PROMPTS[0], PARAMS, Spec((ProposerChoice("broken"),)))
        while llm.engine.has_work:
            outputs += [event.output for event in llm.engine.step() if event.output]
    assert broken.calls - 2 == {"propose": 3, "observe": 3, "release": 5}[where]
    assert len([record for record in caplog.records if "given up" in record.message]) == (where != "release")
    assert (outputs[-1].metrics.drafted_tokens > 0) is (where == "release")


def test_a_proposer_that_fails_only_for_several_sequences_is_given_up(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Otherwise every step would pay for a call that fails and for one call per sequence."""

    class Lonely(Broken):
        def propose(self, sequences: Items[Sequence], budgets: Items[int], min_score: float) -> list[Draft]:
            self.calls += 1
            return super().propose(sequences, budgets, min_score)

    llm = LLM(str(folder))
    plain = llm.generate(PROMPTS, PARAMS, spec="off")
    lonely = install(llm, Lonely("too few"))
    outputs = run(llm, [Spec((ProposerChoice("broken"),))] * 3)
    assert [output.token_ids for output in outputs] == [output.token_ids for output in plain]
    assert lonely.calls == 3 * (1 + 3)
    several = [record for record in caplog.records if "failed for several sequences at once" in record.message]
    assert len(several) == 3 and several[0].exc_info is not None
    assert len([record for record in caplog.records if "given up" in record.message]) == 1


@pytest.mark.parametrize("where", ["propose", "observe"])
def test_a_proposer_that_fails_for_one_sequence_goes_on_for_the_others(folder: Path, where: str) -> None:
    llm = LLM(str(folder))

    class Particular(Broken):
        """Raises whenever it has to do with the second prompt."""

        def propose(self, sequences: Items[Sequence], budgets: Items[int], min_score: float) -> list[Draft]:
            if where == "propose" and any(
                sequence.token_ids[: len(PROMPTS[1])] == PROMPTS[1] for sequence in sequences
            ):
                raise RuntimeError("a bug in a proposer")
            return super().propose(sequences, budgets, min_score)

        def observe(self, commits: Items[Commit]) -> None:
            if where == "observe" and any(c.sequence.token_ids[: len(PROMPTS[1])] == PROMPTS[1] for c in commits):
                raise RuntimeError("a bug in a proposer")

    install(llm, Particular("nowhere"))
    for _ in range(5):
        outputs = run(llm, [Spec((ProposerChoice("broken"),))] * 3)
        assert [output.metrics.decisions.get("proposer failed", 0) > 0 for output in outputs] == [False, True, False]
        assert outputs[0].metrics.drafted_tokens > 30 and outputs[2].metrics.drafted_tokens > 30


def test_every_step_of_an_adaptive_request_has_its_reason(folder: Path) -> None:
    (output,) = LLM(str(folder)).generate([PROMPTS[0]], PARAMS, spec="auto")
    assert sum(output.metrics.decisions.values()) >= output.metrics.target_runs - 1, "the last token needs no guess"
    (plain,) = LLM(str(folder)).generate([PROMPTS[0]], PARAMS, spec="ngram")
    assert plain.metrics.decisions == {}


class Proposing(Broken):
    """Guesses what it is told to, and counts whom it holds."""

    def __init__(self, draft: Draft) -> None:
        super().__init__("nowhere")
        self.draft = draft

    def propose(self, sequences: Items[Sequence], budgets: Items[int], min_score: float) -> list[Draft]:
        return [self.draft for _ in sequences]


def a_draft(*tokens: int, score: float = 0.5, origin: str = "broken", q: Any = None) -> Draft:
    nodes = len(tokens)
    return Draft(tokens, (-1,) * nodes, (score,) * nodes, (origin,) * nodes, q)


@pytest.mark.parametrize(
    "draft",
    [
        *(a_draft(10**6), a_draft(VOCAB), a_draft(-1), a_draft(*range(50))),
        *(a_draft(1, score=0.0), a_draft(1, 2, score=float("nan")), a_draft(1, score=1.1)),
        *(a_draft(1, q=torch.ones(1, VOCAB - 1)), a_draft(1, q=torch.full((1, VOCAB), float("nan")))),
        *(a_draft(1, q=torch.eye(VOCAB)[2:3]), a_draft(1, q=torch.ones(1, VOCAB))),
        Draft((1, 2), (-1, -1), (0.5, float("nan")), ("broken",) * 2),
    ],
    ids=[
        *("far out", "one too many", "negative", "too long", "impossible", "no number", "more than sure"),
        *("narrow q", "q of no numbers", "q without it", "q of too much", "no number later"),
    ],
)
def test_drafts_that_the_target_cannot_run_count_as_a_failure(
    folder: Path, draft: Draft, caplog: pytest.LogCaptureFixture
) -> None:
    llm = LLM(str(folder))
    plain = llm.generate(PROMPTS, PARAMS, spec="off")
    install(llm, Proposing(draft))
    specs = [Spec((ProposerChoice("broken"),)), Spec(), Spec((ProposerChoice("ngram"),))]
    outputs = run(llm, specs)
    assert [output.token_ids for output in outputs] == [output.token_ids for output in plain]
    assert len([record for record in caplog.records if "broken failed" in record.message]) == 1
    failures = [output.metrics.decisions.get("proposer failed", 0) for output in outputs]
    assert failures[0] >= outputs[0].metrics.target_runs - 1 and failures[1:] == [0, 0]


def run(llm: LLM, specs: list[Spec], params: SamplingParams = PARAMS) -> list[CompletionOutput]:
    """What becomes of the prompts, each with its own setting."""
    for index, (prompt, spec) in enumerate(zip(PROMPTS, specs, strict=True)):
        llm.engine.add(str(index), prompt, params, spec)
    outputs: dict[str, CompletionOutput] = {}
    while llm.engine.has_work:
        outputs.update({event.request_id: event.output for event in llm.engine.step() if event.output})
    return [outputs[str(index)] for index in range(len(specs))]


def test_proposers_that_nobody_uses_are_let_go(folder: Path) -> None:
    """But for the last few, and never one whose text still runs; a model goes with its last proposer."""
    llm = LLM(str(folder))
    speculation, params = llm.engine.speculation, SamplingParams(max_tokens=2, ignore_eos=True)
    llm.engine.add("long", PROMPTS[0], replace(PARAMS, max_tokens=400), parse_spec("ngram:k=5+quantised:k=2"))
    for k in range(1, 30):
        llm.engine.add(str(k), PROMPTS[1], params, parse_spec(f"suffix:k={k}"))
        while llm.engine.is_live(str(k)):
            llm.engine.step()
        assert len(speculation.assignments.proposers) <= 10
    assert {"ngram:k=5", "quantised:k=2", "suffix:k=29"} <= set(speculation.assignments.proposers)
    assert set(llm.engine.kv.groups) == {"target", "quantised int4"}
    llm.engine.abort("long")
    kept = list(speculation.assignments.proposers)
    llm.generate(PROMPTS[0], params, spec=kept[0])
    llm.generate(PROMPTS[0], params, spec="ngram:k=7")
    assert kept[0] in speculation.assignments.proposers, "it was asked for a moment ago"
    for k in range(1, 9):
        llm.generate(PROMPTS[0], params, spec=f"ngram:k={k}")
    assert len(speculation.assignments.proposers) == 8
    assert set(llm.engine.kv.groups) == {"target"}


def test_a_proposer_that_has_failed_is_still_told_which_texts_are_gone(folder: Path) -> None:
    class Holding(Broken):
        released: set[int] = set()

        def release(self, sequence_ids: Iterable[int]) -> None:
            self.released |= set(sequence_ids)

    llm = LLM(str(folder))
    install(llm, Holding("observe"))
    run(llm, [Spec((ProposerChoice("broken"),))] * 3)
    assert len(Holding.released) == 3


@pytest.mark.parametrize("first", ["one", "other"])
def test_drafts_are_merged_in_the_order_of_the_request(folder: Path, first: str) -> None:
    llm = LLM(str(folder))
    names = ["one", "other"]
    for name in names:
        proposer = install(llm, Proposing(a_draft(1, origin=name)), name)
        proposer.name = name
    names.sort(key=lambda name: name != first)
    (output, _, _) = run(llm, [Spec(tuple(map(ProposerChoice, names))), Spec(), Spec()])
    assert set(output.metrics.drafted_by_origin) == {first}


@pytest.mark.parametrize(
    "method", ["prices", "wants", "min_score", "offers", "observe_query", "choose", "observe", "release", "make"]
)
@pytest.mark.parametrize("acceptance", ["match", "rejection"])
def test_a_controller_that_fails_leaves_plain_decoding(
    folder: Path,
    method: str,
    acceptance: str,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(*arguments: Any) -> Any:
        raise RuntimeError("a bug in the controller")

    llm = LLM(str(folder))
    params = replace(PARAMS, temperature=0.0, acceptance=acceptance)
    plain = llm.generate(PROMPTS, params, spec="off")
    speculation = llm.engine.speculation
    if method == "make":
        speculation.controller = None
        monkeypatch.setattr(Calibrator, "cached", fail)
        speculation.calibrate()
    else:
        setattr(speculation.controller, method, fail)
    specs = [parse_spec("auto(ngram+early_exit)"), parse_spec("auto"), parse_spec("off")]
    for _ in range(2):
        outputs = run(llm, specs, params)
        assert [output.token_ids for output in outputs] == [output.token_ids for output in plain]
    assert outputs[0].metrics.drafted_tokens == 0
    assert outputs[1].metrics.decisions == {"controller failed": outputs[1].metrics.target_runs - 1}
    assert outputs[2].metrics.decisions == {}
    assert len([record for record in caplog.records if "controller failed" in record.message]) == 1


@pytest.mark.parametrize("free", [True, False])
def test_what_a_request_queried_for_itself_is_not_charged_to_the_controller(folder: Path, free: bool) -> None:
    class Slow(Proposing):
        def propose(self, sequences: Items[Sequence], budgets: Items[int], min_score: float) -> list[Draft]:
            time.sleep(0.05)
            return super().propose(sequences, budgets, min_score)

    llm = LLM(str(folder))
    speculation = llm.engine.speculation
    assert speculation.controller is not None
    slow = Slow(a_draft(1))
    slow.free = free
    install(llm, slow)
    seen: list[tuple[str, float]] = []
    observe = speculation.controller.observe_query

    def watched(candidate: Candidate, *arguments: Any) -> None:
        seen.append((candidate.name, arguments[-1]))
        observe(candidate, *arguments)

    speculation.controller.observe_query = watched  # type: ignore[method-assign]
    run(llm, [Spec((ProposerChoice("broken"),)), parse_spec("auto"), Spec()], replace(PARAMS, max_tokens=24))
    assert {name for name, _ in seen} == {"suffix"}
    assert all(seconds < 0.05 for _, seconds in seen)
    assert ("broken", 0) not in speculation.controller._records


def test_decisions_about_queries_are_counted(folder: Path) -> None:
    llm = LLM(str(folder))
    controller = llm.engine.speculation.controller
    assert controller is not None
    controller.wants = lambda candidate, works, *_: [RESTING] * len(works)  # type: ignore[method-assign]
    output = run(llm, [parse_spec("auto")] * 3)[0]
    steps = output.metrics.target_runs - 1
    assert output.metrics.decisions == {"suffix: resting": steps, "nothing proposed": steps}
