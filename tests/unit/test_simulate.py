"""The simulated machine: both modes against queueing theory, against each other, and the answers drawn from them."""

from __future__ import annotations

from dataclasses import replace
from math import inf
from random import Random
from statistics import fmean

import pytest

from foredraft.bench.cells import Cell
from foredraft.config import EngineConfig
from foredraft.control.costs import Calibration
from foredraft.control.economics import VerifyCurve
from foredraft.errors import InvalidParameter, InvalidSpec
from foredraft.simulate.engine import Clock
from foredraft.simulate.event_mode import EventReplica
from foredraft.simulate.fleet import Outcome, Slo, outcome_of, run_fleet
from foredraft.simulate.machine import NEVER, DraftFigures, DraftProfile, Machine, assumed
from foredraft.simulate.machine_file import profile_of
from foredraft.simulate.report import FLEET_COLUMNS, fleet_row, sentences
from foredraft.simulate.step_mode import RIGHT, SimulatedProposer, StepReplica
from foredraft.simulate.study import MOST_REPLICAS, Study, answer
from foredraft.simulate.table import StepTable
from foredraft.simulate.traffic import ANY, Kind, Mix, Record, Request
from foredraft.types import Sequence

STEP_S = 0.01
FLAT = Machine("flat", Calibration(VerifyCurve((1, 1024), (STEP_S, STEP_S)), 0, 0.0))
ROWS = (1, 2, 4, 8, 16, 32, 64)
COPIES, TALKS = DraftProfile(0.7, (1.0, 1.0, 0.9), (0.9, 0.8, 0.7)), DraftProfile(0.2, (1.0, 0.9), (0.4, 0.2))
SUFFIX = DraftFigures("suffix", True, {"copy": COPIES, "chat": TALKS}, 5e-5)
LINEAR = Machine(  # one row more costs a third of a plain step
    "linear",
    Calibration(VerifyCurve(ROWS, tuple(0.004 + 0.002 * rows for rows in ROWS)), 64, 5e-9),
    {"suffix": SUFFIX},
    step_s=2e-4,
    sequence_s=1e-4,
    token_s=5e-5,
)
ONE_AT_A_TIME = EngineConfig(max_num_seqs=1, prefix_caching=False)
SOME = EngineConfig(max_num_seqs=8, prefix_caching=False)
EQUAL = Mix("equal", (Kind("chat", 16, 10, 1.0, spread=0.0),))
MIXED = Mix("mixed", (Kind("chat", 60, 30, 0.6), Kind("copy", 120, 40, 0.4)))


def by_steps(machine: Machine, options: EngineConfig, spec: str, requests: list[Request]) -> Record:
    record = Record(len(requests))
    run_fleet([StepReplica(machine, options, machine.spec(spec), record)], requests)
    return record


def by_events(machine: Machine, options: EngineConfig, spec: str, requests: list[Request]) -> Record:
    record = Record(len(requests))
    table = StepTable.measured(machine, options, machine.spec(spec), requests[:200])
    run_fleet([EventReplica(table, options, record)], requests)
    return record


def mean_wait(requests: list[Request], record: Record, service_s: float) -> float:
    waits = (done - request.arrival_s - service_s for done, request in zip(record.done_s, requests))
    return sum(waits) / len(requests)


