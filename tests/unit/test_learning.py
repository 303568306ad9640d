"""When the controller learns: while the target runs, from everything, and once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from foredraft.control.controller import Controller
from foredraft.simulate.engine import SimulatedEngine
from foredraft.types import Stop, Verdict, Work
from tests.unit.controller_world import CHEAP, Player, World

Verdicts = tuple[list[Verdict], list[Stop]]


def test_what_is_learnt_is_learnt_while_the_target_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """A draft never waits for it; only what ended has nobody to wait for."""
    running = [False]
    learnt: list[bool] = []
    start, observe_query = SimulatedEngine.start, Controller.observe_query

    def watched_start(self: SimulatedEngine, works: list[Work]) -> Callable[[], Verdicts]:
        finish = start(self, works)
        running[0] = True

        def finished() -> Verdicts:
            running[0] = False
            return finish()

        return finished

    def watched(self: Controller, *arguments: Any) -> None:
        learnt.append(running[0])
        observe_query(self, *arguments)

    monkeypatch.setattr(SimulatedEngine, "start", watched_start)
    monkeypatch.setattr(Controller, "observe_query", watched)
    World(CHEAP, [Player("model", lambda place: 0.8)]).write(60)
    assert learnt and all(learnt)


def test_every_step_and_query_is_learnt_from_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also those of the last step of a request, after which nobody may run any more."""
    steps: list[float] = []
    queries: list[int] = []
    observe, observe_query = Controller.observe, Controller.observe_query

    def watched_steps(self: Controller, *arguments: Any) -> None:
        steps.append(arguments[5])
        observe(self, *arguments)

    def watched_queries(self: Controller, candidate: Any, works: list[Work], *arguments: Any) -> None:
        queries.append(len(works))
        observe_query(self, candidate, works, *arguments)

    monkeypatch.setattr(Controller, "observe", watched_steps)
    monkeypatch.setattr(Controller, "observe_query", watched_queries)
    player = Player("model", lambda place: 0.8)
    world = World(CHEAP, [player]).write(60, requests=3)
    assert sum(queries) == player.queries
    assert len(steps) >= len(world.verified), "prompts count as well"
    assert sum(steps) >= world.elapsed - 1e-9


def test_learning_is_no_part_of_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the target does not run meanwhile, it is part of what looking takes."""
    player = Player("model", lambda place: 0.8)
    world = World(CHEAP, [player])
    runs: list[tuple[float, float]] = []
    observe, observe_query = Controller.observe, Controller.observe_query

    def watched(self: Controller, *arguments: Any) -> None:
        runs.append(arguments[5:])
        observe(self, *arguments)

    def slow(self: Controller, *arguments: Any) -> None:
        player.clock.now += 1.0
        observe_query(self, *arguments)

    monkeypatch.setattr(Controller, "observe", watched)
    monkeypatch.setattr(Controller, "observe_query", slow)
    world.write(20)
    assert all(run_s < 1.0 for run_s, _ in runs)
    assert any(looking_s >= 1.0 for _, looking_s in runs)
