"""How many rows of prompts a step may have while other sequences decode: as many as recent steps computed within the
time that a running stream should wait at most. Plain Python; its clock is what the engine tells it."""

from __future__ import annotations

from collections import deque
from math import inf

TILE = 16  # rows that kernels compute together: one row more takes about as long as TILE more
_AIM = 0.8  # of the time that a stream should wait at most: steps vary, and smaller chunks cost little
_LEAST_CHUNK = TILE // 2  # a prompt goes on in every step, whatever the others take
_MOST_ROWS = 256  # larger steps in which nobody decodes are not cut, and tell little about those that are
_RECENT = 3  # steps of which the slowest counts
_NO_LIMIT = 1 << 20  # rows: more than any step has


class ChunkLimit:
    """Learns seconds per row from steps of about the size that it allows. Before any was seen, a step has one tile. An
    infinite `max_chunk_s` sets no limit."""

    def __init__(self, max_chunk_s: float) -> None:
        self.max_chunk_s = max_chunk_s
        self._per_row: deque[float] = deque(maxlen=_RECENT)

    def observe(self, rows: int, num_decoding: int, seconds: float) -> None:
        if rows >= TILE and (num_decoding or rows <= _MOST_ROWS):
            self._per_row.append(seconds / rows)

    def rows_beside(self, num_decoding: int) -> int:
        """Rows of prompts beside one row of each decoding sequence; all of them together fill whole tiles."""
        rows = TILE
        if self.max_chunk_s == inf:
            rows = _NO_LIMIT
        elif self._per_row:
            rows = int(min(_AIM * self.max_chunk_s / max(self._per_row), _NO_LIMIT))
        rows = max(rows, num_decoding + _LEAST_CHUNK)
        chunk = rows // TILE * TILE - num_decoding
        return chunk if chunk >= _LEAST_CHUNK else chunk + TILE
