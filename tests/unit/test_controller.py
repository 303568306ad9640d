"""The controller in a simulated world (controller_world.py)."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from unittest import mock

import pytest

from foredraft.control.acceptance import Acceptance
from foredraft.control.controller import Controller
from foredraft.control.costs import Calibration, Costs, StepTimes
from foredraft.control.economics import VerifyCurve
from foredraft.control.reasons import DRAFTED, MEASURING, NOTHING_PROPOSED, RESTING
from foredraft.control.worth import Candidate, Load, Worth
from foredraft.params import SamplingParams
from foredraft.types import NO_DRAFT, Draft, Sequence, Work
from tests.unit.controller_world import CHEAP, DEAR, NARROW, ROWS, Place, Player, World

Probability = Callable[[Place], float]


def constant(probability: float) -> Probability:
    return lambda place: probability


def copier(right: Probability, confidence: float = 0.8, most: int = 8) -> Player:
    return Player("copier", right, query_s=1e-5, confidence=constant(confidence), most=most)


def head(right: Probability, node_s: float = 0.001, **others: object) -> Player:
    return Player("head", right, node_s=node_s, is_free=False, most=4, **others)  # type: ignore[arg-type]


def chain(size: int, score: float = 0.8, origin: str = "test") -> Draft:
    scores = tuple(score**depth for depth in range(1, size + 1))
    return Draft((7,) * size, tuple(range(-1, size - 1)), scores, (origin,) * size)


def share_of_queries(world: World, name: str = "head") -> float:
    return sum(bool(queried[name]) for queried in world.queried) / len(world.queried)


def test_what_pays_is_drafted_and_what_does_not_is_not() -> None:
    good = World(CHEAP, [copier(constant(0.9))]).write(1500)
    bad = World(CHEAP, [copier(constant(0.01))]).write(1500)
    assert good.speedup > 3
    assert bad.elapsed <= 1.02 * bad.plain + 0.05
    assert sum(bad.verified[-200:]) < 20
    assert good.reasons[DRAFTED] > 0.95 * (good.reasons[DRAFTED] + good.reasons[NOTHING_PROPOSED])


@pytest.mark.parametrize(("truth", "alpha"), [(CHEAP, 0.7), (CHEAP, 0.4), (DEAR, 0.9), (DEAR, 0.5)])
def test_it_comes_close_to_the_best_fixed_length(truth: Calibration, alpha: float) -> None:
    world = World(truth, [copier(constant(alpha))]).write(2000)
    fixed = [World(truth, [copier(constant(alpha))], fixed={"copier": k}).write(2000).speedup for k in range(9)]
    assert world.speedup > 0.95 * max(fixed)


def test_a_long_copy_is_verified_in_full() -> None:
    """Also where sixteen rows take as long as six plain steps: no probability has a cap below 1."""
    world = World(NARROW, [copier(constant(1.0), confidence=0.97, most=16)]).write(800)
    assert world.verified[-10:-2] == [16] * 8


@pytest.mark.parametrize("calibrated", [DEAR, Calibration(VerifyCurve(ROWS, (0.012,) * 7), 0, 0.0)])
def test_wrong_costs_are_found_out(calibrated: Calibration) -> None:
    """Calibrated as if rows were free, on a machine where they are dear: real steps correct it."""
    world = World(DEAR, [copier(constant(0.15))], calibrated).write(2000)
    assert world.elapsed <= 1.02 * world.plain + 0.05


ADVERSARIES: dict[str, Callable[[float], Player]] = {
    "wrong": lambda _: copier(constant(0.0), 0.99, 16),
    "turncoat": lambda _: copier(lambda place: float(place[1] < 50), 0.99, 16),
    "changing": lambda _: copier(lambda place: float(place[1] // 40 % 2 == 0), 0.99, 16),
    "slow and right": lambda _: head(constant(1.0), query_s=0.04),
    "not free and wrong": lambda step_s: head(
        constant(0.0), 0.1 * step_s, confidence=constant(0.99), acceptance=(0.75,) * 5
    ),
    "dear and wrong": lambda step_s: head(constant(0.0), step_s, confidence=constant(0.99)),
    "dear, and never drafts": lambda step_s: head(constant(0.0), query_s=step_s, drafts=lambda place: False),
}


@pytest.mark.parametrize("noise", [0.0, 0.5])
@pytest.mark.parametrize("truth", [CHEAP, DEAR, NARROW])
@pytest.mark.parametrize("adversary", ADVERSARIES)
def test_adversaries_cost_next_to_nothing(adversary: str, truth: Calibration, noise: float) -> None:
    world = World(truth, [ADVERSARIES[adversary](truth.curve.seconds_at(1))], noise=noise).write(250, requests=2)
    assert world.elapsed <= 1.02 * world.plain + 0.05


def test_those_who_were_queried_share_what_deciding_took() -> None:
    controller, work, load = ready(MODEL), Work(sequence_of(9), 1, 4), Load(1, 9, 1)
    controller.observe_query(MODEL, [work], [4], [chain(4, origin="model")], 0.0)
    controller.observe_plain(load, StepTimes(0.0105, 0.0, 0.9, {"model": 5}))  # the first one is slow
    controller.copy()  # which learns from them
    before = controller._ledger(MODEL).balance_s
    controller.observe_plain(load, StepTimes(0.0105, 0.0, 0.004, {"model": 5}))
    controller.observe_plain(load, StepTimes(0.0105, 0.0, 0.004))  # in this step nobody was queried
    controller.copy()
    assert controller._ledger(MODEL).balance_s == pytest.approx(before - 0.004 + 2 * 0.005 * 0.0145)
    assert controller.costs.deciding("model") == pytest.approx(0.004)


def test_a_delay_does_not_empty_a_ledger() -> None:
    controller, load = ready(MODEL), Load(1, 9, 1)
    controller._ledger(MODEL)
    for deciding_s in (*[0.0001] * 20, 0.5):
        before = controller._ledger(MODEL).balance_s
        controller.observe_plain(load, StepTimes(0.0105, 0.0, deciding_s, {"model": 5}))
        controller.copy()
    assert controller._ledger(MODEL).balance_s > before - 0.001


def test_speculation_comes_back_by_itself() -> None:
    world = World(CHEAP, [copier(lambda place: 0.95 * (place[1] > 800))]).write(2000)
    quiet = next(step for step in range(len(world.verified)) if step > 800)
    assert sum(world.verified[quiet - 200 : quiet]) < 40
    assert sum(world.verified[quiet + 30 : quiet + 60]) > 100, "what is right in the shadow is soon verified again"


@pytest.mark.parametrize("hiccup_every", [6, 7, 8, 10, 30])
def test_a_slow_moment_of_the_machine_is_not_blamed_on_drafts(hiccup_every: int) -> None:
    """Also where a row costs a third of a run, so that little is gained with which a slow step could be paid."""
    dear = Calibration(VerifyCurve(ROWS, tuple(0.006 + 0.0025 * rows for rows in ROWS)), 0, 0.0)
    world = World(dear, [copier(constant(0.8), most=4)], hiccup_every=hiccup_every).write(1000)
    assert sum(count > 0 for count in world.verified) > 0.9 * len(world.verified)


def test_large_batches_flip_the_sign() -> None:
    """The same acceptance pays alone and not among many, because more rows then cost what they are worth."""
    bound = Calibration(VerifyCurve(ROWS, tuple(max(0.010, 0.001 * rows) for rows in ROWS)), 0, 0.0)
    alone = World(bound, [copier(constant(0.5))]).write(400)
    crowded = World(bound, [copier(constant(0.5))]).write(200, batch=32)
    assert alone.speedup > 1.5
    assert crowded.elapsed <= 1.02 * crowded.plain + 0.05
    assert sum(crowded.verified[-20:]) < 20


def test_no_draft_is_told_apart() -> None:
    nobody = Player("copier", constant(0.0), drafts=lambda place: False)
    world = World(CHEAP, [nobody]).write(50)
    assert world.reasons[NOTHING_PROPOSED] == 50


def test_querying_in_vain_becomes_rare() -> None:
    """Where a query takes a tenth of a step and brings nothing, queries take about a hundredth of the time."""
    nobody = Player("copier", constant(0.0), query_s=0.001, drafts=lambda place: False)
    world = World(CHEAP, [nobody]).write(3000)
    assert nobody.queries > 20
    assert 0.001 * nobody.queries < 0.015 * world.elapsed


def test_a_slow_drafter_rests_and_is_tried_now_and_then() -> None:
    """Three plain steps per draft token: even if always right it cannot pay."""
    slow = head(constant(1.0), node_s=0.030)
    world = World(CHEAP, [slow]).write(3000)
    assert 2 <= slow.queries <= 12
    assert world.elapsed <= 1.02 * world.plain


def test_a_fast_and_right_drafter_is_used() -> None:
    world = World(CHEAP, [head(constant(1.0))]).write(300)
    assert [queried["head"] for queried in world.queried[-30:-2]] == [4] * 28
    assert world.reasons[f"head: {MEASURING}"] <= 8, "it is used within a few steps of a fresh start"


@pytest.mark.parametrize("missing_s", [0.0001, 0.0003, 0.0005])
def test_a_good_model_is_worth_catching_up_with(missing_s: float) -> None:
    world = World(CHEAP, [head(constant(1.0), missing_s=missing_s)]).write(1000, requests=10, prompt=200)
    assert world.speedup > 2
    assert share_of_queries(world) > 0.9


@pytest.mark.parametrize("missing_s", [0.0001, 0.0003, 0.0005])
def test_a_bad_model_catches_up_once(missing_s: float) -> None:
    bad = head(constant(0.0), missing_s=missing_s, confidence=constant(0.9))
    world = World(CHEAP, [bad]).write(200, requests=15, prompt=200)
    assert world.elapsed <= 1.02 * world.plain + 0.05 + 200 * missing_s


def test_a_model_that_becomes_good_is_used_again() -> None:
    """A resting model must catch up for every trial."""
    becoming = head(lambda place: float(place[0] >= 10), missing_s=0.0005, confidence=constant(0.9))
    world = World(CHEAP, [becoming]).write(200, requests=10, prompt=40)
    assert share_of_queries(world) < 0.05
    world.write(200, requests=60, prompt=40)
    recent = world.queried[-150:]
    assert sum(bool(queried["head"]) for queried in recent) > 0.8 * len(recent)


def test_a_proposer_that_does_not_pay_starves_no_other() -> None:
    """Each has a ledger of its own. It may lose its allowance of four steps, and three more until its record is known:
    so long its drafts, of which it says that they are surer, take the place of the other's."""
    alone = World(CHEAP, [copier(constant(0.9))]).write(300)
    wrong = head(constant(0.0), confidence=constant(0.99), node_s=0.004)
    beside = World(CHEAP, [copier(constant(0.9)), wrong]).write(300)
    assert beside.elapsed <= 1.02 * alone.elapsed + 7 * CHEAP.curve.seconds_at(1)
    assert beside.reasons[DRAFTED] >= 0.95 * alone.reasons[DRAFTED]


