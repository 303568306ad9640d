"""Steps in which the controller lets nobody be queried: they repeat the decision, and do not make it again."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Items
from unittest import mock

from foredraft.control.controller import NOTHING_PROPOSED, Controller
from foredraft.control.costs import Calibration
from foredraft.control.economics import VerifyCurve
from foredraft.engine.speculation import Speculation
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

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.queried: list[list[int]] = []  # the sequences of every query

    def propose(self, sequences: Items[Sequence], budgets: Items[int]) -> list[Draft]:
        self.machine.now += QUERY_S
        self.queried.append([sequence.id for sequence in sequences])
        return [NO_DRAFT] * len(sequences)

    def observe(self, commits: Items[Commit]) -> None: ...
    def release(self, sequence_ids: Iterable[int]) -> None: ...
    def close(self) -> None: ...
    def clear(self) -> None: ...


class Steps:
    """Plain steps of some sequences."""

    def __init__(self) -> None:
        self.machine = Machine()
        self.proposer = Slow(self.machine)
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

    def run(self, count: int) -> None:
        for _ in range(count):
            for sequence in self.sequences:
                sequence.num_computed_tokens = sequence.num_tokens - 1
            works = self.speculation.propose([Work(sequence, 1, 4) for sequence in self.sequences])
            for sequence in self.sequences:
                sequence.token_ids.append(5)
            commits = [Commit(work.sequence, (5,), (TARGET,), (None,)) for work in works]
            self.speculation.observe(works, commits, STEP_S)


def test_what_rests_is_not_decided_about_in_every_step() -> None:
    steps = Steps()
    sequence = steps.add()
    steps.run(200)
    before = sequence.counters.decisions.copy()
    with mock.patch.object(Controller, "budgets", autospec=True, side_effect=Controller.budgets) as budgets:
        steps.run(160)
    assert budgets.call_count <= 6, "when a query is due, which is once in a hundred steps, and after it"
    told = sequence.counters.decisions - before
    assert told[NOTHING_PROPOSED] == 160, "each step says why it had no draft"
    assert sum(told.values()) == 320


def test_what_rests_is_probed_as_often_as_its_share_of_the_time_allows() -> None:
    steps = Steps()
    steps.add()
    steps.run(200)
    before = len(steps.proposer.queried)
    steps.run(1000)
    assert 5 <= len(steps.proposer.queried) - before <= 11, "half a step for every hundred steps"


def test_a_new_sequence_ends_the_rest() -> None:
    steps = Steps()
    steps.add()
    steps.run(200)
    newcomer = steps.add()
    with mock.patch.object(Controller, "budgets", autospec=True, side_effect=Controller.budgets) as budgets:
        steps.run(1)
    assert [work.sequence.id for work in budgets.call_args.args[2]] == [0, newcomer.id]
