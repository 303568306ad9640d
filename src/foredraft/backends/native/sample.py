"""Tokens drawn by the kernels, when they are read, and tokens that will probably be drawn."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Items
from ctypes import c_int64
from typing import Any

import torch
from torch import Tensor

from foredraft.backends.native.describe import matrix, pointer
from foredraft.backends.native.header import STRUCTURES
from foredraft.sampling.draw import NodeDraw
from foredraft.sampling.likely import Drawing

_Drawing = STRUCTURES["fd_drawing"]


def describe_drawings(drawings: Items[Drawing], first: int = 0, stride: int = 0) -> Any:
    """An array of descriptions; `first` is the address of the first row of logits, and `stride` their distance."""
    described: list[Any] = [
        (first + stride * row, *params.draw_settings, key) for row, (params, key) in enumerate(drawings)
    ]
    return (_Drawing * len(drawings))(*described)


def logit_rows(logits: Tensor) -> tuple[int, int, int]:
    """The number of rows, of columns, and from row to row: they may be part of wider ones."""
    rows, columns = matrix("logits", logits)
    if logits.dtype is not torch.float32 or not logits.is_cpu or logits.stride(1) != 1:
        raise ValueError(f"logits must be float32 rows in CPU memory, not {logits.dtype} on {logits.device}.")
    return rows, columns, logits.stride(0) if rows > 1 else columns


def likely(
    call: Callable[..., None], logits: Tensor, drawings: Items[Drawing], count: int, token_ids: Tensor | None
) -> tuple[Tensor, Tensor]:
    """See Backend.likely."""
    rows, columns, stride = logit_rows(logits)
    count = min(count, columns)
    shares, places = torch.empty(rows, count), torch.empty(rows, count, dtype=torch.int64)
    if len(drawings) != rows:
        raise ValueError(f"{rows} rows of logits need as many drawings, not {len(drawings)}.")
    names, of_rows = None, token_ids is not None and token_ids.dim() == 2
    if token_ids is not None:
        names = pointer("token_ids", token_ids, torch.int64, *((rows, columns) if of_rows else (columns,)))
    if rows:
        described = describe_drawings(drawings, logits.data_ptr(), 4 * stride)
        found = shares.data_ptr(), places.data_ptr()
        call("likely", described, names, columns if of_rows else 0, rows, columns, count, *found)
    return shares, places


class Draws:
    """The token of every node, drawn from its row of logits [rows, vocab]: that of `sampling.draw`. The rules read all
    tokens that follow a last known token, so these are drawn at once, by all threads; and of those behind draft tokens
    only the ones on the accepted path, so these are drawn one by one."""

    def __init__(self, call: Callable[..., None], logits: Tensor, nodes: Items[NodeDraw]) -> None:
        self._call, self._logits, self._nodes = call, logits, nodes
        self._tokens: dict[int, int] = {}

    def __getitem__(self, index: int) -> int:
        if index not in self._tokens:
            is_first = self._nodes[index].node < 0
            self._draw([i for i, each in enumerate(self._nodes) if each.node < 0] if is_first else [index])
        return self._tokens[index]

    def _draw(self, indices: list[int]) -> None:
        rows, vocab = matrix("logits", self._logits)
        first = pointer("logits", self._logits, torch.float32, rows, vocab)
        adjusted: list[Tensor] = []  # whose memory is read
        drawings: list[Any] = []
        for index in indices:
            node = self._nodes[index]
            address = first + 4 * vocab * node.row
            if node.sequence.adjusts_logits:
                adjusted.append(node.adjusted(self._logits))
                address = pointer("adjusted logits", adjusted[-1], torch.float32, vocab)
            drawings.append((address, *node.sequence.params.draw_settings, node.key))
        tokens = (c_int64 * len(indices))()
        self._call("draw", (_Drawing * len(indices))(*drawings), len(indices), vocab, tokens)
        self._tokens.update(zip(indices, tokens, strict=True))
