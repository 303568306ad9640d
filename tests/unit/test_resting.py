"""Steps that repeat decisions and do not make them again: nobody is queried, or only those who take next to no time and
find nothing."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Items
from typing import Any
from unittest import mock

import pytest

from foredraft.control.controller import Controller
from foredraft.control.costs import Calibration
from foredraft.control.economics import VerifyCurve
from foredraft.control.reasons import DRAFTED, NOTHING_PROPOSED
from foredraft.engine.speculation import FAILED, Speculation
from foredraft.proposers.registry import ProposerChoice, Spec
from foredraft.types import NO_DRAFT, TARGET, Commit, Draft, Sequence, Work
from tests.unit.unit_helpers import make_sequence

STEP_S, QUERY_S = 1.0, 0.5
AUTO = Spec((ProposerChoice("slow"),), adaptive=True)


class Machine:
    """Measures nothing: it knows what a run takes. Its clock stands still but for queries."""

    now = 0.0

    def cached(self) -> Calibration | None:
        return Calibration(VerifyCurve((1, 64), (STEP_S, STEP_S * 1.01)), 0, 0.0)

    def step(self, max_run_s: float = 0.0) -> Calibration | None:
        return self.cached()


class Slow:
    """Takes half a step and finds nothing."""

    name = "slow"
    taps: frozenset[int] = frozenset()
    free = False
    wants_target_argmax = False
    num_lookahead_tokens = 4
    query_s = QUERY_S

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.queried: list[list[int]] = []  # the sequences of every query
        self.draft = NO_DRAFT

    def propose(self, sequences: Items[Sequence], budgets: Items[int]) -> list[Draft]:
        self.machine.now += self.query_s
        self.queried.append([sequence.id for sequence in sequences])
        return [self.draft] * len(sequences)

    def observe(self, commits: Items[Commit]) -> None: ...
    def release(self, sequence_ids: Iterable[int]) -> None: ...
    def close(self) -> None: ...
    def clear(self) -> None: ...


class Quick(Slow):
    """Takes no time, and finds nothing as a rule."""

    free = True
    query_s = 0.0


class Steps:
    """Steps of some sequences, whose tokens are all the same."""

    def __init__(self, proposer: type[Slow] = Slow) -> None:
        self.machine = Machine()
        self.proposer = proposer(self.machine)
        self.speculation = Speculation(
            lambda choice: self.proposer, self.machine, vocab_size=9, clock=lambda: self.machine.now
        )
        self.speculation.prepare(AUTO)
        self.speculation.calibrate()
        self.sequences: list[Sequence] = []

    def add(self) -> Sequence:
        sequence = make_sequence([1, 2, 3], id=len(self.sequences), max_tokens=10_000)
        self.speculation.register(sequence, AUTO)
        self.sequences.append(sequence)
        return sequence

    def run(self, count: int) -> list[Work]:
        """Returns the works of the last step."""
        works: list[Work] = []
        for _ in range(count):
            for sequence in self.sequences:
                sequence.num_computed_tokens = sequence.num_tokens - 1
            works = self.speculation.propose([Work(sequence, 1, 4) for sequence in self.sequences])
            for sequence in self.sequences:
                sequence.token_ids.append(5)
            commits = [Commit(work.sequence, (5,), (TARGET,), (None,)) for work in works]
            self.speculation.observe(works, commits, STEP_S)
        return works


def watched_budgets() -> Any:
    return mock.patch.object(Controller, "budgets", autospec=True, side_effect=Controller.budgets)


def test_what_rests_is_not_decided_about_in_every_step() -> None:
    steps = Steps()
    sequence = steps.add()
    steps.run(200)
    before = sequence.counters.decisions.copy()
    with watched_budgets() as budgets:
        steps.run(160)
    assert budgets.call_count <= 6, "when a query is due, which is once in a hundred steps, and after it"
    told = sequence.counters.decisions - before
    assert told[NOTHING_PROPOSED] == 160, "each step says why it had no draft"
    assert sum(told.values()) == 320


def test_what_rests_is_probed_as_often_as_its_share_of_the_time_allows() -> None:
    steps = Steps()
    steps.add()
    steps.run(4000)  # until next to nothing is expected of it any more
    before = len(steps.proposer.queried)
    steps.run(1000)
    assert 5 <= len(steps.proposer.queried) - before <= 13, "half a step for every hundred steps"


def test_a_new_sequence_ends_the_rest() -> None:
    steps = Steps()
    steps.add()
    steps.run(200)
    newcomer = steps.add()
    with watched_budgets() as budgets:
        steps.run(1)
    assert [work.sequence.id for work in budgets.call_args.args[2]] == [0, newcomer.id]


def test_queries_that_find_nothing_are_repeated_and_not_decided_about() -> None:
    steps = Steps(Quick)
    sequence = steps.add()
    steps.run(50)
    before, queries = sequence.counters.decisions.copy(), len(steps.proposer.queried)
    with watched_budgets() as budgets:
        steps.run(160)
    assert len(steps.proposer.queried) - queries == 160, "a copy may begin with every token"
    assert budgets.call_count <= 160 / 16 + 1
    assert sequence.counters.decisions - before == {"slow: drafted": 160, NOTHING_PROPOSED: 160}


def test_what_a_repeated_query_finds_is_verified_in_the_same_step() -> None:
    steps = Steps(Quick)
    steps.add()
    steps.run(50)
    queries = len(steps.proposer.queried)
    steps.proposer.draft = Draft((5, 5), (-1, 0), (0.9, 0.8), ("slow", "slow"))
    (work,) = steps.run(1)
    assert work.draft.tokens == (5, 5)
    assert len(steps.proposer.queried) == queries + 1, "it is asked once"


def test_decisions_stand_when_drafts_end() -> None:
    steps = Steps(Quick)
    sequence = steps.add()
    steps.run(50)
    steps.proposer.draft = Draft((5, 5), (-1, 0), (0.9, 0.8), ("slow", "slow"))
    steps.run(1)
    steps.proposer.draft, before = NO_DRAFT, sequence.counters.decisions.copy()
    with watched_budgets() as budgets:
        (work,) = steps.run(1)
    assert not budgets.called and not work.draft
    assert sequence.counters.decisions - before == {"slow: drafted": 1, NOTHING_PROPOSED: 1}
    assert steps.speculation.reasons(0)[-1] != DRAFTED


def test_a_proposer_that_fails_in_a_repeated_query_is_not_asked_again() -> None:
    steps = Steps(Quick)
    sequence = steps.add()
    steps.run(50)
    with mock.patch.object(steps.proposer, "propose", side_effect=RuntimeError("a bug")) as propose:
        steps.run(20)
    assert propose.call_count == 1
    assert sequence.counters.decisions[FAILED] == 19


def test_a_prompt_beside_it_ends_the_repetition() -> None:
    steps = Steps(Quick)
    steps.add()
    steps.run(50)
    prompt = make_sequence([1, 2, 3], id=9, max_tokens=100)
    steps.speculation.register(prompt, AUTO)
    works = [Work(steps.sequences[0], 1, 4), Work(prompt, 2)]
    assert steps.speculation.propose(works) == works
    assert steps.speculation.reasons(1) == (), "a prompt that is not at its end is not decided about"
    assert steps.proposer.queried[-1] == [0]


class Head(Slow):
    """Takes a part of a step, and is always right."""

    name = "head"
    query_s = 0.3 * STEP_S

    def __init__(self, machine: Machine) -> None:
        super().__init__(machine)
        self.draft = Draft((5,), (-1,), (0.9,), ("head",))


class Copier(Quick):
    """Finds something for the sequences that it is told."""

    name = "copier"
    finds_for: frozenset[int] = frozenset()

    def propose(self, sequences: Items[Sequence], budgets: Items[int]) -> list[Draft]:
        drafts = super().propose(sequences, budgets)
        sure = Draft((5,), (-1,), (0.99,), ("copier",))
        return [sure if of.id in self.finds_for else none for of, none in zip(sequences, drafts, strict=True)]


def test_a_step_with_copies_at_hand_is_not_repeated_without_them(caplog: pytest.LogCaptureFixture) -> None:
    """A head need not draft where a copy was found. That does not stand for the steps after the copy."""
    machine, spec = Machine(), Spec((ProposerChoice("copier"), ProposerChoice("head")), adaptive=True)
    copier, head = Copier(machine), Head(machine)
    made = {"copier": copier, "head": head}
    speculation = Speculation(lambda choice: made[choice.name], machine, vocab_size=9, clock=lambda: machine.now)
    speculation.prepare(spec)
    speculation.calibrate()
    sequences = [make_sequence([1, 2, 3], id=number, max_tokens=10_000) for number in range(2)]
    for sequence in sequences:
        speculation.register(sequence, spec)

    def queried_by_step(finds_for: set[int]) -> list[int]:
        """The sequences for which the head was queried."""
        copier.finds_for, before = frozenset(finds_for), len(head.queried)
        for sequence in sequences:
            sequence.num_computed_tokens = sequence.num_tokens - 1
        works = speculation.propose([Work(sequence, 1, 4) for sequence in sequences])
        commits = []
        for work in works:
            origins = (*work.draft.origin[:1], TARGET)
            commits.append(Commit(work.sequence, (5,) * len(origins), origins, (None,) * len(origins)))
            work.sequence.token_ids += commits[-1].tokens
        speculation.observe(works, commits, STEP_S)
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
