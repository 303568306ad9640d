"""Draft trees that the kernels grow in one call."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Items
from ctypes import Structure, addressof, byref, c_double, c_int32, c_int64
from ctypes import pointer as pointer_to
from itertools import chain
from typing import Any, NamedTuple

import torch

from foredraft.backends.native.describe import describe_packed, describe_projection, pointer
from foredraft.backends.native.header import STRUCTURES
from foredraft.backends.native.sample import describe_drawings
from foredraft.backends.tree_growth import GrownTree, Growth, TapsHead
from foredraft.batch import PackedBatch
from foredraft.sampling.likely import Drawing

_Growth, _Nodes = STRUCTURES["fd_growth"], STRUCTURES["fd_nodes"]


class HeadMemory(NamedTuple):
    """Descriptions of what a head reads and writes."""

    taps: Structure
    stack: Structure
    kv: Any  # array of pointers to those of its caches
    kept: Structure  # its outputs, as runs write them
    outputs: Structure  # and as they are read


class NativeTrees:
    """See TreeGrower."""

    def __init__(self, call: Callable[..., None], head: TapsHead, memory: HeadMemory) -> None:
        parts, count = None, head.taps.shape[1]
        if head.parts is not None:
            count = len(head.parts)
            parts = pointer("parts", head.parts, torch.int64, count)
        self._call, self._described = call, head  # whose memory the kernels read
        self._head = STRUCTURES["fd_taps_head"](
            pointer_to(memory.taps),
            parts,
            pointer_to(describe_projection(head.fusion)),
            pointer_to(memory.stack),
            memory.kv,
            pointer_to(memory.kept),
            pointer_to(memory.outputs),
            pointer_to(describe_projection(head.output)),
            pointer("token_ids", head.token_ids, torch.int64, head.output.outputs),
            count,
        )

    def __call__(
        self,
        first: PackedBatch,
        lengths: Items[int],
        budgets: Items[int],
        drawings: Items[Items[Drawing]],
        growth: Growth,
    ) -> list[GrownTree]:
        size = len(lengths)
        of_sequences = c_int64 * size
        shares = None if growth.shares is None else (c_double * len(growth.shares))(*growth.shares)
        how = _Growth(growth.depth, growth.width, growth.min_score, None if shares is None else addressof(shares))
        drafts, counts = (_Nodes * size)(), (c_int32 * size)()
        given = of_sequences(*lengths), of_sequences(*budgets), describe_drawings(list(chain.from_iterable(drawings)))
        self._call("grow_trees", byref(self._head), byref(describe_packed(first)), byref(how), *given, drafts, counts)
        return [
            GrownTree(nodes.tokens[:count], nodes.parents[:count], nodes.scores[:count])
            for nodes, count in zip(drafts, counts, strict=True)
        ]
