"""What runs and drafts are taken to cost."""

from __future__ import annotations

import pytest

from foredraft.control.costs import Calibration, Costs
from tests.unit.controller_world import CHEAP, DEAR


def test_costs_follow_the_machine_and_ignore_outliers() -> None:
    costs = Costs(DEAR)
    for step in range(200):
        rows = 1 + step % 5
        seconds = 1.5 * DEAR.curve.seconds_at(rows)
        costs.observe_runs(rows, 0, [50 * seconds if step % 9 == 0 else seconds])
    for rows in (1, 3, 5):
        assert costs.run(rows, 0) == pytest.approx(1.5 * DEAR.curve.seconds_at(rows), rel=0.05)
    assert costs.draft("unknown", 1, 1) is None


def test_plain_steps_do_not_seem_slower_where_only_drafts_are_seen() -> None:
    """Rows of drafts take half as long again as the calibration has them; then the machine becomes slower."""
    costs, plain_s, draft_s = Costs(CHEAP), CHEAP.curve.seconds_at(1), 1.5 * CHEAP.curve.seconds_at(16)
    costs.observe_runs(1, 0, [plain_s] * 8)
    for _ in range(100):
        costs.observe_runs(16, 0, [draft_s])
    assert costs.run(1, 0) == pytest.approx(plain_s)
    assert costs.run(16, 0) == pytest.approx(draft_s)
    for _ in range(100):
        costs.observe_runs(16, 0, [2 * draft_s])
    assert costs.run(1, 0) == pytest.approx(2 * plain_s)


def test_drafts_cost_what_calls_took_and_more_for_more_sequences() -> None:
    costs = Costs(DEAR)
    for nodes, seconds in ((4, 0.002), (4, 0.9), (4, 0.002), (8, 0.003)):
        costs.observe_draft("model", nodes, 1, seconds)
    known = [costs.draft("model", nodes, 1) for nodes in (2, 4, 6, 8, 16)]
    assert known == pytest.approx([0.001, 0.002, 0.0025, 0.003, 0.005])
    assert costs.level("model", 1) == pytest.approx(0.003 / 8)
    assert costs.draft("model", 8, 16) == pytest.approx(0.003 * DEAR.curve.relative(16))


def test_longer_contexts_cost_more() -> None:
    costs = Costs(Calibration(DEAR.curve, 100, 1e-6))
    assert costs.run(2, 2 * 1100) == pytest.approx(DEAR.curve.seconds_at(2) + 2000e-6)
