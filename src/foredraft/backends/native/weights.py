"""Weights of the native kernels: what each kind is made of, what the kernels are told of one that they pack, and where
packed ones lie."""

from __future__ import annotations

import mmap
from contextlib import suppress
from ctypes import Structure
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from foredraft.backends.native.describe import pointer
from foredraft.backends.native.header import STRUCTURES
from foredraft.backends.weight import Weight
from foredraft.config import QUANT_GROUP

PIECE = 32 * 2**20  # bytes; what is not used of a piece costs nothing
LINE = 64  # bytes; where weights start


@dataclass(frozen=True)
class Kind:
    """How the kernels know a kind of weight, and what its tensors are (see Weight)."""

    number: int
    dtype: torch.dtype
    groups: int = 0  # inputs that share a scale; 0: there are no scales
    minimums: bool = False
    blocks: bool = False  # blocks of inputs have factors too
    factors: torch.dtype = torch.float16  # of scales and minimums


KINDS = {
    "f32": Kind(0, torch.float32),
    "bf16": Kind(1, torch.bfloat16),
    "q8": Kind(2, torch.int8, QUANT_GROUP),
    "q4": Kind(3, torch.uint8, QUANT_GROUP, minimums=True),
    "q6": Kind(4, torch.int8, QUANT_GROUP // 2, blocks=True, factors=torch.int8),
    "q5": Kind(5, torch.uint8, QUANT_GROUP, minimums=True),
    "q5k": Kind(6, torch.uint8, QUANT_GROUP, minimums=True, blocks=True, factors=torch.int8),
    "q4k": Kind(7, torch.uint8, QUANT_GROUP, minimums=True, blocks=True, factors=torch.int8),
    "mx4": Kind(8, torch.uint8, QUANT_GROUP, factors=torch.uint8),
}
BLOCK = 256  # inputs


@dataclass(frozen=True, eq=False)
class Packed:
    """A weight laid out by the kernels: its panels, and what the kernels need to know of them."""

    memory: Tensor
    outputs: int
    inputs: int
    reference: Any  # a ctypes pointer to the weight's description


def describe_plain(weight: Weight) -> Structure:
    """Raises ValueError for what no kernel should see."""
    kind = KINDS[weight.kind]
    plain = STRUCTURES["fd_plain"](values=pointer("values", weight.values, kind.dtype, weight.outputs, weight.inputs))
    names = [name for name, is_there in (("scales", kind.groups), ("minimums", kind.minimums)) if is_there]
    factors = [(name, kind.factors, kind.groups) for name in names]
    if kind.blocks:
        factors += [(f"block_{name}", torch.float16, BLOCK) for name in names]
    for name, dtype, inputs in factors:
        values = getattr(weight, name)
        if values is None:
            raise ValueError(f"The weight has no {name}.")
        setattr(plain, name, pointer(name, values, dtype, weight.outputs, weight.inputs // inputs))
    return plain


class WeightMemory:
    """Memory for packed weights, in large pieces that the system is asked to back with pages of 2 MiB.

    A run of the model reads every weight once. With pages of 4 KiB the processor spends half of that time on finding
    them: a Xeon core reads 13 to 20 GB/s from small pages, and 25 to 30 GB/s from large ones.
    """

    def __init__(self) -> None:
        self._piece = torch.empty(0, dtype=torch.uint8)  # what is left of the last piece

    def take(self, size: int) -> Tensor:
        """`size` bytes that nobody else has; they go back to the system with the last tensor of their piece."""
        rounded = -(-size // LINE) * LINE
        if rounded > len(self._piece):
            private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS  # shared memory has pages of its own kind
            memory = mmap.mmap(-1, max(PIECE, rounded), flags=private)
            if hasattr(mmap, "MADV_HUGEPAGE"):
                with suppress(OSError):  # a system without large pages
                    memory.madvise(mmap.MADV_HUGEPAGE)
            self._piece = torch.frombuffer(memory, dtype=torch.uint8)
        taken, self._piece = self._piece[:size], self._piece[rounded:]
        return taken