class TestAgainstQueueingTheory:
    @pytest.mark.parametrize("load", [0.3, 0.7])
    def test_one_sequence_at_a_time_is_an_m_d_1_queue(self, load: float) -> None:
        """Pollaczek and Khinchine: mean wait = ρ D / (2 (1 - ρ))."""
        service_s = 10 * STEP_S  # the prompt's step emits the first of ten tokens
        requests = EQUAL.requests(load / service_s, 60_000, seed=3)
        found = mean_wait(requests, by_events(FLAT, ONE_AT_A_TIME, "off", requests), service_s)
        assert found == pytest.approx(load * service_s / (2 * (1 - load)), rel=0.05)

    def test_both_modes_are_that_queue_request_by_request(self) -> None:
        requests = EQUAL.requests(7.0, 800)
        steps, events = (run(FLAT, ONE_AT_A_TIME, "off", requests) for run in (by_steps, by_events))
        assert list(steps.first_s) == pytest.approx(list(events.first_s), abs=1e-6)
        assert list(steps.done_s) == pytest.approx(list(events.done_s), abs=1e-6)

    @pytest.mark.parametrize("run", [by_steps, by_events])
    def test_where_rows_are_free_nobody_waits_longer_than_for_the_running_step(self, run: object) -> None:
        roomy = EngineConfig(max_num_seqs=64, prefix_caching=False, max_chunk_s=inf)
        requests = EQUAL.requests(20.0, 400)
        record = run(FLAT, roomy, "off", requests)  # type: ignore[operator]
        for request, done in zip(requests, record.done_s):
            assert 10 * STEP_S - 1e-9 <= done - request.arrival_s <= 11 * STEP_S + 1e-9

    def test_a_machine_that_gets_more_than_it_can_do_works_at_its_full_rate(self) -> None:
        requests = EQUAL.requests(30.0, 2000)  # three times as much
        record = by_events(FLAT, ONE_AT_A_TIME, "off", requests)
        outcome = outcome_of(requests, record, Slo(ttft=1.0))
        assert max(record.done_s) == pytest.approx(2000 * 10 * STEP_S, rel=0.01)
        assert outcome.good_share == 0


class TestEventsAgainstSteps:
    """The tolerance that docs/simulation.md states: means within 5 %, on loads that the machine can carry."""

    @pytest.mark.parametrize(("spec", "qps"), [("off", 1.0), ("off", 2.0), ("suffix", 2.0), ("auto", 1.0)])
    def test_means_agree(self, spec: str, qps: float) -> None:
        requests = MIXED.requests(qps, 240, seed=1)
        steps, events = (
            outcome_of(requests, run(LINEAR, SOME, spec, requests), Slo()) for run in (by_steps, by_events)
        )
        for name in ("tokens_per_s", "latency_mean", "ttft_mean", "itl_mean", "token_s"):
            assert getattr(events, name) == pytest.approx(getattr(steps, name), rel=0.05), name
        assert events.ttft_p99 == pytest.approx(steps.ttft_p99, rel=0.15)

    def test_steps_take_time_however_kinds_are_mixed(self) -> None:
        """Drafts of half of the requests fill a run so far that its last rows are dear. Steps of requests without any
        drafts take less, but no less than plain ones."""
        curve = VerifyCurve((1, 12, 64), (STEP_S, STEP_S, 100 * STEP_S))
        sure = DraftFigures("suffix", True, {"copy": DraftProfile.constant(1.0, 8), "still": NEVER}, 0.0)
        steep = Machine("steep", Calibration(curve, 0, 0.0), {"suffix": sure})
        sample = [Request(0.0, kind, 1, 20) for kind in ("copy", "still")]
        record = Record(8)
        replica = EventReplica(StepTable.measured(steep, SOME, steep.spec("suffix"), sample), SOME, record)
        for index in range(8):
            replica.add(index, Request(0.0, "still", 1, 20))
        replica.advance(inf)
        assert min(record.done_s) >= 20 * STEP_S

    def test_tokens_per_run_of_the_table_are_those_of_the_profiles(self) -> None:
        table = TestAnswers.STUDY.table(MIXED, "suffix")
        for kind, found in zip(table.kinds, table.tokens_per_run):
            expected = SUFFIX.by_kind[kind].tokens_per_run
            assert found[1] == pytest.approx(expected, rel=0.06)  # ends of outputs cut some drafts
            assert found[8] == pytest.approx(expected, rel=0.06)

    def test_the_controller_drafts_less_where_more_sequences_share_a_run(self) -> None:
        table = TestAnswers.STUDY.table(MIXED, "auto")
        copying = table.tokens_per_run[table.kinds.index("copy")]
        assert copying[1] > 1.5
        assert copying[8] < copying[1]


