"""The controller in a simulated world (controller_world.py)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from foredraft.control.controller import Controller, Offer, Prices
from foredraft.control.costs import Calibration, Costs, Load
from foredraft.control.economics import VerifyCurve
from foredraft.control.reasons import DRAFTED, LEDGER, MEASURING, NOTHING_PROPOSED, PROBE, RESTING
from foredraft.params import SamplingParams
from foredraft.types import NO_DRAFT, TARGET, Commit, Draft, Sequence, Work
from tests.unit.controller_world import CHEAP, DEAR, NARROW, ROWS, Place, Player, World

Probability = Callable[[Place], float]


def constant(probability: float) -> Probability:
    return lambda place: probability


def copier(right: Probability, confidence: float = 0.8, most: int = 8) -> Player:
    return Player("copier", right, query_s=1e-5, confidence=constant(confidence), num_lookahead_tokens=most)


def head(right: Probability, node_s: float = 0.001, **others: object) -> Player:
    return Player("head", right, node_s=node_s, free=False, num_lookahead_tokens=4, **others)  # type: ignore[arg-type]


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
    assert sum(bad.verified[-200:]) < 30
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
    assert world.reasons[NOTHING_PROPOSED] == 49, "for the last token there is nothing to draft"


def test_querying_in_vain_becomes_rare() -> None:
    """Where a query takes a tenth of a step and brings nothing, queries take about a hundredth of the time."""
    nobody = Player("copier", constant(0.0), query_s=0.001, drafts=lambda place: False)
    world = World(CHEAP, [nobody]).write(3000)
    assert nobody.queries > 20
    assert 0.001 * nobody.queries < 0.015 * world.elapsed


def test_a_slow_drafter_rests_and_is_tried_now_and_then() -> None:
    """Three plain steps per draft token: even if always right it cannot pay."""
    slow = head(constant(1.0), node_s=0.030)
    world = World(CHEAP, [slow]).write(9000)
    assert 2 <= slow.queries <= 16
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


def sequence_of(num_tokens: int, sequence_id: int = 1, temperature: float = 0.0) -> Sequence:
    params = SamplingParams(temperature=temperature).resolved({})
    sequence = Sequence(sequence_id, "", 0, [1] * num_tokens, num_tokens, params, 0, 999)
    sequence.num_computed_tokens = num_tokens - 1
    return sequence


class Model(Player):
    """A proposer that is told how far behind it is."""

    def __init__(self, name: str = "model", most: int = 4, missing: int = 0) -> None:
        super().__init__(name, constant(0.0), free=False, num_lookahead_tokens=most)
        self.missing = missing

    def num_missing(self, sequence: Sequence) -> int:
        return self.missing


def ready(truth: Calibration = CHEAP) -> Controller:
    """A controller that knows what plain steps take, alone and for some sequences together."""
    controller = Controller(Costs(truth))
    for rows in (1, 2, 4, 8):
        for _ in range(16):
            controller.costs.observe(rows, 9 * rows, truth.curve.seconds_at(rows), True)
    return controller


def prices_of(controller: Controller, works: list[Work]) -> Prices:
    return controller.prices(Load.of(works), 16)


def record_of(controller: Controller, model: Player, work: Work) -> Any:
    """The record by which a proposer is judged for a work."""
    controller.wants(model, [work], [None], prices_of(controller, [work]))
    return controller._requests[model.name][work.sequence.id].record


def observed(
    controller: Controller, model: Player, works: list[Work], drafts: list[Draft], prices: Prices, seconds: float
) -> list[Offer | None]:
    """Let the controller learn from a query; returns what it offers."""
    offers = controller.offers(model, works, drafts)
    controller.observe_query(model, works, offers, prices, seconds)
    return offers


def asked(controller: Controller, model: Player, works: list[Work], drafts: list[Draft], seconds: float) -> list[str]:
    """Ask the controller, and let the proposer answer where it wants that."""
    prices = prices_of(controller, works)
    reasons = controller.wants(model, works, [None] * len(works), prices)
    chosen = [place for place, reason in enumerate(reasons) if reason in (DRAFTED, PROBE)]
    if chosen:
        some = [works[place] for place in chosen]
        observed(controller, model, some, [drafts[place] for place in chosen], prices, seconds)
    return reasons


@pytest.mark.parametrize("calls", [3, 24])
def test_a_long_sequence_is_caught_up_with_in_several_calls(calls: int) -> None:
    """All of their time is catch-up time; none of it counts as drafting time."""
    controller, model, size = ready(), Model(missing=512 * calls), 512 * calls
    work = Work(sequence_of(size), 1, 4)
    for _ in range(calls):
        prices = prices_of(controller, [work])
        assert controller.wants(model, [work], [None], prices) == [DRAFTED]
        model.missing -= 512
        observed(controller, model, [work], [NO_DRAFT if model.missing else chain(4, origin="model")], prices, 0.01)
    assert not model.missing
    record = record_of(controller, model, work)
    assert record.caught_up_s == pytest.approx(0.01 * calls)
    assert not record.num_calls and record.cost_s(1) == 0


def test_one_sequence_is_enough_to_time_a_proposer() -> None:
    controller, model = ready(), Model()
    works = [Work(sequence_of(100, number), 1, 4) for number in (1, 2)]
    assert controller.wants(model, works, [None, None], prices_of(controller, works)) == [DRAFTED, RESTING]


def test_prompts_beside_it_do_not_raise_what_a_token_is_worth() -> None:
    """They are run in any case: eight sequences gain nothing by a coin's throw each, whatever else the step runs."""
    controller = ready(Calibration(VerifyCurve(ROWS, tuple(0.005 + 0.002 * rows for rows in ROWS)), 0, 0.0))
    works, model = [Work(sequence_of(9, number), 1, 4) for number in range(8)], Model()
    for rows in (8, 40):
        prices = controller.prices(Load(rows, 0, 8), 4)
        for _ in range(8):
            controller.costs.observe(rows, 0, controller.costs.run(rows, 0), True)
        controller.wants(model, works, [None] * 8, prices)
        coin = Offer(chain(1, 0.5, "model"), [0.5])
        chosen, _ = controller.choose([coin] * 8, prices)
        assert not any(chosen)


