"""Moves of tokens from slot to slot, in all caches at once: one upload and all copies, captured as one graph.

There are so few moves in a step that telling a device of them takes longer than the moves.
"""

from __future__ import annotations

from collections.abc import Sequence as Items
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from foredraft.backends.base import move
from foredraft.backends.cuda_plan import capture

_FEWEST = 4  # moves of a graph; others have twice as many as the one before


@dataclass(frozen=True)
class _Captured:
    graph: torch.cuda.CUDAGraph
    host: NDArray[np.int64]  # [2, moves], pinned: sources and targets
    slots: Tensor  # the same, on the device


class Moves:
    """The moves of one backend."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._graphs: dict[tuple[object, ...], _Captured] = {}  # by the number of moves, and where caches lie

    def move(self, caches: Items[Tensor], moves: Items[tuple[int, int]]) -> None:
        if self._device.type != "cuda":
            return move(caches, torch.tensor(moves).T)
        count = max(_FEWEST, 1 << (len(moves) - 1).bit_length())
        key = (count, *((cache.data_ptr(), cache.shape) for cache in caches))
        captured = self._graphs.get(key)
        if captured is None:
            captured = self._graphs[key] = self._capture(caches, count)
        # The last moves have been read: the device has been waited for since then. The first move fills the graph up.
        captured.host[:] = np.array([*moves, *[moves[0]] * (count - len(moves))]).T
        captured.graph.replay()

    def _capture(self, caches: Items[Tensor], count: int) -> _Captured:
        """The first runs move the first slot onto itself."""
        host = torch.zeros((2, count), dtype=torch.int64, pin_memory=True)
        slots = torch.zeros((2, count), dtype=torch.int64, device=self._device)

        def run() -> None:
            slots.copy_(host, non_blocking=True)
            move(caches, slots)

        graph, _ = capture(self._device, run)
        return _Captured(graph, host.numpy(), slots)
