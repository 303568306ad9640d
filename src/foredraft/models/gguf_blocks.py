"""GGUF's block formats as weights: 4-bit and 8-bit codes are kept exactly, everything else becomes dense.

Each function takes the rows of one matrix as raw bytes, uint8 [rows, bytes per row].
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from gguf.constants import GGMLQuantizationType as Type
from gguf.quants import Q4_K, dequantize
from numpy.typing import NDArray

from foredraft.backends.base import Weight

Rows = NDArray[np.uint8]

# The precision class of a file is that of most of its weights: one of config.DTYPES.
PRECISION = {
    Type.F32: "float32",
    Type.F16: "bfloat16",
    Type.BF16: "bfloat16",
    Type.Q8_0: "int8",
    Type.Q6_K: "int8",
    Type.Q5_K: "int8",
    Type.Q5_1: "int8",
    Type.Q5_0: "int8",
    Type.Q4_K: "int4",
    Type.Q4_1: "int4",
    Type.Q4_0: "int4",
    Type.Q3_K: "int4",
    Type.Q2_K: "int4",
}
VECTOR_TYPES = (Type.F32, Type.F16, Type.BF16)  # of norm weights and biases


def decode(rows: Rows, kind: Type) -> Weight:
    """The weight that `rows` of type `kind` (one of PRECISION) stand for."""
    if kind in _DECODERS:
        return _DECODERS[kind](rows)
    return Weight("f32", torch.from_numpy(dequantize(rows, kind)))


def _f32(rows: Rows) -> Weight:
    return Weight("f32", torch.from_numpy(rows).view(torch.float32))


def _f16(rows: Rows) -> Weight:
    return Weight("f32", torch.from_numpy(rows).view(torch.float16).float())


def _bf16(rows: Rows) -> Weight:
    return Weight("bf16", torch.from_numpy(rows).view(torch.bfloat16))


def _q8_0(rows: Rows) -> Weight:
    blocks = rows.reshape(len(rows), -1, 34)  # scale: f16, 32 codes: i8
    codes = blocks[:, :, 2:].reshape(len(rows), -1).view(np.int8)
    return Weight("q8", torch.from_numpy(codes), _halves(blocks, 0))


def _q4_0(rows: Rows) -> Weight:
    blocks = rows.reshape(len(rows), -1, 18)  # scale: f16, 16 x 2 codes; w = scale * (code - 8)
    scales = _halves(blocks, 0)
    return Weight("q4", _nibbles(blocks[:, :, 2:]), scales, -8 * scales)


def _q4_1(rows: Rows) -> Weight:
    blocks = rows.reshape(len(rows), -1, 20)  # scale: f16, minimum: f16, 16 x 2 codes
    return Weight("q4", _nibbles(blocks[:, :, 4:]), _halves(blocks, 0), _halves(blocks, 2))


def _q4_k(rows: Rows) -> Weight:
    # 256 weights: d: f16, dmin: f16, 8 x (scale, minimum) of 6 bits in 12 bytes, 4 x 32 bytes of 2 codes;
    # w = d * scale * code - dmin * minimum
    blocks = rows.reshape(len(rows), -1, 144)
    codes = _nibbles(blocks[:, :, 16:].reshape(len(rows), -1, 32))
    factors = Q4_K.get_scale_min(blocks[:, :, 4:16].reshape(-1, 12))
    scale, minimum = (torch.from_numpy(factor.astype(np.float32)).view(len(rows), -1, 8) for factor in factors)
    scales = _halves(blocks, 0)[:, :, None] * scale
    minimums = _halves(blocks, 2)[:, :, None] * -minimum
    return Weight("q4", codes, scales.flatten(1), minimums.flatten(1))


def _halves(blocks: Rows, offset: int) -> torch.Tensor:
    """The float16 at byte `offset` of every block, as float32 [rows, blocks]."""
    halves = blocks[:, :, offset : offset + 2].view(np.float16)
    return torch.from_numpy(halves[:, :, 0].astype(np.float32))


def _nibbles(packed: Rows) -> torch.Tensor:
    """[rows, groups, n] bytes -> uint8 codes [rows, groups * 2n]: in each group all low nibbles, then all high ones."""
    codes = np.concatenate((packed & 15, packed >> 4), axis=2)
    return torch.from_numpy(codes.reshape(len(packed), -1))


_DECODERS: dict[Type, Callable[[Rows], Weight]] = {
    Type.F32: _f32,
    Type.F16: _f16,
    Type.BF16: _bf16,
    Type.Q8_0: _q8_0,
    Type.Q4_0: _q4_0,
    Type.Q4_1: _q4_1,
    Type.Q4_K: _q4_k,
}
