"""The controller in a simulated world (controller_world.py)."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from foredraft.control.costs import Calibration
from foredraft.control.economics import VerifyCurve
from foredraft.control.reasons import DRAFTED, MEASURING, NOTHING_PROPOSED
from tests.unit.controller_world import CHEAP, DEAR, NARROW, ROWS, Player, World, constant, copier, head


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
