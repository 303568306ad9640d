"""The controller where steps are short, as for a small model on a GPU: deciding about proposers takes time as well."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from foredraft.control.controller import Controller
from foredraft.control.costs import Costs
from foredraft.control.worth import Candidate, Load, Worth
from tests.unit.controller_world import CHEAP, GPU, Place, Player, World, chance
from tests.unit.test_controller import Probability, constant, head, share_of_queries


def seldom_right(drafts: float = 0.2) -> Player:
    """What copying finds in open text: a draft now and then, which is right in three of ten cases."""

    def finds(place: Place) -> bool:
        return chance(9, *place) < drafts

    return Player("copier", constant(0.3), query_s=2e-5, confidence=constant(0.45), drafts=finds, seed=1)


def slow_head(right: Probability) -> Player:
    """Takes more than a plain step of the GPU for a draft, however short."""
    return head(right, 0.00002, query_s=0.0009, missing_s=4e-7, acceptance=(0.75,) * 5, seed=2)


OPEN_TEXT: dict[str, Callable[[], list[Player]]] = {
    "nothing to copy": lambda: [seldom_right(drafts=0.0)],
    "little to copy": lambda: [seldom_right()],
    "a head that nearly pays": lambda: [
        seldom_right(),
        slow_head(lambda place: 0.8 if chance(11, *place) < 0.4 else 0.3),
    ],
    "a head that is wrong": lambda: [seldom_right(), slow_head(constant(0.2))],
}


@pytest.mark.parametrize("deciding_s", [0.00003, 0.00006])
@pytest.mark.parametrize("players", OPEN_TEXT)
def test_deciding_is_paid_by_what_it_is_about(players: str, deciding_s: float) -> None:
    """A plain step takes 0.78 ms, as for a small model on a GPU. Deciding in every step would cost 4 or 8 % of it."""
    world = World(GPU, OPEN_TEXT[players](), noise=0.1, deciding_s=deciding_s).write(128, requests=30, prompt=60)
    assert world.elapsed <= 1.02 * world.plain


def test_deciding_does_not_keep_from_what_pays() -> None:
    often = Player("copier", constant(0.7), query_s=2e-5, drafts=lambda place: chance(9, *place) < 0.5, seed=1)
    free, paid = (World(GPU, [often], deciding_s=deciding_s).write(1500) for deciding_s in (0.0, 0.00006))
    assert share_of_queries(paid, "copier") > 0.99
    assert paid.elapsed < free.elapsed + 1.02 * 0.00006 * len(paid.queried)


def test_what_deciding_takes_is_a_mean_without_delays() -> None:
    costs = Costs(GPU)
    for seconds in (0.5, *[0.00002] * 7, *[0.00005] * 3, 0.09):  # the first one is slow
        costs.observe_deciding("copier", 1, seconds)
    for seconds in (0.5, 0.0002):
        costs.observe_deciding("head", 4, seconds)
    assert costs.deciding("copier") == pytest.approx((7 * 0.00002 + 4 * 0.00005) / 11)
    assert costs.deciding("head") == pytest.approx(0.00005), "of one sequence"
    assert costs.deciding("unknown") == 0


def test_catching_up_slows_down_with_its_tokens_as_the_target_does() -> None:
    costs = Costs(GPU)
    costs.observe_catch_up("head", 16, 0.0004)
    assert costs.catch_up("head", 64) == pytest.approx(0.0004 * costs.run(64, 0) / costs.run(16, 0))
    assert costs.catch_up("head", 0) == costs.catch_up("unknown", 64) == 0


def test_an_allowance_pays_for_several_drafts_of_a_head() -> None:
    model = Candidate("model", is_free=False, most=4)
    small, large = (Controller(Costs(machine))._ledger(model) for machine in (GPU, CHEAP))
    assert small.balance_s == 0.01, "four steps would be 3 ms"
    assert small.most_s == pytest.approx(64 * 0.00078)
    assert large.balance_s == pytest.approx(4 * 0.0105)


def test_a_promise_is_forgotten_where_queries_take_time() -> None:
    copier, load = Candidate("copier", is_free=True, most=4), Load(1, 9, 1)
    for deciding_s, is_tried in ((1e-5, True), (0.0001, False)):
        worth, costs = Worth(copier), Costs(GPU)
        for seconds in (0.5, deciding_s):
            costs.observe_deciding("copier", 1, seconds)
        for request in [*range(8)] * 4:
            worth.observe(request, [], 4, 4)
        (offer,) = worth.offers(copier, load, costs, lambda load: 0.00078)
        assert (offer.gain_s > 0) == is_tried


def test_one_hard_request_is_one_of_many() -> None:
    """Its own drafts soon decide about it, and hardly about the next."""
    model, load, costs = Candidate("model", is_free=False, most=4, acceptance=(0.7,) * 4), Load(1, 9, 1), Costs(GPU)
    costs.observe_draft("model", 4, 1, 0.0006)
    worth = Worth(model)
    for request in range(8):
        for _ in range(8):
            worth.observe(request, [0.7, 0.5, 0.35, 0.25], 4, 4)
    for _ in range(64):
        worth.observe(8, [0.01] * 4, 4, 4)
    offers = worth.offers(model, load, costs, lambda load: 0.00078)
    hard, new = (worth.best(offers, request) for request in (8, 9))
    assert hard.gain_s < hard.cost_s
    assert new.gain_s > new.cost_s
