"""What the kernels are told of a weight that they pack: its kind, and pointers to its values, scales and minimums."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from foredraft.backends.base import Weight
from foredraft.backends.native_layers import Pointer
from foredraft.backends.native_library import PlainDescription
from foredraft.config import QUANT_GROUP


@dataclass(frozen=True)
class Kind:
    """How the kernels know a kind of weight, and what its tensors are (see Weight)."""

    number: int
    dtype: torch.dtype
    groups: int = 0  # inputs that share a scale; 0: there are no scales
    minimums: bool = False
    blocks: bool = False  # blocks of inputs have factors too


KINDS = {
    "f32": Kind(0, torch.float32),
    "bf16": Kind(1, torch.bfloat16),
    "q8": Kind(2, torch.int8, QUANT_GROUP),
    "q4": Kind(3, torch.uint8, QUANT_GROUP, minimums=True),
    "q6": Kind(4, torch.int8, QUANT_GROUP // 2, blocks=True),
    "q5": Kind(5, torch.uint8, QUANT_GROUP, minimums=True),
    "q5k": Kind(6, torch.uint8, QUANT_GROUP, minimums=True, blocks=True),
    "q4k": Kind(7, torch.uint8, QUANT_GROUP, minimums=True, blocks=True),
}
BLOCK = 256  # inputs


def describe_plain(weight: Weight, pointer: Pointer) -> PlainDescription:
    """`pointer` checks a tensor and gives its address. Raises ValueError for what no kernel should see."""
    kind = KINDS[weight.kind]

    def factors(name: str, values: Tensor | None, dtype: torch.dtype, inputs: int) -> int:
        if values is None:
            raise ValueError(f"The weight has no {name}.")
        return pointer(name, values, dtype, weight.outputs, weight.inputs // inputs)

    plain = PlainDescription(values=pointer("values", weight.values, kind.dtype, weight.outputs, weight.inputs))
    dtype = torch.int8 if kind.blocks else torch.float16
    if kind.groups:
        plain.scales = factors("scales", weight.scales, dtype, kind.groups)
    if kind.groups and kind.blocks:
        plain.block_scales = factors("block_scales", weight.block_scales, torch.float16, BLOCK)
    if kind.minimums:
        plain.minimums = factors("minimums", weight.minimums, dtype, kind.groups)
    if kind.minimums and kind.blocks:
        plain.block_minimums = factors("block_minimums", weight.block_minimums, torch.float16, BLOCK)
    return plain
