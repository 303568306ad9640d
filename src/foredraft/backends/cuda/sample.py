# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, import-not-found, import-untyped"
"""Draws on a GPU, for all rows at once: the tokens of sampling/draw.py.

A draw uses the exactly rounded operations of sampling/noise.py in the same order and is compiled without fusing them,
so its noise has the same bits as on a CPU and it draws the same token from the same logits and floor.
"""

from __future__ import annotations

import math
from collections.abc import Sequence as Items
from dataclasses import dataclass

import numpy as np
import torch
import triton
import triton.language as tl
from numpy.typing import NDArray
from torch import Tensor

from foredraft.backends.cuda.floors import floors
from foredraft.backends.cuda.graphs import capture
from foredraft.backends.cuda.plan import wait
from foredraft.sampling.draw import NodeDraw
from foredraft.sampling.noise import signed

_MOST_GRAPHS = 64  # of draws
_CHUNK = 2048  # logits that one program draws from
_GOLDEN = tl.constexpr(0x9E3779B97F4A7C15 - (1 << 64))  # the constants of sampling/noise.py, signed
_MIX_1 = tl.constexpr(0xBF58476D1CE4E5B9 - (1 << 64))
_MIX_2 = tl.constexpr(0x94D049BB133111EB - (1 << 64))
_LOG_TERMS = tl.constexpr(12)
_ROOT_HALF = tl.constexpr(math.sqrt(0.5))
_LOG_2 = tl.constexpr(math.log(2))
_LOWEST = tl.constexpr(float("-inf"))


@triton.jit
def _shift_right(z, bits: tl.constexpr):
    return (z >> bits) & ((1 << (64 - bits)) - 1)


@triton.jit
def _uniform(key, token_ids):
    z = token_ids * _GOLDEN + key
    z = (z ^ _shift_right(z, 30)) * _MIX_1
    z = (z ^ _shift_right(z, 27)) * _MIX_2
    z = z ^ _shift_right(z, 31)
    return (_shift_right(z, 12).to(tl.float64) + 0.5) * 2.220446049250313e-16


@triton.jit
def _log(x):
    """Of normal positive numbers."""
    bits = x.to(tl.int64, bitcast=True)
    exponent = (bits >> 52) - 1022
    mantissa = ((bits & 0x000FFFFFFFFFFFFF) | 0x3FE0000000000000).to(tl.float64, bitcast=True)  # in [0.5, 1)
    low = mantissa < _ROOT_HALF
    mantissa = tl.where(low, mantissa * 2, mantissa)
    exponent = tl.where(low, exponent - 1, exponent)
    s = (mantissa - 1) / (mantissa + 1)
    square = s * s
    series = tl.full(s.shape, 1 / (2 * _LOG_TERMS + 1), tl.float64)
    for step in tl.static_range(_LOG_TERMS):
        series = series * square + 1 / (2 * (_LOG_TERMS - 1 - step) + 1)
    return exponent.to(tl.float64) * _LOG_2 + series * (s * 2)


@triton.jit
def gumbel(key, token_ids):
    """The noise of sampling.noise.gumbel for a key and tokens, in the same bits: float64."""
    return -_log(-_log(_uniform(key, token_ids)))


@triton.jit
def _draw_kernel(logits, floors, temperatures, keys, scores, tokens, vocab, chunks, CHUNK: tl.constexpr):
    """The best score of a chunk of a row's logits, and the lowest token that has it."""
    row, chunk = tl.program_id(0), tl.program_id(1)
    token = chunk * CHUNK + tl.arange(0, CHUNK)
    values = tl.load(logits + row.to(tl.int64) * vocab + token, mask=token < vocab, other=_LOWEST)
    candidate = (values >= tl.load(floors + row)) & (token < vocab)
    place = row * chunks + chunk
    if tl.max(candidate.to(tl.int32), 0) == 0:
        tl.store(scores + place, _LOWEST)
        tl.store(tokens + place, vocab)
    else:
        noise = gumbel(tl.load(keys + row), token.to(tl.int64))
        score = values.to(tl.float64) + tl.load(temperatures + row) * noise
        score = tl.where(candidate, score, _LOWEST)
        best = tl.max(score, 0)
        tl.store(scores + place, best)
        tl.store(tokens + place, tl.min(tl.where(candidate & (score == best), token, vocab), 0))


