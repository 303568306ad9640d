"""`auto` beside every fixed setting, over mixes of proposers that are good, bad or changing, in simulated time."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import pytest

from foredraft.control.costs import Calibration
from tests.unit.controller_world import CHEAP, FLAT, NARROW, Place, Player, World, chance

MACHINES = {"rows are cheap": CHEAP, "rows are dear": NARROW, "rows are free": FLAT}
SETTINGS = [
    {},
    *({"copier": nodes} for nodes in (8, 16)),
    *({"head": nodes} for nodes in (1, 2, 4, 8)),
    *({"copier": 16, "head": nodes} for nodes in (2, 4, 8)),
]


def is_copied(share: float, place: Place) -> bool:
    """Whether the text copies here: in stretches of twelve tokens."""
    return chance(7, place[0], place[1] // 12) < share


def copier(share: float) -> Player:
    """Sure and right in copied stretches. Elsewhere it seldom drafts, and is less often right than it says."""
    return Player(
        "copier",
        lambda place: 0.985 if is_copied(share, place) else 0.3,
        query_s=5e-5,
        confidence=lambda place: 0.93 if is_copied(share, place) else 0.45,
        drafts=lambda place: is_copied(share, place) or chance(9, *place) < 0.2,
        seed=1,
    )


def head(step_s: float, right: Callable[[Place], float], sure: bool = False) -> Player:
    """A draft token takes six hundredths of a plain step, the prompt a fifth of one."""
    return Player(
        "head",
        right,
        query_s=0.02 * step_s,
        node_s=0.06 * step_s,
        missing_s=0.002 * step_s,
        free=False,
        confidence=(lambda place: 0.95) if sure else None,
        num_lookahead_tokens=8,
        acceptance=(0.74,) * 5,
        seed=2,
    )


def open_text(place: Place) -> float:
    """Right in three of four positions: some are easy and some are hard."""
    return 0.95 if chance(11, *place) < 0.6 else 0.43


MIXES: dict[str, Callable[[float], list[Player]]] = {
    "copies, good head": lambda step_s: [copier(0.4), head(step_s, open_text)],
    "no copies, good head": lambda step_s: [copier(0.0), head(step_s, open_text)],
    "copies, bad head": lambda step_s: [copier(0.4), head(step_s, lambda place: 0.0, sure=True)],
    "no copies, bad head": lambda step_s: [copier(0.0), head(step_s, lambda place: 0.1)],
    "copies, changing head": lambda step_s: [
        copier(0.2),
        head(step_s, lambda place: 0.1 if place[0] % 2 else open_text(place), sure=True),
    ],
}


def write(machine: Calibration, players: list[Player], setting: dict[str, int] | None = None) -> World:
    return World(machine, players, fixed=setting).write(150, requests=6, prompt=100)


@cache
def auto(machine: str, mix: str) -> World:
    return write(MACHINES[machine], MIXES[mix](MACHINES[machine].curve.seconds_at(1)))


@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize("machine", MACHINES)
def test_auto_comes_close_to_the_best_fixed_setting(machine: str, mix: str) -> None:
    step_s = MACHINES[machine].curve.seconds_at(1)
    best = max(write(MACHINES[machine], MIXES[mix](step_s), setting).speedup for setting in SETTINGS)
    assert auto(machine, mix).speedup >= 0.95 * best


@pytest.mark.parametrize("mix", [mix for mix in MIXES if "bad" in mix])
@pytest.mark.parametrize("machine", MACHINES)
def test_a_bad_head_costs_next_to_nothing(machine: str, mix: str) -> None:
    step_s = MACHINES[machine].curve.seconds_at(1)
    alone = write(MACHINES[machine], MIXES[mix](step_s)[:1])
    beside = auto(machine, mix)
    assert beside.elapsed <= alone.elapsed / 0.98 + 0.02, "beside the allowance"


@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize("machine", MACHINES)
def test_auto_is_never_slower_than_plain_decoding(machine: str, mix: str) -> None:
    world = auto(machine, mix)
    assert world.elapsed <= 1.02 * world.plain + 0.05
