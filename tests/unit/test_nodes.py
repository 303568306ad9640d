"""The nodes of drafts: their probabilities, corrected by the record, and how many are worth their rows."""

from __future__ import annotations

import math
from itertools import accumulate

import pytest
from hypothesis import given
from hypothesis import strategies as st

from foredraft.control.nodes import Odds, best_count
from foredraft.types import Draft
from tests.unit.controller_calls import chain


def log_odds(probability: float) -> float:
    return math.log(probability / (1 - probability))


@pytest.mark.parametrize(("said", "true"), [(0.5, 0.9), (0.9, 0.6), (0.97, 0.97), (0.999, 0.9)])
def test_confidence_is_corrected_by_the_record(said: float, true: float) -> None:
    """All confidences by the same log odds: what is known of one tells about the others."""
    odds = Odds()
    for trial in range(400):
        draft, is_right = chain(1, said), (trial * 617) % 1000 < 1000 * true
        odds.learn(draft, odds.survivals(draft), (7, 7) if is_right else (8,))
    assert odds.survivals(chain(1, said))[0] == pytest.approx(true, abs=0.05)
    corrections = [log_odds(odds.survivals(chain(1, each))[0]) - log_odds(each) for each in (0.2, 0.7)]
    assert corrections[0] == pytest.approx(corrections[1])


def test_only_what_was_tested_counts() -> None:
    """Of two branches, the second is right. What hangs from the first, or behind the last committed token, says
    nothing."""
    draft = Draft((5, 6, 5, 6), (-1, -1, 0, 1), (0.5, 0.4, 0.3, 0.3), ("test",) * 4)
    alike = Draft((5, 6), (-1, -1), (0.5, 0.4), ("test",) * 2)
    one, other = Odds(), Odds()
    one.learn(draft, one.survivals(draft), (6,))
    other.learn(alike, other.survivals(alike), (6,))
    assert one.factor == other.factor != 1


@given(st.floats(0.05, 20), st.floats(0.01, 0.99))
def test_a_confidence_is_the_reverse_of_its_correction(factor: float, survival: float) -> None:
    odds = Odds()
    odds.factor = factor
    confidence = odds.confidence(survival)
    if 0.002 < confidence < 0.998:
        assert odds.survivals(chain(1, confidence))[0] == pytest.approx(survival)


@given(st.lists(st.floats(0.0, 1.0), max_size=12), st.lists(st.floats(0.0, 1.0), max_size=12))
def test_the_best_count_is_the_best_of_all(survivals: list[float], costs: list[float]) -> None:
    ordered, extra = sorted(survivals, reverse=True), [0.0, *accumulate(costs)]
    count, gain = best_count(ordered, extra)
    gains = [sum(ordered[:size]) - extra[size] for size in range(min(len(ordered), len(costs)) + 1)]
    assert gain == pytest.approx(max(gains)) and gains[count] == pytest.approx(gain)
