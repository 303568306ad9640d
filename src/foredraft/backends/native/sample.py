"""Tokens drawn by the kernels, when they are read."""

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

_Drawing = STRUCTURES["fd_drawing"]


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
