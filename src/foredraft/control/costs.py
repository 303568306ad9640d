"""What runs of the target cost on this machine: measured once for the shapes that run, corrected by every real step.

Estimates leave delays out: the first run after a pause is slow, and other processes steal time.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Collection
from collections.abc import Sequence as Items
from dataclasses import dataclass
from typing import NamedTuple

from foredraft.control.economics import VerifyCurve
from foredraft.types import Work

# A machine's speed, and the cost of a row count beside others, are medians over so many runs. Fewer follow a change
# sooner and take noise for one; at worst a wrong calibration lasts as many steps.
_RUNS = 16
# What was measured so often is relied upon: the cost of a row count, the time of a proposer. Fewer would take noise, or
# the slow first times, for the rule; at worst so many runs go without drafts when a row count is new.
ENOUGH = 4
# Times whose median, or mean, is what something takes now: calls of a proposer, late runs, looks at a batch. One late
# time may have another cause; more follow a change later.
RECENT = 8
# A run outside these multiples of what is expected is a delay, and no measurement. At worst a calibration that is wrong
# by more is corrected by the common speed alone.
_POSSIBLE = (0.4, 3.0)

_MOST_ROWS = 4096  # that a run may have, about
_REACH_STEP = 256  # contexts are told apart by so many tokens, where the cost of rows is looked up


@dataclass(frozen=True)
class Calibration:
    """Measured seconds of a run of the target by its rows, each after `context` tokens, and of every further key."""

    curve: VerifyCurve
    context: int
    seconds_per_key: float


class Load(NamedTuple):
    """What a step runs in any case, with or without drafts."""

    rows: int
    keys: int  # that those rows read
    sequences: int  # that get a token

    @classmethod
    def of(cls, works: Items[Work]) -> Load:
        rows = keys = sequences = 0
        # As the properties of `Work` compute it, in half the time: this runs in every step.
        for sequence, num_new_tokens, _, draft, num_computed_nodes in works:
            own = num_new_tokens + len(draft.tokens) - num_computed_nodes
            reach = sequence.num_computed_tokens + num_new_tokens
            rows += own
            keys += own * reach
            sequences += reach == len(sequence.token_ids)
        return cls(rows, keys, sequences)


class Costs:
    """Seconds of runs, as the machine is now."""

    def __init__(self, calibration: Calibration) -> None:
        # Beyond the largest row count that was calibrated, twice as many rows and so on have corrections of their own.
        rows = calibration.curve.rows
        while rows[-1] < _MOST_ROWS:
            rows = (*rows, 2 * rows[-1])
        self._measured = calibration
        self._calibrated = self._curve = VerifyCurve(rows, tuple(map(calibration.curve.seconds_at, rows)))
        self._speed = 1.0
        self._recent: deque[float] = deque(maxlen=_RUNS)
        self._by_shape: list[deque[float]] = [deque(maxlen=_RUNS) for _ in rows]
        self._any_known = False  # whether any row count that was calibrated has enough runs
        self._known: set[int] = set()  # row counts that have, or have others near them
        self._since_renewal = 0
        # What curves say, looked up in every step: seconds by rows, and what more rows cost, by load.
        self._at_first: dict[int, float] = {}
        self._seconds: dict[int, float] = {}
        self._extra: dict[tuple[int, int, int, int], list[float]] = {}

    def run(self, rows: int, keys: int) -> float:
        """Seconds of a step with so many rows that read so many keys in all."""
        return self._speed * self._with_keys(self.at_rest(rows), rows, keys)

    def token(self, load: Load) -> float:
        """Seconds that a token takes in plain steps. Rows of prompts beside it are run in any case: a token saves
        none."""
        sequences = load.sequences or 1
        return self.run(sequences, load.keys * sequences // (load.rows or 1)) / sequences

    def extra(self, load: Load, count: int, sequences: int = 1) -> list[float]:
        """What rows more for so many sequences cost each of them, in tokens of plain decoding: no row, one, two, and so
        on; `count` of them and perhaps more. Not to be changed."""
        rows, keys, _ = load
        reach = keys // (rows or 1)
        key = rows, load.sequences, reach // _REACH_STEP, sequences
        known = self._extra.get(key)
        if known is None:
            known = self._extra[key] = [0.0]
        if len(known) <= count:
            plain, token_s = self.run(rows, keys), self.token(load) * sequences
            for more in range(len(known) * sequences, (count + 1) * sequences, sequences):
                known.append((self.run(rows + more, keys + more * reach) - plain) / token_s)
        return known

    def at_rest(self, rows: int) -> float:
        """Seconds of a run of so many rows by the curve, whatever the machine's speed is now."""
        seconds = self._seconds.get(rows)
        if seconds is None:
            seconds = self._seconds[rows] = self._curve.seconds_at(rows)
        return seconds

    def is_known(self, rows: int) -> bool:
        """Whether enough real runs of about so many rows were seen, or of up to twice as many, to rely upon estimates:
        the gain of drafts is unknown until it is known what plain steps take."""
        if rows not in self._known:
            near = range(self._nearest(rows), self._nearest(2 * rows) + 1)
            if any(len(self._by_shape[place]) >= ENOUGH for place in near):
                self._known.add(rows)
        return rows in self._known

    def observe(self, rows: int, keys: int, seconds: float, is_plain: bool) -> None:
        """A real step with so many rows took so long, without the queries of proposers.

        Plain steps of known row counts tell how fast the machine is, and the very first steps do. The others only tell
        how row counts compare: otherwise plain steps would seem to take longer while there are only drafts. If plain
        steps take what cannot be, the speed is wrong. Prompts have more rows than were calibrated: they may take any
        time, and tell nothing of others."""
        record = self._by_shape[self._nearest(rows)]
        is_new, is_calibrated = len(record) < ENOUGH, rows <= self._measured.curve.rows[-1]
        measured = self._at_first.get(rows)
        if measured is None:
            measured = self._at_first[rows] = self._calibrated.seconds_at(rows)
        expected = self._with_keys(measured, rows, keys)
        is_possible = not is_calibrated or _POSSIBLE[0] < seconds / (self._speed * expected) < _POSSIBLE[1]
        is_telling = is_plain and (not is_new or not is_possible)
        if is_calibrated and (is_telling or not self._any_known):
            self._recent.append(seconds / self._with_keys(self.at_rest(rows), rows, keys))
            self._speed = median(self._recent)
        if is_possible:
            record.append(seconds / (self._speed * expected))
            self._since_renewal += 1
            is_known = len(record) >= ENOUGH
            self._any_known |= is_calibrated and is_known
            if self._since_renewal >= _RUNS or (is_new and is_known):
                self._renew()

    def _with_keys(self, seconds: float, rows: int, keys: int) -> float:
        further = keys - rows * self._measured.context
        return max(seconds / 2, seconds + further * self._measured.seconds_per_key)

    def _nearest(self, rows: int) -> int:
        knots = self._calibrated.rows
        right = min(bisect_left(knots, rows), len(knots) - 1)
        return right if right == 0 or knots[right] - rows < rows - knots[right - 1] else right - 1

    def _renew(self) -> None:
        """Correct the curve by the real times of row counts, where there are enough runs."""
        self._since_renewal = 0
        measured = self._calibrated
        factors = [median(shapes) if len(shapes) >= ENOUGH else 1.0 for shapes in self._by_shape]
        bent = tuple(seconds * factor for seconds, factor in zip(measured.seconds, factors, strict=True))
        self._curve = VerifyCurve(measured.rows, bent)
        self._seconds.clear()
        self._extra.clear()


def median(values: Collection[float]) -> float:
    """The median, or the lower one of two: delays only make runs longer. `statistics` is slow."""
    return sorted(values)[(len(values) - 1) // 2]
