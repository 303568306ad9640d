"""What is captured on a GPU and replayed: whole runs of a model, and moves of tokens from slot to slot."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Items
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from foredraft.backends.base import T, move
from foredraft.backends.cuda.plan import Bucket, Plan
from foredraft.batch import ForwardBatch

_MOST_GRAPHS = 48  # that are kept for one model
_FEWEST_MOVES = 4  # of a graph; others have twice as many as the one before


class Graphs:
    """Captured runs by their owner and bucket, the least recently used forgotten first."""

    def __init__(self) -> None:
        self._of: WeakKeyDictionary[object, dict[Bucket, tuple[torch.cuda.CUDAGraph, Any]]] = WeakKeyDictionary()
        self._pool: Any = None

    def run(self, owner: object, plan: Plan, compute: Callable[[ForwardBatch], T]) -> T:
        def run() -> T:
            plan.upload()
            return compute(plan)

        if plan.bucket is None or not plan.positions.is_cuda:
            return run()
        self._pool = self._pool or torch.cuda.graph_pool_handle()
        graphs = self._of.setdefault(owner, {})
        captured = graphs.pop(plan.bucket, None) or capture(plan.positions.device, run, self._pool)
        graphs[plan.bucket] = captured  # the one used last comes last
        if len(graphs) > _MOST_GRAPHS:
            del graphs[next(iter(graphs))]
        graph, result = captured
        graph.replay()
        found: T = result
        return found


def capture(device: torch.device, run: Callable[[], T], pool: Any = None) -> tuple[torch.cuda.CUDAGraph, T]:
    """A graph of the run, and what its replays give. Graphs of one pool share the memory of what they do not give.

    The first run compiles what is missing; it has a stream of its own, as capture demands.
    """
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        run()
    torch.cuda.current_stream(device).wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    # Other threads may allocate and copy meanwhile: a draft model is loaded off the engine's thread.
    with _no_collection(), torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
        result = run()
    return graph, result


@contextmanager
def _no_collection() -> Iterator[None]:
    """Keep the garbage collector from running: a graph that it destroys while another is captured ends the process."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


class Moves:
    """The moves of tokens from slot to slot, in all caches at once: one upload and all copies, captured as one graph.

    There are so few moves in a step that telling a device of them takes longer than the moves.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        # By the number of moves, and where caches lie. Sources and targets [2, moves] are on the host, pinned, and on
        # the device.
        self._graphs: dict[tuple[object, ...], tuple[torch.cuda.CUDAGraph, NDArray[np.int64], Tensor]] = {}

    def move(self, caches: Items[Tensor], moves: Items[tuple[int, int]]) -> None:
        if self._device.type != "cuda":
            return move(caches, torch.tensor(moves).T)
        count = max(_FEWEST_MOVES, 1 << (len(moves) - 1).bit_length())
        key = (count, *((cache.data_ptr(), cache.shape) for cache in caches))
        if key not in self._graphs:
            self._graphs[key] = self._capture(caches, count)
        graph, host, _ = self._graphs[key]
        # The last moves have been read: the device has been waited for since then. The first move fills the graph up.
        host[:] = np.array([*moves, *[moves[0]] * (count - len(moves))]).T
        graph.replay()

    def _capture(self, caches: Items[Tensor], count: int) -> tuple[torch.cuda.CUDAGraph, NDArray[np.int64], Tensor]:
        """The first runs move the first slot onto itself."""
        host = torch.zeros((2, count), dtype=torch.int64, pin_memory=True)
        slots = torch.zeros((2, count), dtype=torch.int64, device=self._device)

        def run() -> None:
            slots.copy_(host, non_blocking=True)
            move(caches, slots)

        graph, _ = capture(self._device, run)
        return graph, host.numpy(), slots
