"""How many rows of prompts a step may have while other sequences decode: as many as recent steps computed within the
time that a running stream should wait at most. Plain Python; its clock is what the engine tells it."""

from __future__ import annotations

from collections import deque

LEAST_ROWS = 16  # kernels take about as long for fewer; also where nothing was measured yet
_MOST_ROWS = 256  # steps with more rows take less time per row than the chunks that are cut here
_RECENT = 3  # steps whose median counts: one may have been held up by something else


class ChunkLimit:
    """Learns seconds per row from steps of about the size that it allows."""

    def __init__(self, max_chunk_s: float) -> None:
        self._max_chunk_s = max_chunk_s
        self._per_row: deque[float] = deque(maxlen=_RECENT)

    def observe(self, rows: int, seconds: float) -> None:
        if LEAST_ROWS <= rows <= _MOST_ROWS:
            self._per_row.append(seconds / rows)

    def rows_beside(self, num_running: int) -> int:
        """Rows of prompts beside so many running sequences, in whole multiples of LEAST_ROWS."""
        if not self._per_row:
            return LEAST_ROWS
        per_row = sorted(self._per_row)[len(self._per_row) // 2]
        rows = int(self._max_chunk_s / per_row) - num_running
        return max(LEAST_ROWS, rows // LEAST_ROWS * LEAST_ROWS)
