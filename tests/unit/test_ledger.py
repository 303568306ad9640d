"""What a proposer may lose: its ledger covers what is expected to be lost. And what its tokens are worth."""

from __future__ import annotations

import pytest

from foredraft.control.controller import Controller
from foredraft.control.costs import Costs, StepTimes
from foredraft.control.ledger import Pace
from foredraft.control.reasons import DRAFTED, LEDGER
from foredraft.control.worth import Candidate, Load
from foredraft.types import Draft, Work
from tests.unit.controller_world import CHEAP, DEAR, NARROW, Place, Player, World, chance
from tests.unit.test_controller import chain, constant, sequence_of

COPIER = Candidate("copier", is_free=True, most=8)
WORK, LOAD = Work(sequence_of(9), 1, 8), Load(1, 9, 1)


def known(machine: str = "dear") -> Controller:
    """It has seen what plain steps take."""
    controller = Controller(Costs({"dear": DEAR, "cheap": CHEAP}[machine]))
    for _ in range(16):
        controller.observe_plain(LOAD, StepTimes(controller.costs.run(1, 9)))
    return controller.copy()


def chosen(controller: Controller, draft: Draft) -> tuple[int, str]:
    drafts, reasons = controller.choose([WORK], [draft], LOAD)
    return len(drafts[0]), reasons[0]


def test_a_ledger_covers_what_is_expected_to_be_lost_of_a_row() -> None:
    controller = known()
    row_s = controller.costs.added(1, 9, [9])[0]
    ledger = controller._ledger(COPIER)
    for balance_s, score, verdict in [
        (0.06 * row_s, 0.95, (1, DRAFTED)),
        (0.04 * row_s, 0.95, (0, LEDGER)),
        (0.25 * row_s, 0.7, (0, LEDGER)),
        (0.35 * row_s, 0.7, (1, DRAFTED)),
        (-0.01 * row_s, 1.0, (0, LEDGER)),
    ]:
        ledger.balance_s = balance_s
        assert chosen(controller, chain(1, score, "copier")) == verdict, (balance_s, score)


def test_a_ledger_covers_all_rows_of_a_step_together() -> None:
    controller = known("cheap")
    row_s = controller.costs.added(1, 9, [9] * 4)[-1] / 4
    risk_s = [row_s * (1 - 0.9**depth) for depth in range(1, 5)]
    for count in range(5):
        controller._ledger(COPIER).balance_s = 1e-9 + sum(risk_s[:count])
        assert chosen(controller, chain(4, 0.9, "copier"))[0] == count


def test_a_copier_that_has_lost_its_allowance_still_verifies_sure_copies() -> None:
    """Copies come late, when many doubtful drafts have emptied the ledger. Each row costs half a plain step."""

    def is_copied(place: Place) -> bool:
        return place[0] >= 20

    copier = Player(
        "copier",
        lambda place: 0.97 if is_copied(place) else 0.25,
        query_s=2e-4,
        confidence=lambda place: 0.95 if is_copied(place) else 0.45,
        drafts=lambda place: is_copied(place) or chance(9, *place) < 0.3,
        seed=1,
    )
    world = World(NARROW, [copier], deciding_s=1e-4).write(100, requests=20)
    assert world.controller._ledgers["copier"].balance_s < 0.25 * world.controller._allowance_s, "it has lost it"
    before_s, before = world.elapsed, world.plain
    world.write(100, requests=3)
    assert (world.plain - before) / (world.elapsed - before_s) > 1.3


def test_the_less_a_query_is_expected_to_lose_the_sooner_it_is_made_again() -> None:
    """Neither head pays: one loses nearly all that a draft takes, the other a fifth of it."""
    queries: list[int] = []
    for probability in (0.05, 0.35):
        head = Player("head", constant(probability), query_s=0.004, is_free=False, most=4, seed=2)
        world = World(CHEAP, [head]).write(400, requests=10)
        assert world.elapsed < 1.01 * world.plain, "both lose their share of the time, and no more"
        queries.append(head.queries)
    assert queries[1] > 1.5 * queries[0]


def test_tokens_take_what_they_take_where_a_proposer_drafts_alone() -> None:
    head, copier = Pace("head", 0.01), Pace("copier", 0.01)
    for _ in range(300):  # plain steps, and copies of ten tokens
        for pace in (head, copier):
            pace.count((), 1.0, 1.0)
            pace.count({"copier"}, 2.0, 10.0)
            pace.count({"copier", "head"}, 2.0, 10.0)
    assert head.share == pytest.approx(1.0)
    assert copier.share == pytest.approx(3 / 11, rel=0.05)
    for _ in range(300):
        head.count({"head"}, 2.0, 3.0)
    assert head.share == pytest.approx(2 / 3, rel=0.01)


def test_copies_do_not_keep_a_head_from_what_it_gains_between_them() -> None:
    """Half of the text is copied, eight tokens a step. The head saves a sixth of the time of the other half."""

    def is_copied(place: Place) -> bool:
        return place[1] % 40 < 20

    copier = Player("copier", constant(0.99), query_s=1e-5, drafts=is_copied, confidence=constant(0.97), most=8, seed=1)
    head = Player(
        "head", constant(0.75), query_s=0.006, node_s=0.0005, is_free=False, most=8, acceptance=(0.75,) * 5, seed=2
    )
    world = World(CHEAP, [copier, head]).write(400, requests=5)
    asked = [bool(queried["head"]) for queried, size in zip(world.queried, world.verified, strict=True) if size < 8]
    assert sum(asked) > 0.8 * len(asked)