def sequence_of(num_tokens: int, sequence_id: int = 1) -> Sequence:
    return Sequence(sequence_id, "", 0, [1] * num_tokens, num_tokens, SamplingParams().resolved({}), 0, 999)


def ready(candidate: Candidate) -> Controller:
    """A controller that knows what plain decoding takes."""
    controller = Controller(Costs(CHEAP))
    for _ in range(16):
        controller.observe_plain(Load(1, 1, 1), StepTimes(0.0105))
    assert controller.budgets(candidate, [], [], Load(1, 1, 1)) == []
    return controller


MODEL = Candidate("model", False, 4)


@pytest.mark.parametrize("calls", [3, 24])
def test_a_long_sequence_is_caught_up_with_in_several_calls(calls: int) -> None:
    """All of their time is catch-up time; none of it counts as drafting time."""
    controller, size = ready(MODEL), 512 * calls
    work, load = Work(sequence_of(size), 1, 4), Load(1, size, 1)
    for call in range(calls):
        assert controller.budgets(MODEL, [work], [()], load) == [(4, DRAFTED)]
        controller.observe_query(MODEL, [work], [4], [chain(4) if call == calls - 1 else NO_DRAFT], 0.1)
    assert controller.costs.catch_up("model", size) == pytest.approx(0.1 * calls)
    assert controller.costs.draft("model", 4, 1) is None


