"""GGUF's block formats as weights: codes of 4 to 8 bits are kept exactly, those of 2 and 3 bits become dense.

Each function takes some rows of a matrix as raw bytes, uint8 [rows, blocks, bytes per block]. A matrix is decoded a few
rows at a time: what lies between bytes and codes then stays in the cache, and needs no memory to speak of.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from gguf.constants import GGML_QUANT_SIZES
from gguf.constants import GGMLQuantizationType as Type
from gguf.quants import Q4_K, dequantize
from numpy.typing import NDArray

from foredraft.backends.weight import Weight, join, plain_weight
from foredraft.errors import InvalidModel

Bytes = NDArray[np.uint8]

# The precision class of a file is that of most of its weights: one of config.DTYPES.
PRECISION = {
    Type.F32: "float32",
    **dict.fromkeys((Type.F16, Type.BF16), "bfloat16"),
    **dict.fromkeys((Type.Q8_0, Type.Q6_K, Type.Q5_K, Type.Q5_1, Type.Q5_0), "int8"),
    **dict.fromkeys((Type.Q4_K, Type.Q4_1, Type.Q4_0, Type.MXFP4, Type.Q3_K, Type.Q2_K), "int4"),
}
_PIECE_BYTES = 1 << 18  # of the file, that are decoded at once
# Also of norm weights and biases.
FLOATS = {Type.F32: torch.float32, Type.F16: torch.float16, Type.BF16: torch.bfloat16}


def decode(rows: Bytes, kind: Type) -> Weight:
    """The weight that `rows` [rows, bytes] of type `kind` (one of PRECISION) stand for."""
    if kind in FLOATS:
        return plain_weight(torch.from_numpy(rows).view(FLOATS[kind]))

    def dense(blocks: Bytes) -> Weight:
        with np.errstate(all="ignore"):  # scales of a damaged file may be infinite
            return Weight("f32", torch.from_numpy(dequantize(blocks.reshape(len(blocks), -1), kind)))

    decoder = _DECODERS.get(kind, dense)
    size = max(1, _PIECE_BYTES // rows.shape[1])
    blocks = rows.reshape(len(rows), -1, GGML_QUANT_SIZES[kind][1])
    return join((decoder(blocks[start : start + size]) for start in range(0, len(rows), size)), len(rows))


def _q8_0(blocks: Bytes) -> Weight:
    # scale: f16, 32 codes: i8
    codes = blocks[:, :, 2:].reshape(len(blocks), -1).view(np.int8)
    return Weight("q8", torch.from_numpy(codes), _halves(blocks, 0))


def _q6_k(blocks: Bytes) -> Weight:
    # 256 weights: 2 x 64 bytes of 2 low nibbles, 2 x 32 bytes of 4 pairs of high bits, 16 scales: i8, d: f16;
    # w = d * scale * (code - 32)
    low = _fields(blocks[:, :, :128].reshape(len(blocks), -1, 64), 4)
    codes = _fields(blocks[:, :, 128:192].reshape(len(blocks), -1, 32), 2)
    codes <<= 4
    codes |= low
    codes -= 32
    scales = torch.from_numpy(blocks[:, :, 192:208].view(np.int8).reshape(len(blocks), -1))
    return Weight("q6", torch.from_numpy(codes.view(np.int8)), scales, block_scales=_halves(blocks, 208))


def _q5_k(blocks: Bytes) -> Weight:
    # 256 weights: as Q4_K, with 32 bytes of 8 high bits before the low nibbles
    codes = _fields(blocks[:, :, 16:48], 1)
    codes <<= 4
    codes |= _fields(blocks[:, :, 48:].reshape(len(blocks), -1, 32), 4)
    return Weight("q5k", torch.from_numpy(codes), *_k_factors(blocks))


def _q5_1(blocks: Bytes) -> Weight:
    # scale: f16, minimum: f16, 32 high bits, 16 bytes of 2 low nibbles
    return Weight("q5", torch.from_numpy(_five_bits(blocks, 4)), _halves(blocks, 0), _halves(blocks, 2))


def _q5_0(blocks: Bytes) -> Weight:
    # scale: f16, 32 high bits, 16 bytes of 2 low nibbles; w = scale * (code - 16)
    codes = _five_bits(blocks, 2)
    codes -= 16
    return Weight("q8", torch.from_numpy(codes.view(np.int8)), _halves(blocks, 0))


def _q4_0(blocks: Bytes) -> Weight:
    # scale: f16, 16 x 2 codes; w = scale * (code - 8)
    scales = _halves(blocks, 0)
    minimums = -8 * scales
    if not minimums.isfinite().all():
        raise InvalidModel("A Q4_0 tensor has scales beyond 8188, which no trained model has; is the file damaged?")
    return Weight("q4", torch.from_numpy(_fields(blocks[:, :, 2:], 4)), scales, minimums)


def _q4_1(blocks: Bytes) -> Weight:
    # scale: f16, minimum: f16, 16 x 2 codes
    return Weight("q4", torch.from_numpy(_fields(blocks[:, :, 4:], 4)), _halves(blocks, 0), _halves(blocks, 2))


def _q4_k(blocks: Bytes) -> Weight:
    # 256 weights: d: f16, dmin: f16, 8 x (scale, minimum) of 6 bits in 12 bytes, 4 x 32 bytes of 2 codes;
    # w = d * scale * code - dmin * minimum
    codes = _fields(blocks[:, :, 16:].reshape(len(blocks), -1, 32), 4)
    return Weight("q4k", torch.from_numpy(codes), *_k_factors(blocks))


def _mxfp4(blocks: Bytes) -> Weight:
    # exponent: u8, 16 x 2 codes
    exponents = torch.from_numpy(blocks[:, :, 0].copy())
    return Weight("mx4", torch.from_numpy(_fields(blocks[:, :, 1:], 4)), exponents)


def _k_factors(blocks: Bytes) -> list[torch.Tensor]:
    """Scales and minimums of the groups of Q4_K and Q5_K blocks, and of the blocks, as a Weight has them."""
    factors = Q4_K.get_scale_min(blocks[:, :, 4:16].reshape(-1, 12))
    scales, minimums = (torch.from_numpy(factor.view(np.int8).reshape(len(blocks), -1)) for factor in factors)
    return [scales, minimums, _halves(blocks, 0), -_halves(blocks, 2)]


def _halves(blocks: Bytes, offset: int) -> torch.Tensor:
    """The float16 at byte `offset` of every block: [rows, blocks]."""
    halves = blocks[:, :, offset : offset + 2].view(np.float16)
    return torch.from_numpy(halves[:, :, 0].copy())


def _fields(packed: Bytes, bits: int) -> Bytes:
    """[rows, groups, n] bytes -> codes [rows, groups * n * 8 / bits]: in each group the low bits of all bytes first."""
    count = 8 // bits
    codes = np.empty((*packed.shape[:2], count, packed.shape[2]), np.uint8)
    for field in range(count):
        np.right_shift(packed, field * bits, out=codes[:, :, field])
    codes &= (1 << bits) - 1
    return codes.reshape(len(packed), -1)


def _five_bits(blocks: Bytes, offset: int) -> Bytes:
    """Codes 0..31 [rows, blocks * 32] of blocks that have 32 high bits at byte `offset`, and low nibbles behind."""
    codes = np.unpackbits(blocks[:, :, offset : offset + 4], axis=2, bitorder="little").reshape(len(blocks), -1)
    codes <<= 4
    codes |= _fields(blocks[:, :, offset + 4 :], 4)
    return codes


_DECODERS: dict[Type, Callable[[Bytes], Weight]] = {
    Type.Q8_0: _q8_0,
    Type.Q6_K: _q6_k,
    Type.Q5_K: _q5_k,
    Type.Q5_1: _q5_1,
    Type.Q5_0: _q5_0,
    Type.Q4_K: _q4_k,
    Type.Q4_1: _q4_1,
    Type.Q4_0: _q4_0,
    Type.MXFP4: _mxfp4,
}
