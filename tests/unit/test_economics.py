"""The arithmetic of speculation: against exact fractions, against simulated cycles, and against brute force."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from fractions import Fraction
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from foredraft.control import economics
from foredraft.control.economics import Outlook, VerifyCurve
from foredraft.errors import ForedraftError

CURVE = VerifyCurve((1, 2, 4, 8, 16, 64), (0.012, 0.0125, 0.013, 0.016, 0.024, 0.08))
LINEAR = VerifyCurve((1, 2), (0.010, 0.012))  # 0.008 + 0.002 rows

alphas = st.floats(0, 1)
costs = st.floats(0, 2)
k_maxes = st.integers(1, 20)


def simulate_cycle(acceptances: Sequence[float], source: random.Random) -> int:
    """Tokens of one cycle: draft tokens are kept up to the first that is rejected, and the target adds one."""
    kept = 0
    for acceptance in acceptances:
        if source.random() >= acceptance:
            break
        kept += 1
    return kept + 1


def simulated_mean(acceptances: Sequence[float], cycles: int = 200_000) -> float:
    source = random.Random(11)
    return sum(simulate_cycle(acceptances, source) for _ in range(cycles)) / cycles


class TestExpectedTokens:
    @given(alphas, st.integers(0, 30))
    def test_is_the_geometric_sum(self, alpha: float, k: int) -> None:
        exact = Fraction(alpha)
        total = (1 - exact ** (k + 1)) / (1 - exact) if exact != 1 else Fraction(k + 1)
        assert economics.expected_tokens(alpha, k) == pytest.approx(float(total), rel=1e-12)

    def test_at_the_ends(self) -> None:
        assert economics.expected_tokens(1, 5) == 6
        assert economics.expected_tokens(0, 5) == 1
        assert economics.expected_tokens(0.7, 0) == 1

    @given(st.lists(alphas, max_size=12))
    def test_by_depth_is_the_sum_of_products(self, acceptances: list[float]) -> None:
        exact = 1 + sum(math.prod(map(Fraction, acceptances[:depth])) for depth in range(1, len(acceptances) + 1))
        assert economics.expected_tokens_by_depth(acceptances) == pytest.approx(float(exact), rel=1e-12)

    @pytest.mark.parametrize("alpha, k", [(0.3, 1), (0.8, 6), (0.95, 12)])
    def test_matches_simulated_cycles(self, alpha: float, k: int) -> None:
        assert simulated_mean([alpha] * k) == pytest.approx(economics.expected_tokens(alpha, k), rel=0.01)

    def test_matches_simulated_cycles_by_depth(self) -> None:
        acceptances = [0.9, 0.5, 0.95, 0.2, 0.8]
        expected = economics.expected_tokens_by_depth(acceptances)
        assert simulated_mean(acceptances) == pytest.approx(expected, rel=0.01)
        assert simulated_mean(acceptances[::-1]) != pytest.approx(expected, rel=0.01)  # the order matters


class TestSpeedup:
    def test_weighs_tokens_against_drafting_and_verifying(self) -> None:
        assert economics.speedup(0.5, 0.1, 2) == pytest.approx(1.75 / 1.2)
        assert economics.speedup(0.5, 0.1, 2, LINEAR.relative) == pytest.approx(1.75 / (0.2 + 0.014 / 0.010))
        assert economics.speedup(0.5, 0.1, 0, CURVE.relative) == 1

    def test_matches_simulated_time(self) -> None:
        tokens = simulated_mean([0.8] * 5)
        assert economics.speedup(0.8, 0.07, 5) == pytest.approx(tokens / (1 + 5 * 0.07), rel=0.01)

    @given(alphas, costs, k_maxes)
    def test_lengths_agree_with_it(self, alpha: float, cost: float, k_max: int) -> None:
        lengths = economics.lengths([alpha] * k_max, cost, CURVE.relative)
        assert [length.k for length in lengths] == list(range(k_max + 1))
        for length in lengths:
            assert length.expected_tokens == pytest.approx(economics.expected_tokens(alpha, length.k))
            assert length.speedup == pytest.approx(economics.speedup(alpha, cost, length.k, CURVE.relative))


class TestBestLength:
    @pytest.mark.parametrize("alpha, cost, k", [(0.3, 0.4, 0), (0.4, 0.3, 1), (0.8, 0.05, 8), (1.0, 0.5, 16)])
    def test_known_cases(self, alpha: float, cost: float, k: int) -> None:
        assert economics.best_length([alpha] * 16, cost).k == k

    @given(alphas, costs, k_maxes, st.sampled_from([economics.flat, CURVE.relative]))
    def test_is_the_argmax(self, alpha: float, cost: float, k_max: int, verify: economics.VerifyCost) -> None:
        best = economics.best_length([alpha] * k_max, cost, verify)
        rates = [economics.speedup(alpha, cost, k, verify) for k in range(k_max + 1)]
        assert best.speedup == pytest.approx(max(rates), rel=1e-12)
        assert all(rate < best.speedup * (1 + 1e-12) for rate in rates)
        assert all(rate < best.speedup for rate in rates[: best.k])  # anything as fast and shorter would have won

    def test_of_equals_the_shorter_wins(self) -> None:
        assert economics.best_length([0.3] * 4, 0.3).k == 0  # one draft token gains exactly nothing
        assert (
            economics.best_length([0.3] * 4, 9 / 121).k == 1
        )  # two draft tokens reach the same 1.21, but for rounding
        assert economics.best_length([0.0] * 4, 0.0).k == 0
        assert economics.best_length([], 0.1).k == 0

    def test_may_lie_behind_a_depth_that_does_not_pay(self) -> None:
        assert economics.best_length([0.5, 1.0, 1.0, 1.0], 0.6).k == 0
        assert economics.best_length([0.5, 1.0, 1.0, 1.0], 0.45).k == 4


class TestBreakEven:
    @pytest.mark.parametrize("cost", [0.0, 0.05, 0.3, 0.99])
    def test_with_cheap_verify_runs_alpha_must_exceed_the_cost(self, cost: float) -> None:
        assert economics.break_even_alpha(cost, 8) == pytest.approx(cost, abs=1e-15)

    def test_none_when_certain_drafts_do_not_pay(self) -> None:
        assert economics.break_even_alpha(1.0, 8) is None
        assert economics.break_even_alpha(0.1, 8, lambda rows: float(rows)) is None

    @given(st.floats(0, 1.2), k_maxes, st.sampled_from([economics.flat, CURVE.relative, LINEAR.relative]))
    def test_alpha_separates_loss_from_gain(self, cost: float, k_max: int, verify: economics.VerifyCost) -> None:
        edge = economics.break_even_alpha(cost, k_max, verify)
        if edge is None:
            assert economics.best_length([1.0] * k_max, cost, verify).k == 0
            return
        if edge > 1e-6:
            assert economics.best_length([edge - 1e-6] * k_max, cost, verify).k == 0
        if edge < 1 - 1e-6:
            assert economics.best_length([edge + 1e-6] * k_max, cost, verify).k > 0

    def test_a_longer_draft_may_pay_before_a_shorter_one(self) -> None:
        def costly_second_row(rows: int) -> float:
            return 1.0 if rows == 1 else 2.0

        assert economics.break_even_alpha(0.0, 1, costly_second_row) is None
        golden = (math.sqrt(5) - 1) / 2  # α + α² = 1
        assert economics.break_even_alpha(0.0, 2, costly_second_row) == pytest.approx(golden)
        assert economics.break_even_cost(0.9, 2, costly_second_row) == pytest.approx((0.9 + 0.81 - 1) / 2)

    def test_cost_with_cheap_verify_runs_is_alpha(self) -> None:
        assert economics.break_even_cost(0.4, 8) == 0.4

    def test_cost_is_none_when_free_drafts_do_not_pay(self) -> None:
        assert economics.break_even_cost(0.0, 8) is None
        assert economics.break_even_cost(0.1, 8, LINEAR.relative) is None

    @given(alphas, k_maxes, st.sampled_from([economics.flat, CURVE.relative, LINEAR.relative]))
    def test_cost_separates_gain_from_loss(self, alpha: float, k_max: int, verify: economics.VerifyCost) -> None:
        edge = economics.break_even_cost(alpha, k_max, verify)
        if edge is None:
            assert economics.best_length([alpha] * k_max, 0.0, verify).k == 0
        elif edge > 1e-6:
            assert economics.best_length([alpha] * k_max, edge - 1e-6, verify).k > 0
            assert economics.best_length([alpha] * k_max, edge + 1e-6, verify).k == 0


class TestVerifyCurve:
    def test_is_exact_where_measured_and_linear_between(self) -> None:
        assert [CURVE.seconds_at(rows) for rows in CURVE.rows] == pytest.approx(list(CURVE.seconds))
        assert CURVE.seconds_at(3) == pytest.approx(0.01275)
        assert CURVE.seconds_at(12) == pytest.approx(0.020)

    def test_goes_on_as_between_the_last_two(self) -> None:
        assert LINEAR.seconds_at(10) == pytest.approx(0.028)
        assert CURVE.seconds_at(112) == pytest.approx(0.08 + 0.056)

    def test_relative_is_in_runs_of_one_row(self) -> None:
        assert LINEAR.relative(1) == 1
        assert LINEAR.relative(6) == pytest.approx(2.0)

    @given(st.lists(st.floats(1e-6, 1.0), min_size=2, max_size=8))
    def test_more_rows_never_cost_less(self, seconds: list[float]) -> None:
        curve = VerifyCurve(tuple(range(1, 2 * len(seconds), 2)), tuple(seconds))
        times = [curve.seconds_at(rows) for rows in range(1, 3 * len(seconds))]
        assert all(more >= fewer * (1 - 1e-12) for fewer, more in pairwise(times))
        assert curve.seconds_at(1) == seconds[0]

    @pytest.mark.parametrize(
        ("rows", "seconds"),
        [
            ((), ()),
            ((1,), (0.1,)),
            ((1, 2), (0.1,)),
            ((2, 4), (0.1, 0.2)),
            ((0, 1), (0.1, 0.2)),
            ((1, 1), (0.1, 0.2)),
            ((1, 4, 2), (0.1, 0.2, 0.3)),
            ((1, 2), (0.0, 0.2)),
            ((1, 2), (0.1, math.nan)),
            ((1, 2), (0.1, math.inf)),
        ],
    )
    def test_bad_measurements_are_refused(self, rows: tuple[int, ...], seconds: tuple[float, ...]) -> None:
        with pytest.raises(ForedraftError, match="verify cost"):
            VerifyCurve(rows, seconds)


class TestBatches:
    @given(st.integers(1, 12), alphas, st.floats(0, 1))
    def test_best_at_batch_is_brute_force_over_seconds(self, batch: int, alpha: float, cost: float) -> None:
        step = CURVE.seconds_at(batch)
        rates = [
            batch * economics.expected_tokens(alpha, k) / (CURVE.seconds_at(batch * (k + 1)) + k * cost * step)
            for k in range(7)
        ]
        best = economics.best_at_batch(CURVE, alpha, cost, 6, batch)
        assert best.speedup == pytest.approx(max(rates) / (batch / step), rel=1e-12)
        assert rates[best.k] == pytest.approx(max(rates), rel=1e-12)

    def test_a_batch_of_one_is_the_plain_question(self) -> None:
        alone = economics.best_length([0.8] * 8, 0.05, CURVE.relative)
        assert economics.best_at_batch(CURVE, 0.8, 0.05, 8, 1) == alone

    @pytest.mark.parametrize("alpha, cost", [(0.5, 0.0), (0.8, 0.02), (0.9, 0.05), (0.95, 0.0)])
    def test_the_flip_is_the_first_batch_without_a_gain(self, alpha: float, cost: float) -> None:
        def pays(batch: int) -> bool:
            step = CURVE.seconds_at(batch)
            spent = [CURVE.seconds_at(batch * (k + 1)) + k * cost * step for k in range(1, 9)]
            return any(economics.expected_tokens(alpha, k) / s > 1 / step for k, s in enumerate(spent, 1))

        flip = economics.flip_batch(CURVE, alpha, cost, 8, 200)
        assert flip is not None and flip > 1
        assert [pays(batch) for batch in range(1, flip + 1)] == [True] * (flip - 1) + [False]

    def test_by_hand(self) -> None:
        """One token for each of B sequences takes 8 + 4B against 8 + 2B: it pays while 2B < α (8 + 2B), so below
        4α / (1 − α)."""
        assert economics.flip_batch(LINEAR, 0.75, 0.0, 1, 100) == 12
        assert economics.flip_batch(LINEAR, 0.76, 0.0, 1, 100) == 13

    def test_none_within_the_limit(self) -> None:
        assert economics.flip_batch(LINEAR, 0.75, 0.0, 1, 11) is None
        assert economics.flip_batch(VerifyCurve((1, 8), (0.1, 0.1)), 0.5, 0.1, 4, 300) is None

    def test_the_first_when_it_never_pays(self) -> None:
        assert economics.flip_batch(LINEAR, 0.1, 0.5, 8, 100) == 1


class TestNodeGain:
    @given(st.floats(1, 20), st.floats(1e-3, 1), alphas, st.floats(0, 1))
    def test_is_the_difference_of_rates(self, tokens: float, seconds: float, survival: float, extra: float) -> None:
        gain = (tokens + survival) / (seconds + extra) - tokens / seconds
        assert economics.node_gain(tokens, seconds, survival, extra) == pytest.approx(gain, rel=1e-9, abs=1e-9)

    def test_pays_when_likelier_than_the_tokens_its_time_could_bring(self) -> None:
        assert economics.node_gain(2.0, 0.020, 0.31, 0.003) > 0  # 100 tokens a second: 3 ms are worth 0.3 tokens
        assert economics.node_gain(2.0, 0.020, 0.29, 0.003) < 0
        assert economics.node_gain(2.0, 0.020, 0.5, 0.0) == pytest.approx(25.0)


class TestOutlook:
    def test_holds_the_answers_of_the_functions(self) -> None:
        outlook = Outlook.of(0.8, 0.02, 8, CURVE, 40)
        assert outlook.table == economics.lengths([0.8] * 8, 0.02, CURVE.relative)
        assert outlook.best == economics.best_length([0.8] * 8, 0.02, CURVE.relative)
        assert outlook.break_even_alpha == economics.break_even_alpha(0.02, 8, CURVE.relative)
        assert outlook.break_even_cost == economics.break_even_cost(0.8, 8, CURVE.relative)
        assert outlook.flip_batch == economics.flip_batch(CURVE, 0.8, 0.02, 8, 40)
        assert [each.batch for each in outlook.batches] == list(range(1, 41))
        assert outlook.batches[4].best_k == economics.best_at_batch(CURVE, 0.8, 0.02, 8, 5).k

    def test_without_a_curve_nothing_is_told_about_batches(self) -> None:
        outlook = Outlook.of(0.8, 0.02, 8, None, 40)
        assert (outlook.batches, outlook.flip_batch) == ([], None)
        assert outlook.best == economics.best_length([0.8] * 8, 0.02)

    @pytest.mark.parametrize("batch", [1, 4])
    def test_the_value_of_a_longer_draft_is_the_next_length(self, batch: int) -> None:
        shorter, longer = (economics.Outlook.of(0.8, 0.02, k_max, CURVE, 8, batch) for k_max in (5, 6))
        assert shorter.longer_gain == pytest.approx(longer.table[6].speedup - shorter.table[5].speedup)
        assert longer.best.speedup == pytest.approx(economics.best_at_batch(CURVE, 0.8, 0.02, 6, batch).speedup)


@pytest.mark.parametrize(
    "call",
    [
        lambda: economics.expected_tokens(1.1, 3),
        lambda: economics.expected_tokens(math.nan, 3),
        lambda: economics.expected_tokens(0.5, -1),
        lambda: economics.expected_tokens_by_depth([0.5, -0.1]),
        lambda: economics.speedup(0.5, -0.1, 3),
        lambda: economics.speedup(0.5, math.nan, 3),
        lambda: economics.lengths([0.5], math.inf),
        lambda: economics.break_even_alpha(-1.0, 3),
        lambda: economics.break_even_alpha(0.1, 0),
        lambda: economics.break_even_cost(2.0, 3),
        lambda: economics.break_even_cost(0.5, 0),
        lambda: economics.flip_batch(CURVE, 0.5, 0.1, 3, 0),
        lambda: CURVE.seconds_at(0),
        lambda: economics.node_gain(1.0, 0.0, 0.5, 0.1),
        lambda: economics.node_gain(1.0, 1.0, 1.5, 0.1),
        lambda: economics.node_gain(1.0, 1.0, 0.5, -0.1),
        lambda: economics.node_gain(math.nan, 1.0, 0.5, 0.1),
        lambda: Outlook.of(-0.1, 0.1, 3, None, 1),
    ],
)
def test_bad_figures_are_refused_with_a_sentence(call: object) -> None:
    assert callable(call)
    with pytest.raises(ForedraftError, match=r"must be .*\.$"):
        call()