class TestStepMode:
    def test_the_table_decides_at_the_context_of_the_traffic(self) -> None:
        """After long prompts a row reads so many keys that no draft pays."""
        machine = replace(LINEAR, calibration=replace(LINEAR.calibration, seconds_per_key=1e-5))
        short, long = (Mix("", (Kind("copy", prompt, 40, 1.0, spread=0.0),)) for prompt in (16, 1000))
        few, many = (
            StepTable.measured(machine, SOME, machine.spec("auto"), mix.requests(1.0, 200)).rows[8]
            for mix in (short, long)
        )
        assert few > 10 and many < 8.5
        plain = StepTable.measured(machine, SOME, machine.spec("off"), long.requests(1.0, 200))
        assert plain.step_s[8] == pytest.approx(machine.run_s(8, 8 * 1020) + machine.overhead_s(8))

    def test_accepted_tokens_take_time(self) -> None:
        sure = DraftFigures("suffix", True, {ANY: DraftProfile.constant(1.0, 3)}, 0.0)
        quick = replace(FLAT, proposers={"suffix": sure})
        slow = replace(quick, token_s=1e-3)
        requests = [Request(0.0, ANY, 1, 5)]  # a run of four tokens, then one of the last
        took = [by_steps(machine, ONE_AT_A_TIME, "suffix", requests).done_s[0] for machine in (quick, slow)]
        assert took == pytest.approx([2 * STEP_S, 2 * STEP_S + 3e-3])

    def test_a_small_kv_cache_preempts_and_everybody_ends(self) -> None:
        options = EngineConfig(max_num_seqs=8, kv_cache_tokens=512, prefix_caching=False)
        requests = [Request(0.0, "chat", 50, 60) for _ in range(20)]
        record = Record(len(requests))
        replica = StepReplica(LINEAR, options, LINEAR.spec("suffix"), record)
        run_fleet([replica], requests)
        assert all(done > first for first, done in zip(record.first_s, record.done_s))
        assert replica.num_unfinished == 0

    def test_a_request_that_can_never_fit_is_refused(self) -> None:
        options = EngineConfig(max_num_seqs=8, kv_cache_tokens=64, prefix_caching=False)
        requests = [Request(0.0, "chat", 60, 60), Request(0.1, "chat", 10, 10), Request(0.1, "chat", 60, 60)]
        for make in (
            lambda record: StepReplica(FLAT, options, FLAT.spec("off"), record),
            lambda record: EventReplica(StepTable.measured(FLAT, options, FLAT.spec("off"), requests), options, record),
        ):
            record = Record(3)
            assert run_fleet([make(record)], requests) == 2, "an idle machine and a busy one refuse it"
            assert record.done_s[0] != record.done_s[0]  # NaN
            assert record.done_s[1] > 0.1

    def test_equal_prompts_are_found_in_the_prefix_cache(self) -> None:
        record = Record(2)
        replica = StepReplica(LINEAR, EngineConfig(), LINEAR.spec("off"), record)
        for index, arrival in enumerate((0.0, 10.0)):
            replica.advance(arrival)
            replica.add(index, Request(arrival, "chat", 200, 4), prompt=list(range(200)))
        replica.advance(inf)
        assert record.first_s[1] - 10.0 < record.first_s[0] / 4

    def test_an_aborted_request_leaves_nothing_behind(self) -> None:
        record = Record(2)
        replica = StepReplica(LINEAR, SOME, LINEAR.spec("suffix"), record)
        for index in range(2):
            replica.add(index, Request(0.0, "chat", 20, 50))
        replica.step()
        replica.abort(0)
        replica.advance(inf)
        assert record.done_s[0] != record.done_s[0] and record.done_s[1] > 0
        assert replica.num_unfinished == 0


