"""The controller called by hand: catching up, what is at hand, credits."""

from __future__ import annotations

from dataclasses import replace

import pytest

from foredraft.control.controller import Offer
from foredraft.control.costs import Calibration, Load
from foredraft.control.economics import VerifyCurve
from foredraft.control.reasons import DRAFTED, LEDGER, RESTING
from foredraft.types import NO_DRAFT, TARGET, Commit, Work
from tests.unit.controller_calls import (
    Model,
    asked,
    chain,
    credit_of,
    observed,
    prices_of,
    ready,
    record_of,
    sequence_of,
)
from tests.unit.controller_world import CHEAP, DEAR, ROWS, World, constant, copier, head


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
