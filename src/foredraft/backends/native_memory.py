"""Memory for packed weights, in large pieces that the system is asked to back with pages of 2 MiB.

A run of the model reads every weight once. With pages of 4 KiB the processor spends half of that time on finding them:
a Xeon core reads 13 to 20 GB/s from small pages, and 25 to 30 GB/s from large ones.
"""

from __future__ import annotations

import mmap
from contextlib import suppress

import torch
from torch import Tensor

PIECE = 32 * 2**20  # bytes; what is not used of a piece costs nothing
LINE = 64  # bytes; where weights start


class WeightMemory:
    def __init__(self) -> None:
        self._piece = torch.empty(0, dtype=torch.uint8)  # what is left of the last piece

    def take(self, size: int) -> Tensor:
        """`size` bytes that nobody else has; they go back to the system with the last tensor of their piece."""
        rounded = -(-size // LINE) * LINE
        if rounded > len(self._piece):
            self._piece = _large_pages(max(PIECE, rounded))
        taken, self._piece = self._piece[:size], self._piece[rounded:]
        return taken


def _large_pages(size: int) -> Tensor:
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)  # shared memory has pages of its own kind
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a system without large pages
            memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8)