def test_catching_up_beside_drafts_for_others_is_no_drafting_time() -> None:
    """A model that drafts for one sequence catches up with another one in many small pieces."""
    controller, first, second = ready(MODEL), Work(sequence_of(9), 1, 4), Work(sequence_of(640, 2), 1, 4)
    for _ in range(2):
        controller.observe_query(MODEL, [first], [4], [chain(4)], 0.004)
    controller.copy()  # which learns from them
    known = controller.costs.draft("model", 4, 2)
    assert known is not None
    for call in range(3):
        drafts = [chain(4), chain(4) if call == 2 else NO_DRAFT]
        controller.observe_query(MODEL, [first, second], [4, 4], drafts, known + 0.1)
    assert controller.costs.catch_up("model", 640) == pytest.approx(0.3)
    assert controller.costs.draft("model", 4, 2) == known


def test_one_sequence_is_enough_to_time_a_proposer() -> None:
    controller, load = ready(MODEL), Load(2, 200, 2)
    works = [Work(sequence_of(100, sequence_id), 1, 4) for sequence_id in (1, 2)]
    controller.costs.is_known = lambda rows: True  # type: ignore[method-assign]
    assert [nodes > 0 for nodes, _ in controller.budgets(MODEL, works, [(), ()], load)] == [True, False]
    controller.observe_query(MODEL, works[:1], [4], [chain(4)], 0.05)  # it has caught up
    assert [nodes > 0 for nodes, _ in controller.budgets(MODEL, works, [(), ()], load)] == [True, False]


