"""What a proposer may lose, over many requests: its credit covers what is expected to be lost."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.unit.controller_world import CHEAP, GPU, NARROW, Place, Player, Probability, World, chance, constant, head


def test_a_copier_still_verifies_sure_copies_after_many_doubtful_ones() -> None:
    """Copies come late, when many doubtful drafts have been lost. Each row costs half a plain step."""

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
    world = World(NARROW, [copier]).write(100, requests=20)
    before_s, before = world.elapsed, world.plain
    world.write(100, requests=3)
    assert (world.plain - before) / (world.elapsed - before_s) > 1.3


def test_the_less_a_query_is_expected_to_lose_the_sooner_it_is_made_again() -> None:
    """Neither head pays: one loses nearly all that a draft takes, the other a fifth of it."""
    queries: list[int] = []
    for probability in (0.05, 0.35):
        head = Player("head", constant(probability), query_s=0.004, free=False, num_lookahead_tokens=4, seed=2)
        world = World(CHEAP, [head]).write(400, requests=10)
        assert world.elapsed < 1.01 * world.plain, "both lose their share of the time, and no more"
        queries.append(head.queries)
    assert queries[1] > 1.5 * queries[0]


def test_copies_do_not_keep_a_head_from_what_it_gains_between_them() -> None:
    """Half of the text is copied, eight tokens a step. The head saves a sixth of the time of the other half."""

    def is_copied(place: Place) -> bool:
        return place[1] % 40 < 20

    copier = Player(
        "copier",
        constant(0.99),
        query_s=1e-5,
        drafts=is_copied,
        confidence=constant(0.97),
        num_lookahead_tokens=8,
        seed=1,
    )
    head = Player(
        "head",
        constant(0.75),
        query_s=0.006,
        node_s=0.0005,
        free=False,
        num_lookahead_tokens=8,
        acceptance=(0.75,) * 5,
        seed=2,
    )
    world = World(CHEAP, [copier, head]).write(400, requests=5)
    asked = [bool(queried["head"]) for queried, size in zip(world.queried, world.verified, strict=True) if size < 8]
    assert sum(asked) > 0.8 * len(asked)


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


@pytest.mark.parametrize("players", OPEN_TEXT)
def test_open_text_on_a_gpu_loses_next_to_nothing(players: str) -> None:
    """A plain step takes 0.78 ms, as for a small model."""
    world = World(GPU, OPEN_TEXT[players](), noise=0.1).write(128, requests=30, prompt=60)
    assert world.elapsed <= 1.02 * world.plain


def test_one_hard_request_is_one_of_many() -> None:
    """Its own drafts soon decide about it, and hardly about the next."""
    easy_and_hard = slow_head(lambda place: 0.02 if place[0] == 8 else 0.9)
    world = World(GPU, [easy_and_hard]).write(60, requests=8)
    world.write(200)
    assert sum(bool(queried["head"]) for queried in world.queried[-100:]) < 10
    before = easy_and_hard.queries
    world.write(60)
    assert easy_and_hard.queries - before > 10
