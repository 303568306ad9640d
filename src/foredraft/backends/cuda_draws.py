"""Draws for all nodes of a run: one upload of their settings, the kernels of cuda_sample, one copy of tokens back.

After a replayed run the logits lie where they lay the last time. So the draws are captured too, by the place of the
logits, for all rows of the run: those without a node are drawn from greedily, and ignored.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence as Items
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from foredraft.backends import cuda_sample
from foredraft.backends.cuda_plan import capture, wait
from foredraft.sampling.node_draws import NodeDraw
from foredraft.sampling.noise import signed

_MOST_GRAPHS = 64


@dataclass(frozen=True)
class _Captured:
    graph: torch.cuda.CUDAGraph
    host: NDArray[np.int64]  # [5, rows], pinned: key, top-k, and as bits of float64 temperature, top-p, log of min-p
    settings: Tensor  # the same, on the device
    tokens: Tensor  # on the device
    drawn: NDArray[np.int32]  # on the host, pinned
    written: list[tuple[float, ...]]  # the settings that `host` has beside keys


class Draws:
    """The draws of one backend."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._graphs: OrderedDict[tuple[int, int], _Captured] = OrderedDict()  # by place and rows

    def draw(self, logits: Tensor, nodes: Items[NodeDraw], replayed_rows: int) -> list[int]:
        """The token of every node. `replayed_rows` is the number of rows of a captured run, whose next replay leaves
        its logits in the same place; 0: there is none."""
        in_order = [node.row for node in nodes] == list(range(logits.shape[0]))
        adjusting = {sequence for sequence in {node.sequence for node in nodes} if sequence.adjusts_logits}
        adjusted = [index for index, node in enumerate(nodes) if node.sequence in adjusting] if adjusting else []
        captured = self._captured(logits, replayed_rows) if in_order and not adjusted and replayed_rows else None
        if captured is not None:
            return self._replayed(captured, nodes)
        rows = logits if in_order else logits[torch.tensor([node.row for node in nodes], device=self._device)]
        if adjusted:
            rows = rows.clone()
            for index in adjusted:
                rows[index] = nodes[index].adjusted(logits)
        host = np.empty((5, len(nodes)), np.int64)
        _fill(host, nodes, [])
        tokens: list[int] = _drawn(rows, torch.from_numpy(host).to(self._device)).tolist()
        return tokens

    def _captured(self, logits: Tensor, rows: int) -> _Captured | None:
        """The draws from the logits of a captured run of so many rows, the first of which are given; None: these are
        not among them."""
        vocab = logits.shape[1]
        if rows > logits.untyped_storage().nbytes() // (vocab * logits.element_size()):
            return None
        key = (logits.data_ptr(), rows)
        captured = self._graphs.get(key)
        if captured is None:
            captured = self._graphs[key] = self._capture(logits.as_strided((rows, vocab), logits.stride()))
            if len(self._graphs) > _MOST_GRAPHS:
                self._graphs.popitem(last=False)
        self._graphs.move_to_end(key)
        return captured

    def _replayed(self, captured: _Captured, nodes: Items[NodeDraw]) -> list[int]:
        # The last replay has ended: its tokens were waited for.
        _fill(captured.host[:, : len(nodes)], nodes, captured.written)
        captured.graph.replay()
        wait(self._device)
        tokens: list[int] = captured.drawn[: len(nodes)].tolist()
        return tokens

    def _capture(self, logits: Tensor) -> _Captured:
        count = len(logits)
        host = torch.zeros((5, count), dtype=torch.int64, pin_memory=True)
        settings = torch.zeros((5, count), dtype=torch.int64, device=self._device)
        drawn = torch.zeros(count, dtype=torch.int32, pin_memory=True)

        def run() -> Tensor:
            settings.copy_(host, non_blocking=True)
            tokens = _drawn(logits, settings)
            drawn.copy_(tokens, non_blocking=True)
            return tokens

        graph, tokens = capture(self._device, run)
        return _Captured(graph, host.numpy(), settings, tokens, drawn.numpy(), [])


def _drawn(rows: Tensor, settings: Tensor) -> Tensor:
    keys, top_ks = settings[0], settings[1]
    temperatures, top_ps, min_p_logs = settings[2:].view(torch.float64)
    floors, finite = cuda_sample.floors(rows, temperatures, top_ks, top_ps, min_p_logs)
    return cuda_sample.sample(rows, floors, finite, temperatures, keys)


def _fill(host: NDArray[np.int64], nodes: Items[NodeDraw], written: list[tuple[float, ...]]) -> None:
    """Write the settings of every node. `written` has those of the last time: where they are the same, only keys are
    new."""
    settings = [node.sequence.params.draw_settings for node in nodes]
    # Without noise there is nothing to key.
    host[0] = [signed(node.key) if of[0] else 0 for node, of in zip(nodes, settings, strict=True)]
    if settings != written:
        floats = np.array(settings, np.float64)  # temperature, top-p, log of min-p, top-k
        host[1] = floats[:, 3]
        host[2:].view(np.float64)[:] = floats[:, :3].T
        written[:] = settings
