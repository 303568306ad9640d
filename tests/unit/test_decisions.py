"""What a step asks of whom: proposers that find nothing, that fail, and that need not draft because others have."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence as Items
from unittest import mock

import pytest

from foredraft.config import EngineConfig
from foredraft.control.costs import Calibration
from foredraft.control.economics import VerifyCurve
from foredraft.control.reasons import FAILED, NOTHING_PROPOSED, RESTING
from foredraft.proposers.base import Proposer
from foredraft.proposers.registry import ProposerChoice, Spec
from foredraft.simulate.engine import Clock, SimulatedEngine
from foredraft.types import NO_DRAFT, Draft, Sequence
from tests.unit.unit_helpers import make_sequence

STEP_S = 1.0
RIGHT = 5


class Finds(Proposer):
    """Takes its time, and finds one right token for the sequences that it is told."""

    num_lookahead_tokens = 4

    def __init__(self, name: str, query_s: float, score: float = 0.9) -> None:
        self.name, self.query_s, self.score = name, query_s, score
        self.free = not query_s
        self.clock = Clock()
        self.finds_for: set[int] = set()
        self.queried: list[list[int]] = []  # the sequences of every query

    def propose(self, sequences: Items[Sequence], budgets: Items[int], min_score: float) -> list[Draft]:
        self.clock.now += self.query_s
        self.queried.append([sequence.id for sequence in sequences])
        found = Draft((RIGHT,), (-1,), (self.score,), (self.name,))
        return [found if sequence.id in self.finds_for else NO_DRAFT for sequence in sequences]


def engine_with(*proposers: Finds, **options: int) -> SimulatedEngine:
    """On a machine where rows are nearly free."""
    made, clock = {proposer.name: proposer for proposer in proposers}, Clock()
    for proposer in proposers:
        proposer.clock = clock
    calibration = Calibration(VerifyCurve((1, 64), (STEP_S, STEP_S * 1.01)), 0, 0.0)
    return SimulatedEngine(
        *(EngineConfig(**options), calibration, 9, lambda choice: made[choice.name]),
        *(lambda sequence, position: RIGHT, lambda load, accepted: calibration.curve.seconds_at(load.rows), clock),
    )


def begin(engine: SimulatedEngine, *names: str, count: int = 1) -> list[Sequence]:
    sequences = [make_sequence([1, 2, 3], id=number, max_tokens=10_000) for number in range(count)]
    for sequence in sequences:
        engine.add(sequence, Spec(tuple(map(ProposerChoice, names)), adaptive=True))
    return sequences


def run(engine: SimulatedEngine, steps: int) -> Counter[tuple[int, str]]:
    """How often each sequence was told each reason."""
    told: Counter[tuple[int, str]] = Counter()
    for _ in range(steps):
        for index, work in enumerate(engine.step().works):
            told.update((work.sequence.id, reason) for reason in engine.speculation.reasons(index))
    return told


def test_what_does_not_pay_is_tried_as_often_as_a_share_of_the_time_allows() -> None:
    slow = Finds("slow", 0.5 * STEP_S)
    engine = engine_with(slow)
    begin(engine, "slow")
    run(engine, 3000)  # until next to nothing is expected of it any more
    before = len(slow.queried)
    run(engine, 1000)
    assert 3 <= len(slow.queried) - before <= 7, "half a step for every two hundred steps"


def test_a_copy_may_begin_with_every_token() -> None:
    quick = Finds("quick", 0.0)
    engine = engine_with(quick)
    begin(engine, "quick")
    run(engine, 50)
    before = len(quick.queried)
    told = run(engine, 100)
    assert len(quick.queried) - before == 100, "it takes no time"
    assert told[0, NOTHING_PROPOSED] == 100, "each step says why it had no draft"
    quick.finds_for = {0}
    (work,) = engine.step().works
    assert work.draft.tokens == (RIGHT,)


def test_a_proposer_that_fails_is_not_asked_again() -> None:
    quick = Finds("quick", 0.0)
    engine = engine_with(quick)
    begin(engine, "quick")
    run(engine, 50)
    with mock.patch.object(quick, "propose", side_effect=RuntimeError("a bug")) as propose:
        told = run(engine, 20)
    assert propose.call_count == 1
    assert told[0, FAILED] == 20


def test_a_prompt_beside_it_is_not_decided_about() -> None:
    quick = Finds("quick", 0.0)
    engine = engine_with(quick)
    begin(engine, "quick")
    run(engine, 50)
    prompt = make_sequence([1] * 200, id=9, max_tokens=100)
    engine.add(prompt, Spec((ProposerChoice("quick"),), adaptive=True))
    works = engine.step().works
    assert [work.sequence.id for work in works] == [0, 9] and not works[1].reaches_end
    assert engine.speculation.reasons(1) == ()
    assert quick.queried[-1] == [0]


def test_a_head_need_not_draft_where_a_copy_was_found(caplog: pytest.LogCaptureFixture) -> None:
    """That does not stand for the steps after the copy."""
    copier, head = Finds("copier", 0.0, score=0.99), Finds("head", 0.3 * STEP_S)
    engine = engine_with(copier, head)
    begin(engine, "copier", "head", count=2)
    head.finds_for = {0, 1}

    def queried_by_step(finds_for: set[int]) -> list[int]:
        """The sequences for which the head was queried."""
        copier.finds_for, before = finds_for, len(head.queried)
        engine.step()
        return [number for query in head.queried[before:] for number in query]

    for _ in range(60):  # until all are known to be right
        queried_by_step(set())
        queried_by_step({0, 1})
    for copies, left in (({0}, [1]), ({0, 1}, [])):
        assert queried_by_step(set()) == [0, 1]
        assert queried_by_step(copies) == left
        assert queried_by_step(set()) == [0, 1], "as soon as the copy ends"
        assert queried_by_step(set()) == [0, 1]
    assert not caplog.records, "the controller has not failed"


def test_sequences_without_slots_for_drafts_do_not_keep_a_batch_from_resting() -> None:
    """A step may have nine rows: two of eight sequences get no slot, and are not looked at."""
    slow = Finds("slow", 0.5 * STEP_S)
    engine = engine_with(slow, max_num_seqs=8, max_num_batched_tokens=9)
    begin(engine, "slow", count=8)
    run(engine, 500)
    told = run(engine, 100)
    assert min(told[sequence_id, RESTING] for sequence_id in range(8)) > 90


def test_a_fixed_setting_is_drafted_beside_a_batch_that_would_rest() -> None:
    slow, fixed = Finds("slow", 0.5 * STEP_S), Finds("fixed", 0.0)
    engine = engine_with(slow, fixed)
    begin(engine, "slow", count=2)
    chosen = make_sequence([1, 2, 3], id=7, max_tokens=10_000)
    engine.add(chosen, Spec((ProposerChoice("fixed"),)))
    run(engine, 300)
    before = len(fixed.queried)
    run(engine, 50)
    assert len(fixed.queried) - before == 50


def test_a_fixed_setting_is_told_no_decision() -> None:
    """Not even in its first step, if the controller rested while nothing ran."""
    slow, fixed = Finds("slow", 0.5 * STEP_S), Finds("fixed", 0.0)
    engine = engine_with(slow, fixed)
    (sequence,) = begin(engine, "slow")
    run(engine, 500)
    engine.abort(sequence)
    engine.add(make_sequence([1, 2, 3], id=7, max_tokens=10_000), Spec((ProposerChoice("fixed"),)))
    assert run(engine, 5) == {}
