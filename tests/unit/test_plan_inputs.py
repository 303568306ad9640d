"""What a plan takes from a cell of a benchmark."""

from __future__ import annotations

from dataclasses import replace

from foredraft.bench.cells import Cell
from foredraft.control.economics import VerifyCurve, flip_batch
from foredraft.plan.inputs import flip_of, inputs_of

LINEAR = VerifyCurve((1, 401), (10.0, 810.0))  # 8 + 2 * rows
# One draft token a run: with what it costs, three quarters of it are accepted.
CELL = Cell("ngram", "all", 1, 0.0, "int4", 8, 50.0, 1.75 / 1.2, 1.75, 0.75, True, drafted_per_run=1.0)


def test_a_setting_flips_where_its_own_drafts_no_longer_pay() -> None:
    """Free drafts of one token for each of B sequences take 8 + 4B against 8 + 2B: they pay while B < 12."""
    assert flip_of(inputs_of(CELL, None, LINEAR), CELL, 256) == 12
    assert flip_of(inputs_of(CELL, None, LINEAR), CELL, 11) is None


def test_long_drafts_flip_before_the_best_length_does() -> None:
    long = replace(CELL, tokens_per_run=3.0, drafted_per_run=16.0, ratio_to_off=1.0)
    found = inputs_of(long, None, VerifyCurve((1, 16, 17, 401), (1.0, 1.0, 1.1, 40.0)))
    flip = flip_of(found, long, 256)
    assert found.curve is not None and flip is not None
    best = flip_batch(found.curve, found.alpha, found.cost, 16, 256)
    assert best is None or best > flip