class TestDrafts:
    def test_drafts_are_as_often_right_as_the_profile_says(self) -> None:
        clock = Clock()
        proposer = SimulatedProposer(SUFFIX, LINEAR, clock, Random(1))
        sequence = StepSequence("copy")
        drafts = [proposer.propose([sequence], [8], 0.0)[0] for _ in range(8000)]
        assert sum(map(bool, drafts)) / 8000 == pytest.approx(COPIES.coverage, rel=0.03)
        for depth, (length, survival) in enumerate(zip(COPIES.lengths, COPIES.survivals)):
            deep = [draft for draft in drafts if len(draft) > depth]
            right = sum(set(draft.tokens[: depth + 1]) == {RIGHT} for draft in deep)
            assert len(deep) / sum(map(bool, drafts)) == pytest.approx(length, rel=0.03)
            assert right / len(deep) == pytest.approx(survival, rel=0.03)
        assert clock.now == pytest.approx(8000 * SUFFIX.seconds)

    def test_the_budget_is_kept(self) -> None:
        proposer = SimulatedProposer(SUFFIX, LINEAR, Clock(), Random(1))
        drafts = proposer.propose([StepSequence("copy")] * 200, [1] * 200, 0.0)
        assert max(map(len, drafts)) == 1

    def test_trees_have_further_nodes_that_are_wrong(self) -> None:
        tree = DraftFigures("suffix", True, {ANY: replace(COPIES, branches=2.5)}, 0.0)
        drafts = SimulatedProposer(tree, LINEAR, Clock(), Random(1)).propose(
            [StepSequence("copy")] * 4000, [9] * 4000, 0.0
        )
        further = [sum(parent < 0 for parent in draft.parents) - 1 for draft in drafts if draft]
        assert fmean(further) == pytest.approx(2.5, rel=0.03)
        assert all(len(set(draft.tokens[draft.depth :])) == len(draft) - draft.depth for draft in drafts)

    def test_counts_become_a_profile(self) -> None:
        profile = DraftProfile.of_counts(100, [50, 40, 10], [40, 20, 5], 150)
        assert profile == DraftProfile(0.5, (1.0, 0.8, 0.2), (0.8, 0.5, 0.5), branches=1.0)
        assert profile.tokens_per_run == pytest.approx(1 + 65 / 100)
        assert DraftProfile.of_counts(100, [], [], 0).tokens_per_run == 1

    @pytest.mark.parametrize("rate", [0.55, 0.6, 0.7, 0.8])
    def test_a_cell_becomes_a_profile_that_drafts_and_accepts_as_much(self, rate: float) -> None:
        cell = Cell("suffix", "copy", 1, 0.0, "", 1, 1.0, 1.0, 1.0, rate, True)
        cell = replace(cell, drafted_per_run=1.4, acceptance_per_depth=[0.8, 0.7, 0.5, 0.2])
        profile = profile_of(cell)
        drafted = profile.coverage * sum(profile.lengths)
        assert drafted == pytest.approx(1.4 if rate < 0.8 else 1.0)  # a draft of one token cannot bring more
        assert profile.tokens_per_run - 1 == pytest.approx(rate * drafted)

    def test_a_proposer_can_be_assumed(self) -> None:
        name, figures = assumed("eagle:alpha=0.5,cost=0.1,k=2", plain_s=0.01)
        assert name == "eagle" and not figures.free
        assert figures.profile("anything").tokens_per_run == pytest.approx(1.75)
        assert FLAT.draft_s(figures, 1, 2) == pytest.approx(0.002)

    @pytest.mark.parametrize(
        "text", ["eagle", "eagle:alpha=2,cost=0.1,k=2", "nobody:alpha=0.5,cost=0,k=1", "eagle:k=x"]
    )
    def test_what_cannot_be_assumed_is_refused(self, text: str) -> None:
        with pytest.raises((InvalidParameter, InvalidSpec)):
            assumed(text, 0.01)

    def test_a_proposer_that_was_not_measured_is_refused(self) -> None:
        with pytest.raises(InvalidSpec, match="there is suffix"):
            LINEAR.spec("ngram")