@triton.jit
def _best_kernel(scores, tokens, finite, drawn, chunks, BLOCK: tl.constexpr):
    """The best of a row's chunks; of equal scores, the lowest token. -1 for a row that is not finite."""
    row = tl.program_id(0)
    chunk = tl.arange(0, BLOCK)
    score = tl.load(scores + row * chunks + chunk, mask=chunk < chunks, other=_LOWEST)
    token = tl.load(tokens + row * chunks + chunk, mask=chunk < chunks, other=2147483647)
    best = tl.min(tl.where(score == tl.max(score, 0), token, 2147483647), 0)
    tl.store(drawn + row, tl.where(tl.load(finite + row), best, -1))


def sample(logits: Tensor, floors: Tensor, finite: Tensor, temperatures: Tensor, keys: Tensor) -> Tensor:
    """The token that the noise of keys[i] draws from logits[i], as sampling.draw: int32 [rows]. Logits are float32
    [rows, vocab], floors float32, temperatures float64, keys int64. A row that is not finite gives NOT_FINITE (-1)."""
    rows, vocab = logits.shape
    chunks = triton.cdiv(vocab, _CHUNK)
    scores = torch.empty((rows, chunks), dtype=torch.float64, device=logits.device)
    tokens = torch.empty((rows, chunks), dtype=torch.int32, device=logits.device)
    drawn = torch.empty(rows, dtype=torch.int32, device=logits.device)
    _draw_kernel[(rows, chunks)](
        *(logits, floors, temperatures, keys, scores, tokens, vocab, chunks),
        CHUNK=_CHUNK,
        num_warps=8,
        enable_fp_fusion=False,
    )
    _best_kernel[(rows,)](
        scores, tokens, finite, drawn, chunks, BLOCK=triton.next_power_of_2(chunks), num_warps=1, enable_fp_fusion=False
    )
    return drawn


@dataclass(frozen=True)
class _Captured:
    graph: torch.cuda.CUDAGraph
    host: NDArray[np.int64]  # [5, rows], pinned: key, top-k, and as bits of float64 temperature, top-p, log of min-p
    settings: Tensor  # the same, on the device
    tokens: Tensor  # on the device
    drawn: NDArray[np.int32]  # on the host, pinned
    written: list[tuple[float, ...]]  # the settings that `host` has beside keys


class Draws:
    """The draws of one backend: one upload of the nodes' settings, the kernels above, one copy of tokens back.

    After a replayed run the logits lie where they lay the last time. So the draws are captured too, by the place of the
    logits, for all rows of the run: those without a node are drawn from greedily, and ignored.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._graphs: dict[tuple[int, int], _Captured] = {}  # by place and rows

    def draw(self, logits: Tensor, nodes: Items[NodeDraw], replayed_rows: int) -> list[int]:
        """The token of every node. `replayed_rows` is the number of rows of a captured run, whose next replay leaves
        its logits in the same place; 0: there is none."""
        in_order = [node.row for node in nodes] == list(range(logits.shape[0]))
        adjusting = {sequence for sequence in {node.sequence for node in nodes} if sequence.adjusts_logits}
        adjusted = [index for index, node in enumerate(nodes) if node.sequence in adjusting] if adjusting else []
        captured = self._captured(logits, replayed_rows) if in_order and not adjusted and replayed_rows else None
        if captured is not None:
            # The last replay has ended: its tokens were waited for.
            _fill(captured.host[:, : len(nodes)], nodes, captured.written)
            captured.graph.replay()
            wait(self._device)
            drawn: list[int] = captured.drawn[: len(nodes)].tolist()
            return drawn
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
        captured = self._graphs.pop(key, None) or self._capture(logits.as_strided((rows, vocab), logits.stride()))
        self._graphs[key] = captured  # the one used last comes last
        if len(self._graphs) > _MOST_GRAPHS:
            del self._graphs[next(iter(self._graphs))]
        return captured

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
    lowest, finite = floors(rows, temperatures, top_ks, top_ps, min_p_logs)
    return sample(rows, lowest, finite, temperatures, keys)


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
