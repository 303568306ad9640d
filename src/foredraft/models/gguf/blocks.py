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
from gguf.quants import dequantize
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
    codes = _bytes(blocks, 2, 34).reshape(len(blocks), -1)
    return Weight("q8", torch.from_numpy(codes.view(np.int8)), _halves(blocks, 0))


def _q6_k(blocks: Bytes) -> Weight:
    # 256 weights: 2 x 64 bytes of 2 low nibbles, 2 x 32 bytes of 4 pairs of high bits, 16 scales: i8, d: f16;
    # w = d * scale * (code - 32)
    low = _fields(_bytes(blocks, 0, 128), 64, 4)
    codes = _fields(_bytes(blocks, 128, 192), 32, 2)
    codes <<= 4
    codes |= low
    codes -= 32
    scales = torch.from_numpy(_bytes(blocks, 192, 208).view(np.int8).reshape(len(blocks), -1))
    return Weight("q6", torch.from_numpy(codes.view(np.int8)), scales, block_scales=_halves(blocks, 208))


def _q5_k(blocks: Bytes) -> Weight:
    # 256 weights: as Q4_K, with 32 bytes of 8 high bits before the low nibbles
    codes = _fields(_bytes(blocks, 16, 48), 32, 1)
    codes <<= 4
    codes |= _fields(_bytes(blocks, 48, 176), 32, 4)
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
    return Weight("q4", torch.from_numpy(_fields(_bytes(blocks, 2, 18), 16, 4)), scales, minimums)


def _q4_1(blocks: Bytes) -> Weight:
    # scale: f16, minimum: f16, 16 x 2 codes
    codes = _fields(_bytes(blocks, 4, 20), 16, 4)
    return Weight("q4", torch.from_numpy(codes), _halves(blocks, 0), _halves(blocks, 2))


def _q4_k(blocks: Bytes) -> Weight:
    # 256 weights: d: f16, dmin: f16, 8 x (scale, minimum) of 6 bits in 12 bytes, 4 x 32 bytes of 2 codes;
    # w = d * scale * code - dmin * minimum
    codes = _fields(_bytes(blocks, 16, 144), 32, 4)
    return Weight("q4k", torch.from_numpy(codes), *_k_factors(blocks))


def _mxfp4(blocks: Bytes) -> Weight:
    # exponent: u8, 16 x 2 codes
    exponents = torch.from_numpy(blocks[:, :, 0].copy())
    return Weight("mx4", torch.from_numpy(_fields(_bytes(blocks, 1, 17), 16, 4)), exponents)


def _k_factors(blocks: Bytes) -> list[torch.Tensor]:
    """Scales and minimums of the groups of Q4_K and Q5_K blocks, and of the blocks, as a Weight has them."""
    # Three times four bytes: scales and minimums of groups 0 to 3, whose two upper bits belong to those of groups 4 to
    # 7, whose lower bits are the nibbles of the third.
    words = np.ascontiguousarray(_bytes(blocks, 4, 16).view(np.uint32).reshape(-1, 3).T)
    factors = np.empty((2, words.shape[1], 2), np.uint32)
    for factor, word, nibbles in zip(factors, words, (words[2], words[2] >> np.uint32(4)), strict=False):
        factor[:, 0] = word & 0x3F3F3F3F
        factor[:, 1] = (nibbles & 0x0F0F0F0F) | (word >> np.uint32(2) & 0x30303030)
    scales, minimums = (torch.from_numpy(factor.view(np.int8).reshape(len(blocks), -1)) for factor in factors)
    return [scales, minimums, _halves(blocks, 0), -_halves(blocks, 2)]


def _halves(blocks: Bytes, offset: int) -> torch.Tensor:
    """The float16 at byte `offset` of every block: [rows, blocks]."""
    halves = blocks[:, :, offset : offset + 2].view(np.float16)
    return torch.from_numpy(halves[:, :, 0].copy())


def _bytes(blocks: Bytes, start: int, stop: int) -> Bytes:
    """These bytes of every block: [rows, blocks, bytes], a copy. Numpy moves them as one item, not byte by byte."""
    return blocks[:, :, start:stop].view(f"V{stop - start}").copy().view(np.uint8)


def _fields(packed: Bytes, group: int, bits: int) -> Bytes:
    """Contiguous bytes -> codes [rows, bytes * 8 / bits]: in each group of so many bytes the low bits of all of them
    first. Eight bytes are shifted at once; what crosses from one to another is masked away."""
    words, mask = packed.reshape(-1).view(np.uint64), np.uint64(0x0101010101010101 * ((1 << bits) - 1))
    codes = np.empty((packed.size // group, 8 // bits), f"V{group}")
    for field in range(8 // bits):
        codes[:, field] = (words >> np.uint64(field * bits) & mask).view(codes.dtype)
    return codes.view(np.uint8).reshape(len(packed), -1)


def _five_bits(blocks: Bytes, offset: int) -> Bytes:
    """Codes 0..31 [rows, blocks * 32] of blocks that have 32 high bits at byte `offset`, and low nibbles behind."""
    codes = np.unpackbits(blocks[:, :, offset : offset + 4], axis=2, bitorder="little").reshape(len(blocks), -1)
    codes <<= 4
    codes |= _fields(_bytes(blocks, offset + 4, offset + 20), 16, 4)
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
