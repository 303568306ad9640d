"""A matrix as a model's file gives it: floats, or codes with the scales of their groups."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

# Twice what the codes of MXFP4 stand for: a sign, two bits of exponent, one of mantissa.
MX4_VALUES = (0.0, 1.0, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0, -0.0, -1.0, -2.0, -3.0, -4.0, -6.0, -8.0, -12.0)

# What two neighbouring codes stand for, by the number that their bytes are: looked up together, as 64 bits.
_pairs = np.zeros((16, 256, 2), np.float32)  # by the second code and the first
_pairs[:, :16, 0], _pairs[:, :16, 1] = MX4_VALUES, np.array(MX4_VALUES)[:, None]
_MX4_PAIRS = _pairs.view(np.uint64).reshape(-1)


@dataclass(frozen=True)
class Weight:
    """A linear layer's weight as the model file gives it, row-major [outputs, inputs], before packing.

    kind   values                           scales and minimums
    "f32"  float32                          none
    "bf16" bfloat16                         none
    "q8"   int8 codes                       scales
    "q6"   int8 codes -32..31               scales, of blocks too
    "q5"   uint8 codes 0..31                scales and minimums
    "q5k"  uint8 codes 0..31                scales and minimums, of blocks too
    "q4"   uint8 codes 0..15                scales and minimums
    "q4k"  uint8 codes 0..15                scales and minimums, of blocks too
    "mx4"  uint8 codes 0..15 of MX4_VALUES  exponents

    A weight is scale * code + minimum. Scales and minimums are float16 [outputs, inputs / 32]; where blocks have
    theirs, float16 [outputs, inputs / 256], they are int8 and what counts is the product. The scales of q6 are
    [outputs, inputs / 16]. Those of mx4 are uint8 and stand for 2**(exponent - 128).
    """

    kind: str
    values: Tensor
    scales: Tensor | None = None
    minimums: Tensor | None = None
    block_scales: Tensor | None = None
    block_minimums: Tensor | None = None

    @property
    def outputs(self) -> int:
        return self.values.shape[0]

    @property
    def inputs(self) -> int:
        return self.values.shape[1]

    @property
    def parts(self) -> tuple[Any, ...]:
        """All tensors, a row for each output; None for those that the kind has not."""
        return self.values, self.scales, self.minimums, self.block_scales, self.block_minimums

    def rows(self, start: int, stop: int) -> Weight:
        """Some of the outputs."""
        parts: list[Any] = [None if part is None else part[start:stop] for part in self.parts]
        return Weight(self.kind, *parts)

    def chosen(self, outputs: Tensor) -> Weight:
        """The outputs of these numbers, in their order."""
        parts: list[Any] = [None if part is None else part[outputs] for part in self.parts]
        return Weight(self.kind, *parts)

    def dense(self) -> Tensor:
        """The float32 matrix that this weight stands for."""
        if self.scales is None:
            return self.values.float()
        if self.kind == "mx4":
            pairs = _MX4_PAIRS.take(self.values.numpy().view(np.uint16))
            values = torch.from_numpy(pairs.view(np.float32)).view(self.outputs, self.scales.shape[1], -1)
            powers = torch.ldexp(torch.ones(self.scales.shape), self.scales.int() - 128)
            return values.mul_(powers[:, :, None]).view(self.outputs, self.inputs)
        groups = self.values.view(self.outputs, self.scales.shape[1], -1).float()
        dense = groups * _factors(self.scales, self.block_scales)[:, :, None]
        if self.minimums is not None:
            dense = dense + _factors(self.minimums, self.block_minimums)[:, :, None]
        return dense.view(self.outputs, self.inputs)


def _factors(of_groups: Tensor, of_blocks: Tensor | None) -> Tensor:
    """float32 [outputs, groups]; the products are exact."""
    if of_blocks is None:
        return of_groups.float()
    return (of_groups.view(*of_blocks.shape, -1).float() * of_blocks.float()[:, :, None]).flatten(1)


def plain_weight(values: Tensor) -> Weight:
    """Of a matrix of floats; those of 16 bits other than bfloat16 become float32."""
    return Weight("bf16", values) if values.dtype == torch.bfloat16 else Weight("f32", values.float())


def join(pieces: Iterable[Weight], outputs: int) -> Weight:
    """Weights of one kind one below the other. Each is copied as it comes, so they need not exist all at once."""
    whole: list[Any] = []
    kind, filled = "", 0
    for piece in pieces:
        if piece.outputs == outputs:
            return piece
        if not whole:
            kind = piece.kind
            whole = [None if part is None else part.new_empty(outputs, part.shape[1]) for part in piece.parts]
        for target, part in zip(whole, piece.parts, strict=True):
            if part is not None:
                _bytes(target)[filled : filled + piece.outputs] = _bytes(part)
        filled += piece.outputs
    assert filled == outputs
    return Weight(kind, *whole)


def _bytes(tensor: Tensor) -> NDArray[np.uint8]:
    """For copies by numpy, on this thread: waking torch's other threads for each small piece would cost more."""
    return tensor.view(torch.uint8).numpy()
