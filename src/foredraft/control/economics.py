"""What speculation gains: tokens and time of a cycle, the best draft length, and where it stops paying.

A cycle drafts k tokens, verifies them in one run of k + 1 rows, and emits what was accepted and one token more. Costs
are in units of a plain step: `cost` is that of one draft token, `verify(rows)` that of a run, with verify(1) = 1.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

from foredraft.errors import InvalidParameter

VerifyCost = Callable[[int], float]

ROUNDING = 1e-14  # a longer draft has to win by more than this
HALVINGS = 60  # of an interval from 0 to 1: as fine as a float


def quotient(above: float, below: float) -> float:
    """A rate or a share of what was measured; 0 where nothing was."""
    return above / below if below else 0.0


def flat(rows: int) -> float:
    """The cost of a run that is bound by reading the weights: one plain step, however many rows."""
    return 1.0


@dataclass(frozen=True)
class VerifyCurve:
    """Measured seconds of a run by its number of rows, which must begin at 1 and grow.

    More rows never cost less: a measurement below an earlier one is taken for noise and raised to it.
    """

    rows: tuple[int, ...]
    seconds: tuple[float, ...]

    def __post_init__(self) -> None:
        if len(self.rows) != len(self.seconds) or len(self.rows) < 2:
            counts = f"{len(self.rows)} row counts and {len(self.seconds)} times"
            raise InvalidParameter(f"A verify cost of {counts} must have one time for each of at least two row counts.")
        if self.rows[0] != 1 or any(more <= fewer for fewer, more in pairwise(self.rows)):
            raise InvalidParameter(f"The row counts {list(self.rows)} of a verify cost must begin at 1 and grow.")
        if not all(math.isfinite(value) and value > 0 for value in self.seconds):
            raise InvalidParameter(f"The times {list(self.seconds)} of a verify cost must be seconds above 0.")
        object.__setattr__(self, "seconds", tuple(accumulate(self.seconds, max)))

    def seconds_at(self, rows: float) -> float:
        """Linear between measured row counts, and beyond the last as between the last two."""
        if rows < 1:
            raise InvalidParameter(f"rows={rows} must be at least 1.")
        place = min(bisect_right(self.rows, rows), len(self.rows) - 1)
        left, right = self.rows[place - 1], self.rows[place]
        slope = (self.seconds[place] - self.seconds[place - 1]) / (right - left)
        return self.seconds[place - 1] + slope * (rows - left)

    def relative(self, rows: int) -> float:
        """The cost of a run in units of a run of one row."""
        return self.seconds_at(rows) / self.seconds_at(1)

    def at_batch(self, batch: int) -> VerifyCost:
        """What `batch` sequences pay for `rows` rows each, in units of their common plain step."""
        step = self.seconds_at(batch)
        return lambda rows: self.seconds_at(batch * rows) / step


@dataclass(frozen=True)
class Length:
    """A draft length and what it brings: tokens of a cycle, and the rate in units of the plain one."""

    k: int
    expected_tokens: float
    speedup: float


def expected_tokens(alpha: float, k: int) -> float:
    """Tokens of a cycle whose draft tokens are each accepted with probability alpha: 1 + α + … + α^k."""
    _check_probability("alpha", alpha)
    _check_count("k", k, least=0)
    return math.fsum(alpha**depth for depth in range(k + 1))


def expected_tokens_by_depth(acceptances: Sequence[float]) -> float:
    """Tokens of a cycle whose draft token at each depth, once reached, is accepted with its own probability."""
    return 1.0 + math.fsum(_survivals(acceptances))


def acceptance_behind(tokens_per_run: float, drafted_per_run: float) -> float:
    """The alpha with which drafts of so many tokens, on average, bring so many tokens of a cycle."""

    def brings(alpha: float) -> float:
        whole = int(drafted_per_run)
        return expected_tokens(alpha, whole) + (drafted_per_run - whole) * alpha ** (whole + 1)

    return _first_alpha(lambda alpha: brings(alpha) > tokens_per_run)[1]


def speedup(alpha: float, cost: float, k: int, verify: VerifyCost = flat) -> float:
    """The rate of cycles of k draft tokens in units of the plain rate."""
    _check_cost(cost)
    return expected_tokens(alpha, k) / (k * cost + verify(k + 1))


def lengths(acceptances: Sequence[float], cost: float, verify: VerifyCost = flat) -> list[Length]:
    """Every draft length from 0 to the number of depths, with the acceptance at each depth; for a constant α and up to
    k_max, `[alpha] * k_max`."""
    _check_cost(cost)
    tokens = accumulate(_survivals(acceptances), initial=1.0)
    return [Length(k, expected, expected / (k * cost + verify(k + 1))) for k, expected in enumerate(tokens)]


def best_length(acceptances: Sequence[float], cost: float, verify: VerifyCost = flat) -> Length:
    """The fastest of `lengths`; 0 is one of them, and of equals the shorter wins."""
    best, *longer = lengths(acceptances, cost, verify)
    for length in longer:
        if length.speedup > best.speedup * (1 + ROUNDING):
            best = length
    return best


def break_even_alpha(cost: float, k_max: int, verify: VerifyCost = flat) -> float | None:
    """The acceptance above which some draft of 1 to k_max tokens pays; None when not even certain draft tokens do."""
    _check_cost(cost)
    _check_count("k_max", k_max, least=1)
    to_earn = [k * cost + (verify(k + 1) - 1.0) for k in range(1, k_max + 1)]

    def pays(alpha: float) -> bool:
        return any(earned > needed for earned, needed in zip(_accepted(alpha, k_max), to_earn))

    return _first_alpha(pays)[0] if pays(1.0) else None


def break_even_cost(alpha: float, k_max: int, verify: VerifyCost = flat) -> float | None:
    """The cost of a draft token below which some draft of 1 to k_max tokens pays; None when not even free ones do."""
    _check_probability("alpha", alpha)
    _check_count("k_max", k_max, least=1)
    best = max((earned - (verify(k + 1) - 1.0)) / k for k, earned in enumerate(_accepted(alpha, k_max), 1))
    return best if best > 0 else None


def best_at_batch(curve: VerifyCurve, alpha: float, cost: float, k_max: int, batch: int) -> Length:
    """The best draft length when `batch` sequences share every run.

    The drafter is taken to slow down with the batch as the target does: one more token for each of the sequences costs
    `cost` of their common plain step.
    """
    return best_length([alpha] * k_max, cost, curve.at_batch(batch))


def flip_batch(curve: VerifyCurve, alpha: float, cost: float, k_max: int, batch_max: int) -> int | None:
    """The smallest batch at which no draft length beats plain decoding; None when there is none up to batch_max."""
    _check_count("batch_max", batch_max, least=1)
    batches = range(1, batch_max + 1)
    return next((batch for batch in batches if best_at_batch(curve, alpha, cost, k_max, batch).k == 0), None)


def node_gain(tokens: float, seconds: float, survival: float, extra_seconds: float) -> float:
    """Tokens per second gained by one more node, which is kept with probability `survival` and takes `extra_seconds`,
    in a cycle of so many expected tokens and seconds. The node is worth it when this is above 0."""
    _check_probability("survival", survival)
    if not (tokens >= 0 and seconds > 0 and extra_seconds >= 0 and math.isfinite(tokens + seconds + extra_seconds)):
        figures = f"tokens={tokens}, seconds={seconds}, extra_seconds={extra_seconds}"
        raise InvalidParameter(f"{figures} must be finite, not negative, and seconds above 0.")
    return (survival * seconds - tokens * extra_seconds) / (seconds * (seconds + extra_seconds))


@dataclass(frozen=True)
class BatchLength:
    """The best draft length when so many sequences share every run."""

    batch: int
    best_k: int
    speedup: float


@dataclass(frozen=True)
class Outlook:
    """Everything that follows from an acceptance, a cost and, where it was measured, the cost of verify runs."""

    alpha: float
    cost: float
    table: list[Length]
    best: Length
    break_even_alpha: float | None
    break_even_cost: float | None
    curve: VerifyCurve | None
    batches: list[BatchLength]  # 1, 2, … and batch_max; empty without a curve
    flip_batch: int | None
    longer_gain: float  # of speed-up, by one draft token more than the longest draft of the table has

    @classmethod
    def of(
        cls,
        alpha: float,
        cost: float,
        k_max: int,
        curve: VerifyCurve | None,
        batch_max: int,
        batch: int = 1,
        beside: float = 0.0,
    ) -> Outlook:
        """`batch` sequences share every run; only the flip is looked for at all sizes up to batch_max. A token takes
        `beside` plain steps beside its runs, prompts above all: no draft saves them."""
        _check_probability("alpha", alpha)
        verify = flat if curve is None else curve.at_batch(batch)
        acceptances = [alpha] * k_max
        table = lengths(acceptances, cost, verify)
        gain = _longer_gain(alpha, cost, table[-1], verify)

        def overall(length: Length) -> Length:
            return replace(length, speedup=length.speedup * (1 + beside) / (1 + beside * length.speedup))

        batches = []
        if curve is not None:
            best = [best_at_batch(curve, alpha, cost, k_max, size) for size in range(1, batch_max + 1)]
            batches = [BatchLength(size, each.k, overall(each).speedup) for size, each in enumerate(best, 1)]
        return cls(
            alpha=alpha,
            cost=cost,
            table=[overall(length) for length in table],
            best=overall(best_length(acceptances, cost, verify)),
            break_even_alpha=break_even_alpha(cost, k_max, verify),
            break_even_cost=break_even_cost(alpha, k_max, verify),
            curve=curve,
            batches=batches,
            flip_batch=None if curve is None else flip_batch(curve, alpha, cost, k_max, batch_max),
            longer_gain=gain,
        )


def _longer_gain(alpha: float, cost: float, longest: Length, verify: VerifyCost) -> float:
    """The value of one more node behind the longest draft; tokens per plain step are speed-up."""
    k, run = longest.k, verify(longest.k + 1)
    return node_gain(longest.expected_tokens, k * cost + run, alpha ** (k + 1), cost + verify(k + 2) - run)


def _first_alpha(is_enough: Callable[[float], bool]) -> tuple[float, float]:
    """The last acceptance that is not enough and the first that is, as close as floats are. Every draft earns more when
    more is accepted, so there is one such place."""
    low, high = 0.0, 1.0
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        low, high = (low, middle) if is_enough(middle) else (middle, high)
    return low, high


def _survivals(acceptances: Sequence[float]) -> list[float]:
    """How likely each depth is reached and accepted."""
    for depth, acceptance in enumerate(acceptances, 1):
        _check_probability(f"The acceptance at depth {depth}", acceptance)
    return list(accumulate(acceptances, lambda survival, acceptance: survival * acceptance))


def _accepted(alpha: float, k_max: int) -> Iterator[float]:
    """How many of 1, 2, … and k_max draft tokens are accepted: α, α + α², …"""
    return accumulate(alpha**depth for depth in range(1, k_max + 1))


def _check_probability(name: str, value: float) -> None:
    if not 0 <= value <= 1:
        raise InvalidParameter(f"{name}={value} must be a number from 0 to 1.")


def _check_cost(cost: float) -> None:
    if not (cost >= 0 and math.isfinite(cost)):
        raise InvalidParameter(f"cost={cost} must be a number of at least 0: plain steps per draft token.")


def _check_count(name: str, value: int, least: int) -> None:
    if value < least:
        raise InvalidParameter(f"{name}={value} must be at least {least}.")
