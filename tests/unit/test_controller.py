"""The controller in a simulated world (controller_world.py)."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from foredraft.control.acceptance import Acceptance
from foredraft.control.controller import DRAFTED, NOTHING_PROPOSED, PROBE, RESTING, Controller, Load, StepTimes
from foredraft.control.costs import Calibration, Costs
from foredraft.control.economics import VerifyCurve
from foredraft.params import SamplingParams
from foredraft.types import NO_DRAFT, Commit, Draft, Sequence, Work
from tests.unit.controller_world import CHEAP, DEAR, ROWS, World, chain


def test_what_pays_is_drafted_and_what_does_not_is_not() -> None:
    good, bad = World(CHEAP), World(CHEAP)
    good.write(2000, lambda _: 0.9)
    bad.write(2000, lambda _: 0.01)
    assert good.plain / good.elapsed > 3
    assert bad.elapsed <= 1.02 * bad.plain + 0.05
    assert sum(bad.verified[-200:]) < 20
    assert good.reasons[DRAFTED] > 0.95 * good.reasons.total()


def test_it_comes_close_to_the_best_fixed_length() -> None:
    for truth, alpha in ((CHEAP, 0.7), (CHEAP, 0.4), (DEAR, 0.9), (DEAR, 0.5)):
        world = World(truth)
        world.write(3000, lambda _, alpha=alpha: alpha)  # type: ignore[misc]
        tokens = [sum(alpha**depth for depth in range(k + 1)) for k in range(9)]
        best = max(e * truth.curve.seconds_at(1) / truth.curve.seconds_at(k + 1) for k, e in enumerate(tokens))
        assert world.plain / world.elapsed > 0.95 * best, (alpha, best)


@pytest.mark.parametrize("calibrated", [DEAR, Calibration(VerifyCurve(ROWS, (0.012,) * 7), 0, 0.0)])
def test_wrong_costs_are_found_out(calibrated: Calibration) -> None:
    """Calibrated as if rows were free, on a machine where they are dear: real steps correct it."""
    world = World(DEAR, calibrated)
    world.write(3000, lambda _: 0.15)
    assert world.elapsed <= 1.02 * world.plain + 0.05


@pytest.mark.parametrize("noise", [0.0, 0.5])
@pytest.mark.parametrize("truth", [CHEAP, DEAR])
def test_adversaries_cost_next_to_nothing(truth: Calibration, noise: float) -> None:
    """Always wrong; right for 50 tokens and then always wrong; sure of itself; and all that on a noisy machine."""
    sure: Callable[[int], Draft] = lambda _: chain(16, 0.99)  # noqa: E731
    for right in (lambda _: 0.0, lambda written: float(written < 50), lambda written: float(written // 40 % 2 == 0)):
        world = World(truth, noise=noise)
        world.write(1500, right, sure)
        assert world.elapsed <= 1.02 * world.plain + 0.05, (truth, right(0))


def test_speculation_comes_back_by_itself() -> None:
    world = World(CHEAP)
    world.write(800, lambda _: 0.0)
    quiet = len(world.verified)
    world.write(800, lambda _: 0.95)
    assert sum(world.verified[quiet - 200 : quiet]) < 40
    assert sum(world.verified[quiet + 30 : quiet + 60]) > 100, "what is right in the shadow is soon verified again"


@pytest.mark.parametrize("hiccup_every", [6, 7, 8, 10, 30])
def test_a_slow_moment_of_the_machine_is_not_blamed_on_drafts(hiccup_every: int) -> None:
    """Also where a row costs a third of a run, so that little is gained with which a slow step could be paid."""
    dear = Calibration(VerifyCurve(ROWS, tuple(0.006 + 0.0025 * rows for rows in ROWS)), 0, 0.0)
    world = World(dear, hiccup_every=hiccup_every)
    world.write(1000, lambda _: 0.8, lambda _: chain(4))
    assert sum(count > 0 for count in world.verified) > 0.9 * len(world.verified)


def test_large_batches_flip_the_sign() -> None:
    """The same acceptance pays alone and not among many, because more rows then cost what they are worth."""
    bound = Calibration(VerifyCurve(ROWS, tuple(max(0.010, 0.001 * rows) for rows in ROWS)), 0, 0.0)
    alone, crowded = World(bound), World(bound)
    alone.write(400, lambda _: 0.5)
    crowded.write(400, lambda _: 0.5, batch=32)
    assert alone.plain / alone.elapsed > 1.5
    assert crowded.elapsed <= 1.02 * crowded.plain + 0.05
    assert sum(crowded.verified[-20:]) < 20


def test_where_no_draft_can_pay_nobody_need_be_queried() -> None:
    bound = Calibration(VerifyCurve(ROWS, tuple(0.001 * rows for rows in ROWS)), 0, 0.0)
    assert not Controller(Costs(bound)).may_query(Load(1, 0, 1))
    assert not Controller(Costs(bound)).may_query(Load(32, 0, 32))
    assert Controller(Costs(CHEAP)).may_query(Load(1, 0, 1))
    assert not Controller(Costs(DEAR)).may_query(Load(32, 0, 32))
    free = Calibration(VerifyCurve(ROWS, (0.010,) * len(ROWS)), 0, 0.0)
    assert Controller(Costs(free)).may_query(Load(1024, 0, 1024))


def test_no_draft_is_told_apart() -> None:
    world = World(CHEAP)
    world.write(50, lambda _: 0.0, lambda _: NO_DRAFT)
    assert world.reasons == {NOTHING_PROPOSED: 50}


def test_a_slow_drafter_rests_and_is_probed_now_and_then() -> None:
    controller = Controller(Costs(CHEAP))
    text = Sequence(1, "", 0, [1, 2, 3], 3, SamplingParams().resolved({}), 0, 999)
    load = Load(1, 3, 1)
    queried = []
    for _ in range(3000):
        work = Work(text, 1, 4)
        budget, _ = controller.draft_budget(work, "model:k=4", "model", 4, load)
        drafts: list[Draft | None] = [chain(budget, origin="model")]
        queried.append(budget)
        seconds = 0.030 * budget  # three plain steps per draft token: even if always right it cannot pay
        if budget:
            controller.observe_draft("model:k=4", budget, seconds)
        controller.observe([work], drafts, [Commit(text, (7,), (), ())], load, StepTimes(seconds, 0.0105, 0.0))
    assert sum(queried[:300]) <= 4
    assert 2 <= sum(queried[300:]) <= 6
    assert sum(queried) * 0.030 <= 0.02 * 3000 * 0.0105


def test_a_fast_and_right_drafter_is_used() -> None:
    controller = Controller(Costs(CHEAP))
    text = Sequence(1, "", 0, [1, 2, 3], 3, SamplingParams().resolved({}), 0, 999)
    load = Load(1, 3, 1)
    queried = []
    for _ in range(100):
        work = Work(text, 1, 4)
        budget, _ = controller.draft_budget(work, "model:k=4", "model", 4, load)
        queried.append(budget)
        draft = chain(budget, origin="model")
        if budget:
            controller.observe_draft("model:k=4", budget, 0.001 * budget)
        ran = Work(text, 1, 4, draft)
        commit = Commit(text, (7,) * (budget + 1), (), ())
        controller.observe([ran], [draft], [commit], load, StepTimes(0.001 * budget, 0.0105 + 0.0005 * budget, 0.0))
    assert queried[-50:] == [4] * 50


def service(requests: int, steps: int, catch_up_s: float, is_right: bool) -> tuple[float, float, list[int]]:
    """Sequences one after the other, with a draft model that must run each prompt before its first draft, at 1 ms for
    each. Returns what it took in all, what plain decoding would have taken, and the numbers of draft tokens."""
    controller, plain_s = Controller(Costs(CHEAP)), CHEAP.curve.seconds_at(1)
    elapsed, plain, queried = 0.0, 0.0, []
    for request in range(requests):
        text = Sequence(request, "", 0, [1] * 200, 200, SamplingParams().resolved({}), 0, 5 * steps)
        is_active = False
        for _ in range(steps):
            work, load = Work(text, 1, 4), Load(1, text.num_tokens, 1)
            budget, _ = controller.draft_budget(work, "model", "model", 4, load)
            queried.append(budget)
            read_s, is_active = (catch_up_s, True) if budget and not is_active else (0.0, is_active)
            draft_s, draft = 0.001 * budget + read_s, chain(budget, origin="model")
            read = controller.observe_draft("model", budget, draft_s) if budget else 0.0
            tokens = (7,) * (budget + 1) if is_right else (8,)
            text.token_ids += tokens
            run_s = CHEAP.curve.seconds_at(1 + budget)
            times = StepTimes(draft_s - read, run_s, 0.0, read)
            controller.observe([Work(text, 1, 4, draft)], [draft], [Commit(text, tokens, (), ())], load, times)
            elapsed += draft_s + run_s
            plain += plain_s * len(tokens)
        controller.release([request])
    return elapsed, plain, queried


@pytest.mark.parametrize("catch_up_s", [0.02, 0.05, 0.5])
def test_a_good_model_is_worth_catching_up_with(catch_up_s: float) -> None:
    elapsed, plain, queried = service(20, 300, catch_up_s, is_right=True)
    assert plain / elapsed > 2
    assert sum(budget > 0 for budget in queried) > 0.9 * len(queried)


@pytest.mark.parametrize("catch_up_s", [0.02, 0.05, 0.5])
def test_a_bad_model_is_woken_once(catch_up_s: float) -> None:
    elapsed, plain, _ = service(20, 300, catch_up_s, is_right=False)
    assert elapsed <= 1.02 * plain + 0.05 + catch_up_s


def test_a_model_that_becomes_good_is_woken_again() -> None:
    """Reading along costs a tenth of plain decoding, so that a resting model must be woken for every probe."""
    controller, plain_s = Controller(Costs(CHEAP)), CHEAP.curve.seconds_at(1)
    queried: list[int] = []
    for request in range(120):
        text = Sequence(request, "", 0, [1] * 40, 40, SamplingParams().resolved({}), 0, 1000)
        read = 0
        while text.num_output_tokens < 200:
            work, load = Work(text, 1, 4), Load(1, text.num_tokens, 1)
            budget, _ = controller.draft_budget(work, "model", "model", 4, load)
            catch_up_s = 0.1 * plain_s * (text.num_tokens - read) if budget else 0.0
            read = text.num_tokens if budget else read
            draft_s, draft = 0.001 * budget + catch_up_s, chain(budget, origin="model")
            catch_up_s = controller.observe_draft("model", budget, draft_s) if budget else 0.0
            tokens = (7,) * (budget + 1) if request >= 20 else (8,)
            text.token_ids += tokens
            times = StepTimes(draft_s - catch_up_s, CHEAP.curve.seconds_at(1 + budget), 0.0, catch_up_s)
            controller.observe([Work(text, 1, 4, draft)], [draft], [Commit(text, tokens, (), ())], load, times)
            queried.append(budget)
        controller.release([request])
    bad, recent = queried[: 20 * 200], queried[-200:]
    assert sum(budget > 0 for budget in bad) < 0.05 * len(bad)
    assert sum(budget > 0 for budget in recent) > 0.8 * len(recent)


def text_of(num_tokens: int, sequence_id: int = 1) -> Sequence:
    return Sequence(sequence_id, "", 0, [1] * num_tokens, num_tokens, SamplingParams().resolved({}), 0, 999)


@pytest.mark.parametrize("calls", [3, 24])
def test_a_long_text_is_read_in_several_calls(calls: int) -> None:
    """All of their time is catch-up time; none of it counts as drafting time."""
    controller, size = Controller(Costs(CHEAP)), 512 * calls
    text, load = text_of(size), Load(1, size, 1)
    for _ in range(calls):
        assert controller.draft_budget(Work(text, 1, 4), "model", "model", 4, load) == (1, PROBE)
        assert controller.observe_draft("model", 0, 0.5) == 0.5
    assert controller.draft_budget(Work(text, 1, 4), "model", "model", 4, load) == (1, PROBE)
    assert controller.observe_draft("model", 1, 0.5) == 0.5
    assert controller.costs.catch_up("model", size) == pytest.approx(0.5 * (calls + 1))
    assert controller.costs.draft("model") is None


def test_catching_up_beside_drafts_for_others_is_no_drafting_time() -> None:
    """A model that drafts for one sequence catches up with another one in many small pieces."""
    controller, load = Controller(Costs(CHEAP)), Load(2, 2000, 2)
    controller.costs.observe_draft("model", 4, 0.004)
    controller.acceptance.observe(1, chain(4, origin="model"), (7,) * 5)
    known = controller.costs.draft("model")
    assert known is not None
    controller.saved_s = controller.ledger_s = 100.0
    assert controller.draft_budget(Work(text_of(640, 2), 1, 4), "model", "model", 4, load)[0] > 0
    for _ in range(19):
        assert controller.observe_draft("model", 4, 4 * known + 0.1, without=[2]) == pytest.approx(0.1)
    assert controller.observe_draft("model", 8, 8 * known + 0.1) == pytest.approx(0.1)
    assert controller.costs.catch_up("model", 640) == pytest.approx(2.0)
    assert controller.costs.draft("model") == known
    assert controller.observe_draft("model", 8, 8 * known) == 0


def test_one_text_finds_out_what_a_model_takes() -> None:
    controller, load = Controller(Costs(CHEAP)), Load(2, 200, 2)
    first, second = (Work(text_of(100, sequence_id), 1, 4) for sequence_id in (1, 2))
    assert controller.draft_budget(first, "model", "model", 4, load) == (1, PROBE)
    assert controller.draft_budget(second, "model", "model", 4, load) == (0, RESTING)
    assert controller.draft_budget(first, "model", "model", 4, load) == (1, PROBE), "it may not have read all of it"
    controller.release([1])
    assert controller.draft_budget(second, "model", "model", 4, load) == (1, PROBE)


def test_a_preempted_text_is_read_again() -> None:
    """Its time does not count as drafting time."""
    controller, text = Controller(Costs(CHEAP)), text_of(100)
    for _ in range(2):
        assert controller.draft_budget(Work(text, 1, 4), "model", "model", 4, Load(1, 100, 1)) == (1, PROBE)
        assert controller.observe_draft("model", 1, 0.5) == 0.5
        text.counters.preemptions += 1


def test_a_copy_goes_its_own_path_with_what_is_known_of_the_machine() -> None:
    world = World(CHEAP)
    world.write(500, lambda _: 0.9)
    kept = world.controller.copy()
    before = kept.ledger_s, kept.acceptance.survivals(9, chain(3))
    world.write(500, lambda _: 0.0)
    assert (kept.ledger_s, kept.acceptance.survivals(9, chain(3))) == before
    assert world.controller.acceptance.survivals(9, chain(3)) != before[1]
    assert kept.costs is world.controller.costs


def test_who_takes_time_and_never_drafts_is_left_alone() -> None:
    controller = Controller(Costs(CHEAP))
    text = Sequence(1, "", 0, [1] * 1000, 1000, SamplingParams().resolved({}), 0, 999)
    queried = 0
    for _ in range(200):
        work, load = Work(text, 1, 4), Load(1, 1000, 1)
        budget, _ = controller.draft_budget(work, "model", "model", 4, load)
        queried += budget
        read_s = controller.observe_draft("model", 0, 0.5) if budget else 0.0
        times = StepTimes(0.5 * budget - read_s, 0.0105, 0.0, read_s)
        controller.observe([work], [NO_DRAFT], [Commit(text, (7,), (), ())], load, times)
    assert 1 <= queried <= 10


def test_a_request_differs_from_others() -> None:
    """The same proposer: right for one request, wrong for the other, from a common prior."""
    acceptance = Acceptance()
    for _ in range(40):
        acceptance.observe(1, chain(3), (7, 7, 7, 7))
        acceptance.observe(2, chain(3), (8,))
    code, chat = (acceptance.survivals(request, chain(3)) for request in (1, 2))
    fresh = acceptance.survivals(3, chain(3))
    assert chat[0] < 0.7 * fresh[0] < 1.2 * fresh[0] < code[0]
    assert code == sorted(code, reverse=True)
    acceptance.release([1, 2])
    assert acceptance.survivals(1, chain(3)) == fresh


def test_costs_follow_the_machine_and_ignore_outliers() -> None:
    costs = Costs(DEAR)
    for step in range(200):
        rows = 1 + step % 5
        seconds = 1.5 * DEAR.curve.seconds_at(rows)
        costs.observe_run(rows, 0, 50 * seconds if step % 9 == 0 else seconds)
        costs.observe_overhead(0.001)
    for rows in (1, 3, 5):
        assert costs.run(rows, 0) == pytest.approx(1.5 * DEAR.curve.seconds_at(rows) + 0.001, rel=0.05)
    assert costs.draft("unknown") is None


def test_longer_contexts_cost_more() -> None:
    costs = Costs(Calibration(DEAR.curve, 100, 1e-6))
    assert costs.run(2, 2 * 1100) == pytest.approx(DEAR.curve.seconds_at(2) + 2000e-6)


def test_querying_in_vain_becomes_rare() -> None:
    """Where a query takes a tenth of a step and brings nothing, queries take less than a hundredth of the time."""
    controller, text = Controller(Costs(CHEAP)), Sequence(1, "", 0, [1], 1, SamplingParams().resolved({}), 0, 10**9)
    queried = 0
    for _ in range(3000):
        work, load = Work(text, 1, 4), Load(1, 1, 1)
        queries = controller.may_query(load)
        queried += queries
        times = StepTimes(0.0, 0.0105, 0.0, query_s=0.001 * queries)
        controller.observe([work], [NO_DRAFT], [Commit(text, (8,), (), ())], load, times)
    assert queried > 20 and 0.001 * queried < 0.01 * 3000 * 0.0105


def test_querying_goes_on_while_drafts_are_worth_it() -> None:
    world = World(CHEAP)
    text = Sequence(9, "", 0, [1], 1, SamplingParams().resolved({}), 0, 9)
    for _ in range(16):
        times = StepTimes(0.0, 0.0105, 0.0, query_s=0.003)
        world.controller.observe([Work(text, 1, 4)], [NO_DRAFT], [Commit(text, (8,), (), ())], Load(1, 1, 1), times)
    assert not world.controller.may_query(Load(1, 1, 1))
    world.write(50, lambda _: 0.9)
    assert world.controller.may_query(Load(1, 1, 1))