class TestAnswers:
    STUDY = Study(LINEAR, SOME, Slo(ttft=1.0, itl=0.05), attain=0.95, count=1000)

    def test_fixed_drafts_flip_and_the_controller_does_not(self) -> None:
        found = answer(self.STUDY, MIXED, ["suffix", "auto"], 1, 3.0, lambda: None)
        plain, fixed, auto = found.settings
        assert plain.flip_qps is None and auto.flip_qps is None
        assert fixed.pays and fixed.flip_qps is not None
        assert found.rates[0] < fixed.flip_qps < found.rates[-1]
        for off, on, mine in zip(plain.sweep, fixed.sweep, auto.sweep):
            if off.good_share > 0.9:  # beyond that all of them only wait
                assert mine.token_s < 1.05 * min(off.token_s, on.token_s)

    def test_the_machines_needed_are_enough_and_one_fewer_is_not(self) -> None:
        needed = self.STUDY.replicas_needed(MIXED, "off", 20.0)
        assert needed is not None and needed > 2

        def share(replicas: int) -> float:
            return self.STUDY.outcome(MIXED, "off", replicas, 20.0).good_share

        assert share(needed) >= 0.95 > share(needed - 1)

    def test_an_objective_that_no_fleet_keeps(self) -> None:
        hopeless = replace(self.STUDY, slo=Slo(itl=0.001))
        assert hopeless.replicas_needed(MIXED, "off", 5.0) is None
        assert hopeless.capacity(MIXED, "off", 1) == 0

    def test_a_rate_that_a_machine_does_not_keep_up_with_needs_more_machines_even_without_an_objective(self) -> None:
        """Whoever waits gets an answer in the end, but the queue grows as long as requests come."""
        patient = replace(self.STUDY, slo=Slo())
        alone = patient.most_qps(MIXED, "off")
        assert patient.outcome(MIXED, "off", 1, 5.5 * alone).good_share == 1
        assert patient.outcome(MIXED, "off", 1, 5.5 * alone).goodput < 1.1 * alone
        assert patient.replicas_needed(MIXED, "off", 5.5 * alone) == 6
        assert patient.capacity(MIXED, "off", 2) <= 2 * alone
        assert patient.replicas_needed(MIXED, "off", 1.1 * MOST_REPLICAS * alone) is None

    def test_a_load_that_the_fleet_does_not_carry_is_named(self) -> None:
        patient = replace(self.STUDY, slo=Slo(), count=100)
        alone = patient.most_qps(MIXED, "off")
        told = {
            rate: " ".join(sentences(answer(patient, MIXED, [], 1, rate * alone, lambda: None))) for rate in (3, 1e4)
        }
        assert "need 3 machines with plain decoding. For the machines of this simulation that is an overload" in told[3]
        assert f"they serve at most {alone:.3g} a second (off), and the queue grows without end." in told[3]
        assert f"plain decoding would need more than {MOST_REPLICAS} machines." in told[1e4]
        overload = answer(patient, MIXED, [], 1, 3 * alone, lambda: None)
        row = dict(zip(FLEET_COLUMNS, fleet_row(overload, overload.plain), strict=True))
        assert row["TTFT p50"] == row["TTFT p99"] == "overload" and row["ITL p99"].endswith(" ms")
        strict = replace(patient, slo=self.STUDY.slo)
        (off,) = (busy := answer(strict, MIXED, [], 1, 0.98 * alone, lambda: None)).settings
        assert off.capacity_qps < busy.qps and not busy.is_overload(off)
        assert "carry no more than" in (said := " ".join(sentences(busy))) and "overload" not in said
        hopeless = replace(patient, slo=Slo(itl=0.001))
        (first, *_) = sentences(answer(hopeless, MIXED, [], 1, alone, lambda: None))
        assert "misses the objective with any number of machines" in first

    def test_what_a_fleet_carries_it_serves_well(self) -> None:
        most = self.STUDY.capacity(MIXED, "off", 2)
        assert self.STUDY.outcome(MIXED, "off", 2, most).good_share >= 0.95
        assert self.STUDY.outcome(MIXED, "off", 2, 1.1 * most).good_share < 0.95

    def test_two_machines_serve_more_than_twice_as_well_as_one(self) -> None:
        def wait(replicas: int) -> Outcome:
            return self.STUDY.outcome(MIXED, "off", replicas, 3.0 * replicas)

        assert wait(2).ttft_mean < wait(1).ttft_mean


class StepSequence(Sequence):
    """A sequence of which only the kind matters."""

    def __init__(self, kind: str) -> None:
        self.request_id = kind
