"""The cost of a step on this machine: measured once for the shapes that run, and corrected by every real step.

Estimates leave delays out: the first run after a pause is slow, and other processes steal time.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Collection, Iterable, Mapping
from collections.abc import Sequence as Items
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple

from foredraft.control.economics import VerifyCurve

_SPEED_STEPS = 16  # the machine's speed is that of so many last steps
_SHAPE_STEPS = 16  # a row count's own correction is over so many of its runs, and renewed as often
_TELLING = 8  # and begins with so many: fewer would bend the curve by their noise
_KNOWN = 4  # runs of a row count, or calls of a proposer, that make it known
_STALE = 256  # steps after which it must be seen again
_DRAFTS = 8  # what drafts take is over so many last calls
_DECISIONS = 32  # and what deciding takes
_POSSIBLE = (0.4, 3.0)  # a run outside these multiples of the expected time is no measurement


@dataclass(frozen=True)
class Calibration:
    """Measured seconds of a run of the target by its rows, each after `context` tokens, and of every further key."""

    curve: VerifyCurve
    context: int
    seconds_per_key: float


class StepTimes(NamedTuple):
    """What a step took, and for whom the controller had to decide."""

    run_s: float  # beside the queries of proposers and what deciding took
    query_s: float = 0.0
    deciding_s: float = 0.0
    queried: Mapping[str, int] = MappingProxyType({})  # by proposer: works and nodes that there were to decide about

    @property
    def all_s(self) -> float:
        return self.run_s + self.query_s + self.deciding_s


class Costs:
    """Seconds of runs and of drafts, as the machine is now."""

    def __init__(self, calibration: Calibration) -> None:
        self._measured = calibration
        self._curve = calibration.curve
        self._seconds: dict[int, float] = {}  # of rows, as the curve has them: a choice looks many up
        self._speed = 1.0
        self._recent: deque[float] = deque(maxlen=_SPEED_STEPS)
        self._by_shape: list[deque[float]] = [deque(maxlen=_SHAPE_STEPS) for _ in calibration.curve.rows]
        self._last_run = [0] * len(self._by_shape)
        self._num_runs = 0
        self._since_renewal = 0
        self._drafts: dict[str, dict[int, deque[float]]] = {}  # by proposer and nodes, for one sequence
        self._draft_s: dict[str, dict[int, float]] = {}  # their means
        self._catch_ups: dict[str, deque[float]] = {}  # by proposer, in runs of the target for as many tokens
        self._deciding: dict[str, deque[float]] = {}  # by proposer, for one sequence

    def run(self, rows: int, keys: int) -> float:
        """Seconds of a step with so many rows that read so many keys in all."""
        return self._speed * self._with_keys(self._curve_seconds(rows), rows, keys)

    def added(self, rows: int, keys: int, reaches: Iterable[int]) -> list[float]:
        """Seconds that further rows add to such a step: the first one, the first two, and so on, if each reads so many
        keys. As `run` has it, in a fraction of the time: this is asked for every draft."""
        plain, speed, known = self.run(rows, keys), self._speed, self._seconds
        context, key_s = self._measured.context, self._measured.seconds_per_key
        added: list[float] = []
        for reach in reaches:
            rows += 1
            keys += reach
            seconds = known[rows] if rows in known else self._curve_seconds(rows)
            added.append(speed * max(seconds / 2, seconds + (keys - rows * context) * key_s) - plain)
        return added

    def is_known(self, rows: int) -> bool:
        """Whether real runs of about so many rows were seen lately, so that their estimate can be relied upon."""
        place = self._nearest(rows)
        return len(self._by_shape[place]) >= _KNOWN and self._num_runs - self._last_run[place] < _STALE

    def is_timed(self, proposer: str) -> bool:
        """Whether enough calls of a proposer were timed to judge it."""
        return sum(map(len, self._drafts.get(proposer, {}).values())) >= _KNOWN

    def draft(self, proposer: str, nodes: int, sequences: int) -> float | None:
        """Seconds of a call for so many sequences with so many nodes each; None for a proposer that was never timed.

        Linear between node counts that were timed, 0 among them, and beyond. A proposer is taken to slow
        down with the number of sequences as the target does.
        """
        timed = self._draft_s.get(proposer)
        if timed is None:
            return None
        if nodes in timed:
            return timed[nodes] * self._relative(sequences)
        counts = sorted({0, *timed})
        place = min(max(1, bisect_left(counts, nodes)), len(counts) - 1)
        fewer, more = counts[place - 1 : place + 1]
        lower, upper = timed.get(fewer, 0.0), timed.get(more, 0.0)
        seconds = lower + (upper - lower) * (nodes - fewer) / (more - fewer)
        return max(seconds, lower) * self._relative(sequences)

    def level(self, proposer: str, sequences: int) -> float:
        """Seconds that one more run of a drafter takes, about: a node of the calls in which a node took least."""
        timed = self._draft_s.get(proposer, {})
        return min((seconds / nodes for nodes, seconds in timed.items()), default=0.0) * self._relative(sequences)

    def catch_up(self, proposer: str, tokens: int) -> float:
        """Seconds that a proposer needs for so many catch-up tokens, with whose number it is taken to slow down as the
        target does; 0 while that is unknown."""
        shares = self._catch_ups.get(proposer)
        return _median(shares) * self._curve_seconds(tokens) if shares and tokens else 0.0

    def deciding(self, proposer: str) -> float:
        """Seconds that a query takes for each sequence beside the draft itself: to decide on it, and to choose from
        what it brings. It takes long only where there are drafts."""
        times = self._deciding.get(proposer)
        return _mean(times) if times else 0.0

    def observe_runs(self, rows: int, keys: int, times: Items[float]) -> None:
        """Real steps with so many rows, and their seconds without those of proposers and of deciding.

        The first runs of a row count tell how it compares with others that are known by then: they do not mean that the
        machine has become slower. Otherwise plain steps would seem to take longer while there are only drafts."""
        place, records = self._nearest(rows), self._by_shape
        is_new = len(records[place]) < _TELLING
        if not is_new or not any(len(record) >= _TELLING for record in records):
            known = self._with_keys(self._curve_seconds(rows), rows, keys)
            self._recent.extend(seconds / known for seconds in times)
            self._speed = _median(self._recent)
        self._num_runs += len(times)
        expected = self._speed * self._with_keys(self._measured.curve.seconds_at(rows), rows, keys)
        possible = [seconds / expected for seconds in times if _POSSIBLE[0] < seconds / expected < _POSSIBLE[1]]
        if possible:
            records[place].extend(possible)
            self._last_run[place] = self._num_runs
            self._since_renewal += len(possible)
            if self._since_renewal >= _SHAPE_STEPS or (is_new and len(records[place]) >= _TELLING):
                self._renew()

    def observe_deciding(self, proposer: str, sequences: int, seconds: float) -> None:
        """What a query of a proposer for so many sequences took beside its draft. The first does not count: what is
        done for the first time is slow."""
        if proposer not in self._deciding:
            self._deciding[proposer] = deque(maxlen=_DECISIONS)
        else:
            self._deciding[proposer].append(seconds / max(1, sequences))

    def observe_draft(self, proposer: str, nodes: int, sequences: int, seconds: float) -> None:
        """A real call of a proposer for so many sequences with so many nodes each."""
        timed = self._drafts.setdefault(proposer, {}).setdefault(nodes, deque(maxlen=_DRAFTS))
        timed.append(seconds / self._relative(sequences))
        self._draft_s.setdefault(proposer, {})[nodes] = _mean(timed)

    def observe_catch_up(self, proposer: str, tokens: int, seconds: float) -> None:
        """A proposer has run so many catch-up tokens before it drafted."""
        shares = self._catch_ups.setdefault(proposer, deque(maxlen=_DRAFTS))
        shares.append(seconds / self._curve_seconds(tokens))

    def _relative(self, rows: int) -> float:
        return self._curve_seconds(rows) / self._curve_seconds(1)

    def _curve_seconds(self, rows: int) -> float:
        seconds = self._seconds.get(rows)
        if seconds is None:
            seconds = self._seconds[rows] = self._curve.seconds_at(rows)
        return seconds

    def _with_keys(self, seconds: float, rows: int, keys: int) -> float:
        further = keys - rows * self._measured.context
        return max(seconds / 2, seconds + further * self._measured.seconds_per_key)

    def _nearest(self, rows: int) -> int:
        knots = self._measured.curve.rows
        right = min(bisect_left(knots, rows), len(knots) - 1)
        return right if right == 0 or knots[right] - rows < rows - knots[right - 1] else right - 1

    def _renew(self) -> None:
        """Correct the curve by the real times of row counts, where there are enough runs."""
        self._since_renewal = 0
        measured = self._measured.curve
        factors = [_median(shapes) if len(shapes) >= _TELLING else 1.0 for shapes in self._by_shape]
        bent = tuple(seconds * factor for seconds, factor in zip(measured.seconds, factors, strict=True))
        self._curve = VerifyCurve(measured.rows, bent)
        self._seconds.clear()


def _median(values: Collection[float]) -> float:
    """The median, or the lower one of two: delays only make runs longer. Some are computed in every step, and
    `statistics` is slow."""
    return sorted(values)[(len(values) - 1) // 2]


def _mean(values: Collection[float]) -> float:
    """The mean, where what is done differs from time to time. Of the longest tenth, which other processes may have
    delayed, no more counts than of the others."""
    most = sorted(values)[(len(values) - 1) * 9 // 10]
    return sum(min(value, most) for value in values) / len(values)
