"""The matrices of a head in 8 or 4 bits on disk.

Codes have the tensor's own name, and are two to a byte where they have 4 bits. Beside them are the scales of their
groups, and with 4 bits also the minimums."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from foredraft.backends.weight import Weight
from foredraft.config import QUANT_GROUP
from foredraft.models.quantise import convert

SCALES, MINIMUMS = ".scales", ".minimums"
BITS = (16, 8, 4)


def encoded(tensors: Mapping[str, Tensor | Weight], bits: Mapping[str, int]) -> dict[str, Tensor]:
    """The tensors as they are written. `bits` names those that have fewer than 16; what has no groups stays, and so do
    codes that are there already."""
    written: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        weight = tensor if isinstance(tensor, Weight) else _in_bits(tensor, bits.get(name, 16))
        if isinstance(weight, Tensor):
            written[name] = weight
            continue
        assert weight.scales is not None
        written[name + SCALES] = weight.scales
        if weight.minimums is None:
            written[name] = weight.values
        else:
            written[name] = weight.values[:, ::2] | weight.values[:, 1::2] << 4
            written[name + MINIMUMS] = weight.minimums
    return written


def _in_bits(tensor: Tensor, bits: int) -> Tensor | Weight:
    if bits == 16 or tensor.dim() != 2 or not tensor.is_floating_point() or tensor.shape[1] % QUANT_GROUP:
        return tensor
    return convert(Weight("bf16", tensor.bfloat16()), f"int{bits}")


def coded(tensors: Mapping[str, Tensor]) -> dict[str, Tensor | Weight]:
    """What is written, with codes and their scales as one weight. Codes whose scales do not fit are left as they are,
    beside these."""
    read: dict[str, Tensor | Weight] = dict(tensors)
    for name in tensors:
        weight = _weight(name, tensors)
        if weight is not None:
            read[name] = weight
            read.pop(name + SCALES)
            read.pop(name + MINIMUMS, None)
    return read


def decoded(tensor: Tensor | Weight) -> Tensor:
    """What `encoded` was given, as far as its bits say it."""
    if isinstance(tensor, Tensor):
        return tensor
    return convert(tensor, "bfloat16").values


def _weight(name: str, tensors: Mapping[str, Tensor]) -> Weight | None:
    codes, scales, minimums = tensors[name], tensors.get(name + SCALES), tensors.get(name + MINIMUMS)
    if scales is None or codes.dim() != 2 or codes.dtype != (torch.int8 if minimums is None else torch.uint8):
        return None
    if minimums is not None:
        codes = torch.stack([codes & 15, codes >> 4], dim=2).flatten(1)
    groups = (len(codes), codes.shape[1] // QUANT_GROUP)
    for factors in (scales, minimums):
        if factors is not None and (tuple(factors.shape) != groups or factors.dtype != torch.float16):
            return None
    return Weight("q8" if minimums is None else "q4", codes, scales, minimums)