def test_what_catching_up_may_take_is_limited_by_what_was_saved() -> None:
    controller, model = ready(), Model(missing=100)
    work = Work(sequence_of(100), 1, 4)
    record = record_of(controller, model, work)
    record.catch_up = 0.5 * record.credit_s / controller.costs.at_rest(100)
    assert controller.wants(model, [work], [None], prices_of(controller, [work])) == [DRAFTED]
    record.caught_up_s = 0.6 * record.credit_s
    assert controller.wants(model, [work], [None], prices_of(controller, [work])) == [LEDGER]


def test_those_who_catch_up_share_what_was_saved() -> None:
    controller, model = ready(), Model(missing=100)
    works = [Work(sequence_of(100, number), 1, 4) for number in range(4)]
    record = record_of(controller, model, works[0])
    for _ in range(4):
        record.book_call(1e-5, 1, 4, True)
    record.catch_up = 0.6 * record.credit_s / controller.costs.at_rest(100)
    reasons = controller.wants(model, works, [None] * 4, prices_of(controller, works))
    assert reasons == [DRAFTED, LEDGER, LEDGER, LEDGER]


@pytest.mark.parametrize("acceptance", [(), (0.0,), (1.0, 0.0)])
def test_requests_may_choose_other_options_of_one_proposer(acceptance: tuple[float, ...]) -> None:
    """Also of one that promises nothing."""
    controller, work = ready(), Work(sequence_of(9), 1, 64)
    for most in (4, 64, 1, 16) * 2:
        model, prices = Model(most=most), controller.prices(Load.of([work]), 64)
        model.acceptance = acceptance
        controller.wants(model, [work], [None], prices)
        (offer,) = observed(controller, model, [work], [chain(most, origin="model")], prices, 0.001)
        assert offer is not None and len(offer.survivals) == most
        assert 0 <= controller.min_score(model, work, prices) <= 1


def test_what_is_at_hand_leaves_nothing_to_gain() -> None:
    controller, model, work = ready(), Model(), Work(sequence_of(9), 1, 4)
    for _ in range(4):
        assert asked(controller, model, [work], [chain(4, origin="model")], 0.004) == [DRAFTED]
    prices = prices_of(controller, [work])
    sure, unsure = chain(1, 0.95, "copier"), chain(1, 0.02, "copier")
    assert controller.wants(model, [work], [Offer(sure, [0.95])], prices) == [RESTING]
    assert controller.wants(model, [work], [Offer(unsure, [0.02])], prices) == [DRAFTED], "it would not be verified"
    assert controller.wants(model, [work], [None], prices) == [DRAFTED]


def test_a_copy_goes_its_own_path_with_what_is_known_of_the_machine() -> None:
    world = World(CHEAP, [copier(lambda place: 0.9 * (place[0] == 0))]).write(300)
    kept = world.controller.copy()
    before = kept._records["copier", 0].odds.survivals(chain(3, origin="copier"))
    world.write(300)
    assert kept._records["copier", 0].odds.survivals(chain(3, origin="copier")) == before
    assert world.controller._records["copier", 0].odds.survivals(chain(3, origin="copier")) != before
    assert kept.costs is world.controller.costs


def test_a_new_sequence_is_decided_about_at_once() -> None:
    """However long nothing was found for the others."""
    world = World(CHEAP, [replace(copier(constant(0.9)), drafts=lambda place: place[0] > 0)])
    world.write(160)
    world.write(30)
    assert world.verified[-1] > 0


def credit_of(controller: Controller, name: str = "model", kind: int = 0) -> float:
    return controller._records[name, kind].credit_s


