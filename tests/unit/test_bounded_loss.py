"""Never slower, whatever proposers do: their drafts and their times are drawn at random, and change at will."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.controller_world import CHEAP, DEAR, FLAT, GPU, NARROW, Place, Player, World, chance

MACHINES = {"cheap": CHEAP, "dear": DEAR, "narrow": NARROW, "flat": FLAT, "gpu": GPU}


@dataclass(frozen=True)
class Phase:
    """How a proposer behaves for a while."""

    right: float
    confidence: float
    coverage: float  # how often it drafts


phases = st.builds(Phase, st.floats(0, 1), st.floats(0.02, 1), st.floats(0, 1))


@st.composite
def players(draw: st.DrawFn, name: str, free: bool, step_s: float) -> Player:
    """Its phases take turns of some tokens. Some of its calls take many times as long as others."""
    turns, length = draw(st.lists(phases, min_size=1, max_size=3)), draw(st.integers(10, 200))
    slow, every = draw(st.sampled_from([1.0, 5.0, 100.0])), draw(st.integers(2, 60))

    def phase(place: Place) -> Phase:
        return turns[place[1] // length % len(turns)]

    return Player(
        name,
        lambda place: phase(place).right,
        query_s=draw(st.sampled_from([0.001, 0.05, 0.5, 4.0])) * step_s,
        node_s=0.0 if free else draw(st.sampled_from([0.0, 0.05, 1.0])) * step_s,
        missing_s=0.0 if free else draw(st.sampled_from([0.0, 0.001, 0.05])) * step_s,
        free=free,
        confidence=lambda place: phase(place).confidence,
        drafts=lambda place: chance(3, *place) < phase(place).coverage,
        acceptance=draw(st.sampled_from([(), (0.75,) * 4])),
        late=lambda query: slow if query % every == 0 else 1.0,
        seed=draw(st.integers(0, 9)),
    )


@st.composite
def worlds(draw: st.DrawFn) -> World:
    truth = MACHINES[draw(st.sampled_from(sorted(MACHINES)))]
    step_s = truth.curve.seconds_at(1)
    some = [draw(players("copier", True, step_s)), draw(players("head", False, step_s))]
    return World(truth, some[: draw(st.integers(1, 2))], noise=draw(st.sampled_from([0.0, 0.3])))


@given(worlds(), st.integers(1, 4), st.integers(1, 120))
@settings(max_examples=40, deadline=None)
def test_time_stays_within_two_percent_and_a_constant_of_plain(world: World, batch: int, prompt: int) -> None:
    """The constant: what each proposer may lose at the start, and one call of it that nobody could foresee."""
    world.write(500, requests=3, batch=batch, prompt=prompt)
    step_s = world.truth.seconds_at(1)
    most_s = sum(
        4 * step_s
        + 0.01
        + batch * ((player.query_s + player.node_s * 16) * max(map(player.late, range(61))) + player.missing_s * prompt)
        for player in world.players.values()
    )
    assert world.elapsed <= 1.02 * world.plain + 2 * most_s


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("free", [True, False])
def test_it_comes_back_when_drafts_become_right(machine: str, free: bool) -> None:
    truth = MACHINES[machine]
    step_s = truth.curve.seconds_at(1)
    player = Player(
        "one",
        lambda place: 0.95 * (place[0] >= 4),
        query_s=0.02 * step_s,
        node_s=0.0 if free else 0.05 * step_s,
        free=free,
        confidence=lambda place: 0.9,
        num_lookahead_tokens=6,
    )
    world = World(truth, [player]).write(200, requests=4)
    assert sum(map(bool, world.verified[-100:])) < 30, "it rests"
    world.write(300, requests=3)
    always = World(truth, [replace(player, probability=lambda place: 0.95)]).write(300, requests=3)
    assert sum(map(bool, world.verified[-50:])) > 40
    assert always.speedup > 1.2