def test_prompts_beside_it_do_not_raise_what_a_token_is_worth() -> None:
    """They are run in any case: eight sequences gain nothing by a coin's throw each, whatever else the step runs."""
    controller = Controller(Costs(Calibration(VerifyCurve(ROWS, tuple(0.005 + 0.002 * rows for rows in ROWS)), 0, 0.0)))
    controller.costs.is_known = lambda rows: True  # type: ignore[method-assign]
    works = [Work(sequence_of(9, number), 1, 4) for number in range(8)]
    controller.observe_query(MODEL, works, [1] * 8, [chain(1, 0.5, "model")] * 8, 0.001)
    for rows in (8, 40):
        chosen, _ = controller.choose(works, [chain(1, 0.5, "model")] * 8, Load(rows, 0, 8))
        assert not any(chosen)


def test_those_who_catch_up_share_what_was_saved() -> None:
    controller, load = ready(MODEL), Load(4, 400, 4)
    works = [Work(sequence_of(100, 1000 + number), 1, 4) for number in range(4)]
    controller.costs.is_known = lambda rows: True  # type: ignore[method-assign]
    allowance_s = controller._ledger(MODEL).saved_s
    controller.costs.observe_catch_up("model", 100, 0.6 * allowance_s)
    for _ in range(4):
        controller.costs.observe_draft("model", 4, 1, 1e-5)
    budgets = controller.budgets(MODEL, works, [()] * 4, load)
    assert [nodes > 0 for nodes, _ in budgets] == [True, False, False, False]


def test_what_is_at_hand_leaves_nothing_to_gain() -> None:
    controller, work, load = ready(MODEL), Work(sequence_of(9), 1, 4), Load(1, 9, 1)
    for _ in range(4):
        controller.observe_query(MODEL, [work], [4], [chain(4)], 0.004)
    assert controller.budgets(MODEL, [work], [()], load)[0][1] == DRAFTED
    sure, unsure = chain(1, 0.95, "copier"), chain(1, 0.02, "copier")
    controller.observe_query(Candidate("copier", True, 4), [work], [4], [sure], 0.0)
    assert controller.budgets(MODEL, [work], [[sure]], load)[0] == (0, RESTING)
    # What would not be verified is not at hand.
    assert controller.budgets(MODEL, [work], [[unsure]], load)[0][1] == DRAFTED
    controller._ledgers["copier"].balance_s = 0.0
    assert controller.budgets(MODEL, [work], [[sure]], load)[0][1] == DRAFTED