def test_a_credit_books_what_a_step_costs_and_brings() -> None:
    """One draft of four tokens, three of them right: a query, four rows, three tokens, and a share of the time."""
    controller, model, work = ready(), Model(), Work(sequence_of(9), 1, 4)
    prices, draft = prices_of(controller, [work]), chain(4, 0.99, "model")
    assert asked(controller, model, [work], [draft], 0.001) == [DRAFTED]
    before = credit_of(controller)
    (offer,) = observed(controller, model, [work], [draft], prices, 0.002)
    assert offer is not None
    verified = work.with_draft(draft)
    commit = Commit(work.sequence, (7, 7, 7, 8), ("model",) * 3 + (TARGET,), (None,) * 4)
    rows_s = CHEAP.curve.seconds_at(5) - CHEAP.curve.seconds_at(1)
    run_s = CHEAP.curve.seconds_at(5)
    controller.observe([verified], {0: [offer]}, [commit], prices, 0.002, run_s)
    booked = credit_of(controller) - before
    assert booked == pytest.approx(3 * CHEAP.curve.seconds_at(1) - rows_s - 0.002 + 0.005 * (0.002 + run_s), rel=1e-6)


def test_a_credit_covers_what_is_expected_to_be_lost_of_a_row() -> None:
    controller, model, work = ready(DEAR), Model("copier", 8), Work(sequence_of(9), 1, 8)
    prices = prices_of(controller, [work])
    controller.wants(model, [work], [None], prices)
    row_s = prices.each[1] * prices.token_s
    for credit_s, survival, verdict in [
        (0.06 * row_s, 0.95, DRAFTED),
        (0.04 * row_s, 0.95, LEDGER),
        (0.25 * row_s, 0.7, LEDGER),
        (0.35 * row_s, 0.7, DRAFTED),
        (-0.01 * row_s, 1.0, LEDGER),
    ]:
        controller._records["copier", 0].credit_s = credit_s
        _, reasons = controller.choose([Offer(chain(1, survival, "copier"), [survival])], prices)
        assert reasons == [verdict], (credit_s, survival)


def test_a_credit_covers_all_rows_of_a_step_together() -> None:
    controller, model, work = ready(), Model("copier", 8), Work(sequence_of(9), 1, 8)
    prices, draft = prices_of(controller, [work]), chain(4, 0.9, "copier")
    controller.wants(model, [work], [None], prices)
    row_s = prices.each[4] / 4 * prices.token_s
    for count in range(5):
        risks_s = [row_s * (1 - score) for score in draft.scores[:count]]
        controller._records["copier", 0].credit_s = 1e-9 + sum(risks_s)
        chosen, _ = controller.choose([Offer(draft, draft.scores)], prices)
        assert len(chosen[0]) == count


def test_a_delay_does_not_empty_a_credit() -> None:
    """Of a call that takes far longer than all before, the rest has another cause, as long as that is rare."""
    controller, model, work = ready(), Model(), Work(sequence_of(9), 1, 4)
    for _ in range(8):
        asked(controller, model, [work], [NO_DRAFT], 0.0001)
    record = controller._records["model", 0]
    record.pass_time(100.0)
    before = record.credit_s
    observed(controller, model, [work], [NO_DRAFT], prices_of(controller, [work]), 0.4)
    assert record.credit_s > before - 0.001, "the share of a hundred seconds pays for it"
    observed(controller, model, [work], [NO_DRAFT], prices_of(controller, [work]), 0.4)
    observed(controller, model, [work], [NO_DRAFT], prices_of(controller, [work]), 0.8)
    assert record.credit_s < before - 0.7, "nothing pays for the next ones"


def test_a_hot_request_leaves_what_is_known_of_greedy_ones() -> None:
    """A head that is right under greedy decoding and wrong at a high temperature."""
    by_kind = head(lambda place: 0.9 if place[0] % 8 else 0.02, confidence=constant(0.9))
    world = World(CHEAP, [by_kind])
    world._next_request = 1
    world.write(100, requests=3)
    greedy = world.controller._records["head", 0]
    before = greedy.odds.factor, dict(greedy.gains), greedy.credit_s, dict(greedy.costs_s), greedy.time_s
    world._next_request = 8
    world.write(200, temperature=2.0)
    hot = world.controller._records["head", 2]
    assert hot.time_s > 0 and hot.odds.factor < 0.5
    assert (greedy.odds.factor, dict(greedy.gains), greedy.credit_s, dict(greedy.costs_s), greedy.time_s) == before
    queries = by_kind.queries
    world.write(100)
    assert by_kind.queries - queries > 20, "it drafts for the next greedy request at once"


def test_the_same_inputs_and_clock_give_the_same_decisions() -> None:
    def run() -> World:
        players = [copier(constant(0.4)), head(lambda place: 0.8 if place[0] % 2 else 0.2, acceptance=(0.7,) * 4)]
        return World(CHEAP, players, noise=0.3, hiccup_every=31).write(120, requests=6, batch=3, prompt=30)

    one, other = run(), run()
    assert (one.elapsed, one.verified, one.queried, one.reasons) == (
        *(other.elapsed, other.verified, other.queried, other.reasons),
    )
