"""What runs are taken to cost."""

from __future__ import annotations

import pytest

from foredraft.control.costs import Calibration, Costs, Load
from tests.unit.controller_world import CHEAP, DEAR


def test_costs_follow_the_machine_and_ignore_outliers() -> None:
    costs = Costs(DEAR)
    for step in range(200):
        rows = 1 + step % 5
        seconds = 1.5 * DEAR.curve.seconds_at(rows)
        costs.observe(rows, 0, 50 * seconds if step % 9 == 0 else seconds, True)
    for rows in (1, 3, 5):
        assert costs.run(rows, 0) == pytest.approx(1.5 * DEAR.curve.seconds_at(rows), rel=0.05)


def test_plain_steps_do_not_seem_slower_where_only_drafts_are_seen() -> None:
    """Rows of drafts take half as long again as the calibration has them; then the machine becomes slower."""
    costs, plain_s, draft_s = Costs(CHEAP), CHEAP.curve.seconds_at(1), 1.5 * CHEAP.curve.seconds_at(16)
    for _ in range(8):
        costs.observe(1, 0, plain_s, True)
    for _ in range(100):
        costs.observe(16, 0, draft_s, False)
    assert costs.run(1, 0) == pytest.approx(plain_s)
    assert costs.run(16, 0) == pytest.approx(draft_s)
    for _ in range(16):
        costs.observe(1, 0, 2 * plain_s, True)
    assert costs.run(1, 0) == pytest.approx(2 * plain_s)
    assert costs.run(16, 0) == pytest.approx(2 * draft_s)


def test_more_rows_cost_what_they_add_in_tokens_of_plain_decoding() -> None:
    """Of three sequences beside a prompt of five rows: a token is a third of a run of three rows."""
    costs, curve = Costs(DEAR), DEAR.curve
    token_s = curve.seconds_at(3) / 3
    added = [(curve.seconds_at(8 + count) - curve.seconds_at(8)) / token_s for count in range(5)]
    assert costs.extra(Load(8, 0, 3), 4)[:5] == pytest.approx(added)
    assert costs.token(Load(8, 0, 3)) == pytest.approx(token_s)


def test_longer_contexts_cost_more() -> None:
    costs = Costs(Calibration(DEAR.curve, 100, 1e-6))
    assert costs.run(2, 2 * 1100) == pytest.approx(DEAR.curve.seconds_at(2) + 2000e-6)


def test_prompts_tell_nothing_of_the_machine() -> None:
    """Prompts of more rows than were calibrated take ten times what the curve promises."""
    costs = Costs(CHEAP)
    for _ in range(40):
        costs.observe(500, 0, 10 * CHEAP.curve.seconds_at(500), True)
        assert not costs.is_known(1)
    for _ in range(4):
        costs.observe(1, 0, CHEAP.curve.seconds_at(1), True)
    assert costs.is_known(1)
    assert costs.run(1, 0) == pytest.approx(CHEAP.curve.seconds_at(1))
    assert costs.run(500, 0) == pytest.approx(10 * CHEAP.curve.seconds_at(500), rel=0.1)


def test_a_wrong_start_is_mended_by_plain_steps() -> None:
    """The first steps take ten times as long as all others, while kernels are compiled for instance."""
    costs = Costs(CHEAP)
    for _ in range(8):
        costs.observe(16, 0, 10 * CHEAP.curve.seconds_at(16), True)
    for _ in range(20):
        costs.observe(1, 0, CHEAP.curve.seconds_at(1), True)
    assert costs.is_known(1)
    assert costs.run(1, 0) == pytest.approx(CHEAP.curve.seconds_at(1), rel=0.1)