def test_requests_may_choose_other_options_of_one_proposer() -> None:
    controller, work = ready(MODEL), Work(sequence_of(9), 1, 64)
    for most in (4, 64, 1, 16):
        candidate = MODEL._replace(most=most, acceptance=(0.0,))
        controller.observe_query(candidate, [work], [most], [chain(most, origin="model")], 0.001)
        assert controller.budgets(candidate, [work], [()], Load(1, 9, 1))[0][0] <= most


def test_a_preempted_sequence_is_caught_up_with_again() -> None:
    """Its time does not count as drafting time."""
    controller, sequence = ready(MODEL), sequence_of(100)
    for _ in range(2):
        controller.observe_query(MODEL, [Work(sequence, 1, 4)], [4], [chain(4)], 0.05)
        sequence.counters.preemptions += 1
    assert controller.costs.draft("model", 4, 1) is None


def test_a_copy_goes_its_own_path_with_what_is_known_of_the_machine() -> None:
    world = World(CHEAP, [copier(lambda place: 0.9 * (place[0] == 0))]).write(300)
    kept = world.controller.copy()
    before = kept.acceptance.survivals(9, chain(3, origin="copier"))
    world.write(300)
    assert kept.acceptance.survivals(9, chain(3, origin="copier")) == before
    assert world.controller.acceptance.survivals(9, chain(3, origin="copier")) != before
    assert kept.costs is world.controller.costs


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


def log_odds(probability: float) -> float:
    return math.log(probability / (1 - probability))


@pytest.mark.parametrize(("said", "true"), [(0.5, 0.9), (0.9, 0.6), (0.97, 0.97), (0.999, 0.9)])
def test_confidence_is_corrected_by_the_record(said: float, true: float) -> None:
    """All confidences by the same log odds: what is known of one tells about the others."""
    acceptance = Acceptance()
    for trial in range(400):
        is_right = trial % 1000 < 1000 * true if trial < 2 else (trial * 617) % 1000 < 1000 * true
        acceptance.observe(trial, chain(1, said), (7, 7) if is_right else (8,))
        acceptance.release([trial])
    assert acceptance.survivals(-1, chain(1, said))[0] == pytest.approx(true, abs=0.05)
    corrections = [
        log_odds(acceptance.survivals(-1, chain(1, confidence))[0]) - log_odds(confidence) for confidence in (0.2, 0.7)
    ]
    assert corrections[0] == pytest.approx(corrections[1])
    assert acceptance.survivals(-1, chain(1, 0.2, "another"))[0] == pytest.approx(0.2)


def test_what_the_next_steps_would_only_repeat_is_not_decided_again() -> None:
    """Deciding takes time too. A copier that finds nothing is still queried in every step, for its query is cheap."""
    silent = replace(copier(constant(0.9)), drafts=lambda place: False)
    world = World(CHEAP, [silent, head(constant(0.01))]).write(320)
    with mock.patch.object(Worth, "best", autospec=True, side_effect=Worth.best) as weighed:
        world.write(320)
    assert share_of_queries(world, "copier") == 1
    probes = sum(bool(queried["head"]) for queried in world.queried[-320:])
    assert weighed.call_count <= 2 * (320 / 16 + probes), "once in a stretch of sixteen steps, and for every probe"


def test_a_new_sequence_is_decided_about_at_once() -> None:
    """However long the decision about the others stands."""
    world = World(CHEAP, [replace(copier(constant(0.9)), drafts=lambda place: place[0] > 0)])
    world.write(160)
    world.write(30)
    assert world.verified[-1] > 0
