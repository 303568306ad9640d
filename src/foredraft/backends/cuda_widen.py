# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, import-not-found, import-untyped"
"""Packed codes to values, in registers (see cuda_pack for how they lie), and rows of values for embeddings and
prompts."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from foredraft.backends.cuda_launch import begin, options
from foredraft.backends.cuda_pack import Packed

SHRINK = tl.constexpr(48)  # see widen: so many powers of 2 keep scales that are multiplied by 2^149 finite


@triton.jit
def _column(tile, index: tl.constexpr, COUNT: tl.constexpr, BO: tl.constexpr):
    """Column `index` of a tile [BO, COUNT], for a COUNT of 4, 8 or 16: one bit of the index after the other."""
    if COUNT == 16:
        even, odd = tl.split(tile.reshape(BO, 2, 2, 2, 2))
        even, odd = tl.split(even if index % 2 == 0 else odd)
        even, odd = tl.split(even if index // 2 % 2 == 0 else odd)
        first, second = tl.split(even if index // 4 % 2 == 0 else odd)
    elif COUNT == 8:
        even, odd = tl.split(tile.reshape(BO, 2, 2, 2))
        even, odd = tl.split(even if index % 2 == 0 else odd)
        first, second = tl.split(even if index // 2 % 2 == 0 else odd)
    else:
        even, odd = tl.split(tile.reshape(BO, 2, 2))
        first, second = tl.split(even if index % 2 == 0 else odd)
    return first if index // (COUNT // 2) == 0 else second


@triton.jit
def _byte(word, place: tl.constexpr):
    """One of the four signed bytes in a word, as float32."""
    return ((word << (24 - 8 * place)) >> 24).to(tl.float32)


@triton.jit
def halves(word):
    """The two float16 numbers in a word."""
    low, high = word & 0xFFFF, (word >> 16) & 0xFFFF
    return low.to(tl.uint16).to(tl.float16, bitcast=True), high.to(tl.uint16).to(tl.float16, bitcast=True)


@triton.jit
def _plane_codes(low, high, plane: tl.constexpr, BITS: tl.constexpr, HIGH_BITS: tl.constexpr):
    """The codes of one plane as float32, times a power of 2: (codes, 1 / that power).

    Whole numbers are numbers as they are: bits below the exponent's are a multiple of 2^-149. They may lie anywhere in
    these 23 bits, so most planes take one instruction, and no conversion, which would be slow."""
    FITS: tl.constexpr = plane == 0 if HIGH_BITS else BITS * (plane + 1) <= 23
    SHIFT: tl.constexpr = 0 if FITS else BITS * plane if HIGH_BITS else 9
    WITHIN: tl.constexpr = BITS * plane - SHIFT
    moved = low if FITS else low >> SHIFT
    code = moved & (((1 << BITS) - 1) << WITHIN)
    if HIGH_BITS:
        code |= ((high >> (HIGH_BITS * plane)) & ((1 << HIGH_BITS) - 1)) << BITS
    return code.to(tl.float32, bitcast=True), 2.0 ** (149 - SHRINK - WITHIN)


@triton.jit
def widen(
    low, high, factors, block_scale, block_minimum, plane: tl.constexpr, KIND: tl.constexpr, BITS: tl.constexpr,
    HIGH_BITS: tl.constexpr, OFFSET: tl.constexpr, FACTORS: tl.constexpr, BO: tl.constexpr,
):  # fmt: skip
    """A plane [BO, 32] of weights, times 2^-SHRINK: scale * code + minimum in float32, where the product is exact,
    rounded to bfloat16. `factors` are the block's [BO, FACTORS]."""
    code, power = _plane_codes(low, high, plane, BITS, HIGH_BITS)
    if KIND == "q4" or KIND == "q5":
        scale = _column(factors, 2 * plane, FACTORS, BO).to(tl.float32)[:, None]
        minimum = _column(factors, 2 * plane + 1, FACTORS, BO).to(tl.float32)[:, None]
    elif KIND == "q8":
        scale = _column(factors, plane, FACTORS, BO).to(tl.float32)[:, None]
        minimum = scale * (-1.0 * OFFSET)
    else:
        word = _column(factors, plane // 2, FACTORS, BO)
        scale, right = _byte(word, 2 * (plane % 2))[:, None], _byte(word, 2 * (plane % 2) + 1)[:, None]
        if KIND == "q6":
            scale = tl.where(tl.arange(0, 32)[None, :] < 16, scale, right) * block_scale.to(tl.float32)[:, None]
            minimum = scale * (-1.0 * OFFSET)
        else:
            minimum = right * block_minimum.to(tl.float32)[:, None]
            scale = scale * block_scale.to(tl.float32)[:, None]
    scale, minimum = scale * power, minimum * 2.0**-SHRINK
    return tl.fma(code, scale.broadcast_to(BO, 32), minimum.broadcast_to(BO, 32)).to(tl.bfloat16)


@triton.jit
def _rows_kernel(
    token_ids,
    low,
    high,
    factors,
    block_factors,
    out,  # [rows, inputs]
    first,
    outputs,
    inputs,
    padded,
    SOME: tl.constexpr,
    KIND: tl.constexpr,
    PLANES: tl.constexpr,
    BITS: tl.constexpr,
    HIGH_BITS: tl.constexpr,
    OFFSET: tl.constexpr,
    FACTORS: tl.constexpr,
    PDL: tl.constexpr,
):
    """One block of inputs of one row of a weight: row token_ids[i] - first, if there is one, or (not SOME) row i."""
    begin(PDL)
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    token = row
    if SOME:
        token = tl.load(token_ids + row) - first
        if (token < 0) | (token >= outputs):
            return
    if PLANES:
        k = tl.arange(0, 32)[None, :]
        place = token * (padded // PLANES) + block * 32 + k
        words = tl.load(low + place).to(tl.int32)
        high_words = words
        if HIGH_BITS:
            high_words = tl.load(high + place).to(tl.int32)
        factor_place = (token * (padded // (PLANES * 32)) + block) * FACTORS
        of_groups = tl.load(factors + factor_place + tl.arange(0, FACTORS)[None, :])
        block_scale, block_minimum = of_groups, of_groups
        if KIND == "q4k" or KIND == "q5k" or KIND == "q6":
            block_scale, block_minimum = halves(tl.load(block_factors + block * outputs + token + tl.arange(0, 1)))
        for plane in tl.static_range(PLANES):
            column = (block * PLANES + plane) * 32 + k
            values = widen(
                words, high_words, of_groups, block_scale, block_minimum, plane,
                KIND, BITS, HIGH_BITS, OFFSET, FACTORS, 1,
            )  # fmt: skip
            values = values.to(tl.float32) * 2.0**SHRINK
            tl.store(out + row * inputs + column, values.to(out.dtype.element_ty), mask=column < inputs)
    else:
        column = block * 128 + tl.arange(0, 128)
        values = tl.load(low + token * inputs + column, mask=column < inputs, other=0.0)
        tl.store(out + row * inputs + column, values.to(out.dtype.element_ty), mask=column < inputs)


def some_rows(part: Packed, token_ids: Tensor, first: int, out: Tensor) -> None:
    """out[i] becomes row token_ids[i] - first of the weight, where there is one."""
    _launch(part, token_ids, first, out)


def all_rows(part: Packed) -> Tensor:
    """The weight as the values that it stands for: bfloat16 [outputs, inputs]."""
    out = torch.empty((part.outputs, part.inputs), dtype=torch.bfloat16, device=part.low.device)
    _launch(part, None, 0, out)
    return out


def _launch(part: Packed, token_ids: Tensor | None, first: int, out: Tensor) -> None:
    form = part.form
    _rows_kernel[(len(out), triton.cdiv(part.padded, 128 if form is None else form.block))](
        *(part.low if token_ids is None else token_ids, part.low, part.low if part.high is None else part.high),
        part.low if part.factors is None else part.factors,
        part.low if part.block_factors is None else part.block_factors,
        *(out, first, part.outputs, part.inputs, part.padded),
        SOME=token_ids is not None,
        num_warps=1,
        **codes_of(part),
        **options(out.device),
    )


def codes_of(part: Packed) -> dict[str, int | str]:
    """What kernels are told of a weight's form when they are compiled."""
    form = part.form
    if form is None:
        return {"KIND": part.kind, "PLANES": 0, "BITS": 0, "HIGH_BITS": 0, "OFFSET": 0, "FACTORS": 0}
    return {
        "KIND": part.kind,
        "PLANES": form.planes,
        "BITS": form.bits,
        "HIGH_BITS": form.high_bits,
        "OFFSET": form.offset,
        "FACTORS": form.factors,
    }
