"""Random weights of every kind that the kernels know, layers of them, and how far a result is from the right one."""

from __future__ import annotations

import torch
from torch import Tensor

from foredraft.backends.layers import Linear
from foredraft.backends.native.backend import NativeBackend
from foredraft.backends.weight import Weight

KINDS = ("f32", "bf16", "q8", "q6", "q5", "q4", "q5k", "q4k", "mx4")
BLOCKS = ("q6", "q5k", "q4k")  # kinds whose inputs come in blocks of 256
FLOATS = ("f32", "bf16")
CASES = [(kind, bits) for kind in KINDS for bits in ("int8", "int16") if bits == "int8" or kind not in FLOATS]


def fitting(kind: str, inputs: int) -> int:
    """As many inputs, or the next number that a weight of this kind can have."""
    return -(-inputs // 256) * 256 if kind in BLOCKS else inputs


def random_weight(kind: str, outputs: int, inputs: int) -> Weight:
    """Without minimums the codes lie around 0, with them the weights do."""
    if kind == "f32":
        return Weight(kind, torch.randn(outputs, inputs))
    if kind == "bf16":
        return Weight(kind, torch.randn(outputs, inputs).bfloat16())
    if kind == "q8":
        codes = torch.randint(-128, 128, (outputs, inputs), dtype=torch.int8)
        return Weight(kind, codes, torch.rand(outputs, inputs // 32).half() + 0.01)
    if kind == "q6":
        codes = torch.randint(-32, 32, (outputs, inputs), dtype=torch.int8)
        scales = torch.randint(-128, 128, (outputs, inputs // 16), dtype=torch.int8)
        return Weight(kind, codes, scales, block_scales=torch.randn(outputs, inputs // 256).half() / 128)
    if kind == "mx4":
        codes = torch.randint(0, 16, (outputs, inputs), dtype=torch.uint8)
        return Weight(kind, codes, torch.randint(117, 129, (outputs, inputs // 32), dtype=torch.uint8))
    limit = 16 if kind in ("q4", "q4k") else 32
    codes = torch.randint(0, limit, (outputs, inputs), dtype=torch.uint8)
    if kind in BLOCKS:
        scales = torch.randint(0, 64, (outputs, inputs // 32), dtype=torch.int8)
        block_scales = torch.rand(outputs, inputs // 256).half() / 64
        return Weight(kind, codes, scales, scales.flip(1), block_scales, -block_scales * limit / 2)
    scales = torch.rand(outputs, inputs // 32).half() + 0.01
    return Weight(kind, codes, scales, torch.randn(outputs, inputs // 32).half() - scales * limit / 2)


def linear_of(backend: NativeBackend, *weights: Weight, bias: bool = True) -> Linear:
    outputs = sum(weight.outputs for weight in weights)
    parts = tuple(backend.pack(weight) for weight in weights)
    return Linear(parts, outputs, weights[0].inputs, torch.randn(outputs) if bias else None)


def as_met(x: Tensor, kind: str, activations: str) -> Tensor:
    """What a weight of this kind meets of x: with int8 activations, multiples of a 127th of each group's largest."""
    if activations == "int16" or kind in FLOATS:
        return x
    groups = x.view(len(x), -1, 32)
    largest = groups.abs().amax(-1, keepdim=True)
    steps = torch.full_like(largest, 127)  # torch divides a number by a tensor in two roundings
    inverse = torch.where(largest < 2.0**-100, 0.0, steps / largest)
    return ((groups * inverse).round().double() * (largest / steps).double()).view_as(x)


def bf16_rounded(*shape: int) -> Tensor:
    return torch.randn(*shape).bfloat16().float()


def error(result: Tensor, reference: Tensor) -> float:
    return float((result.double() - reference).norm() / reference.norm())
