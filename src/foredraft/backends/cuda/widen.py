# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, import-not-found, import-untyped"
"""Packed codes to values, in registers (see pack for how they lie), and rows of values for embeddings and prompts.

A value is scale * code + minimum, rounded once, to float16. Codes become float16 two at a time and without conversions:
bits below the exponent of 1024 are whole numbers above it, so one instruction moves codes there and one subtracts.
Those of mx4 are small floats already: their bits move to where float16 has its sign and the end of its exponent.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from foredraft.backends.cuda.launch import begin, options
from foredraft.backends.cuda.pack import BLOCK, STRIPE, Packed

_ROWS, _INPUTS = tl.constexpr(STRIPE), tl.constexpr(BLOCK)


def _half_twice(value: float) -> str:
    bits = int(torch.tensor(value, dtype=torch.float16).view(torch.int16)) & 0xFFFF
    return f"0x{bits:04x}{bits:04x}"


def _instructions(high_bits: int, offset: int, scales: int) -> str:
    """Operands: 8 values out ($0 to $7: step, half, side), words low ($8), high ($9) and factors ($10) in. `scales` are
    those of a group; 0 for codes that are floats, with one."""
    lines = [
        ".reg .b32 one, sixteenth, sixteen, pair, high, shifted, scale, minimum;",
        ".reg .b16 left, right;",
        f"mov.b32 one, {_half_twice(1024 + offset)};",
        f"mov.b32 sixteen, {_half_twice(-64 - offset)};",
        f"mov.b32 sixteenth, {_half_twice(1 / 16)};",
        "mov.b32 {left, right}, $10;",
        "mov.b32 scale, {left, left};",
        "mov.b32 minimum, {right, right};",
    ]
    if high_bits == 1:
        lines.append("shl.b32 high, $9, 12; or.b32 high, high, $9;")
    if high_bits == 2:
        lines.append("prmt.b32 high, $9, 0, 0x4140;")
    for pair in range(4):
        odd, step = pair % 2, pair // 2
        if scales == 0:
            lines.append(f"shl.b32 pair, $8, {12 - 4 * pair};" if pair < 3 else "mov.b32 pair, $8;")
            lines.append(f"shl.b32 shifted, $8, {9 - 4 * pair};" if pair < 3 else "shr.u32 shifted, $8, 3;")
            lines.append("and.b32 shifted, shifted, 0x0e000e00;")
            lines.append("lop3.b32 pair, pair, 0x80008000, shifted, 0xea;")
        elif high_bits == 8:
            lines.append(f"prmt.b32 pair, ${8 + step}, 0x64646464, {'0x4342' if odd else '0x4140'};")
            lines.append("sub.f16x2 pair, pair, one;")
        else:
            mask = "0x00f000f0" if odd else "0x000f000f"
            lines.append(f"shr.u32 pair, $8, {8 * step};" if step else "mov.b32 pair, $8;")
            lines.append(f"lop3.b32 pair, pair, {mask}, 0x64006400, 0xea;")
            if high_bits:
                above = ((1 << high_bits) - 1) << (8 if odd else 4)
                lines.append(f"shl.b32 shifted, high, {(8 if odd else 4) - high_bits * pair};")
                lines.append(f"lop3.b32 pair, shifted, 0x{above:04x}{above:04x}, pair, 0xea;")
            if odd:
                lines.append("fma.rn.f16x2 pair, pair, sixteenth, sixteen;")
            else:
                lines.append("sub.f16x2 pair, pair, one;")
        if scales == 2:
            lines.append(f"mul.f16x2 pair, pair, {'minimum' if step else 'scale'};")
        elif scales == 0 or high_bits == 8:
            lines.append("mul.f16x2 pair, pair, scale;")
        else:
            lines.append("fma.rn.f16x2 pair, pair, scale, minimum;")
        lines.append(f"mov.b32 {{${2 * pair}, ${2 * pair + 1}}}, pair;")
    return "{" + "\n".join(lines) + "}"


_Q4, _Q5 = tl.constexpr(_instructions(0, 0, 1)), tl.constexpr(_instructions(1, 0, 1))
_Q6, _Q8 = tl.constexpr(_instructions(2, 32, 2)), tl.constexpr(_instructions(8, 128, 1))
_MX4 = tl.constexpr(_instructions(0, 0, 0))
_OPERANDS = tl.constexpr(",".join(["=h"] * 8 + ["r"] * 3))


@triton.jit
def _value(low, high, factors, STEP: tl.constexpr, HALF: tl.constexpr, SIDE: tl.constexpr, KIND: tl.constexpr):
    """What the instructions make of one code, without them."""
    PAIR: tl.constexpr = 2 * STEP + HALF
    code = (low >> (16 * SIDE + 4 * PAIR)) & 15
    left = (factors & 0xFFFF).to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)
    right = ((factors >> 16) & 0xFFFF).to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)
    if KIND == "mx4":
        small = (((code & 8) << 12) | ((code & 7) << 9)).to(tl.uint16).to(tl.float16, bitcast=True)
        value = left * small.to(tl.float32)
    elif KIND == "q4":
        value = left * code + right
    elif KIND == "q5":
        value = left * (code + ((high >> (4 * SIDE + PAIR)) & 1) * 16) + right
    elif KIND == "q6":
        value = (right if STEP else left) * (code + ((high >> (8 * SIDE + 2 * PAIR)) & 3) * 16 - 32)
    else:
        value = left * ((((high if STEP else low) >> (8 * (2 * HALF + SIDE))) & 255) - 128)
    return value.to(tl.float16)


@triton.jit
def widen(low, high, factors, KIND: tl.constexpr, NATIVE: tl.constexpr):
    """Words [n] of codes -> float16 [n, step, half, side]."""
    if NATIVE:
        WITH_HIGH: tl.constexpr = _Q5 if KIND == "q5" else _Q6 if KIND == "q6" else _Q8
        TEXT: tl.constexpr = _Q4 if KIND == "q4" else _MX4 if KIND == "mx4" else WITH_HIGH
        v0, v1, v2, v3, v4, v5, v6, v7 = tl.inline_asm_elementwise(
            TEXT,
            _OPERANDS,
            [low, high, factors],
            dtype=(
                tl.float16, tl.float16, tl.float16, tl.float16, tl.float16, tl.float16, tl.float16, tl.float16,
            ),
            is_pure=True,
            pack=1,
        )  # fmt: skip
    else:
        v0, v1 = _value(low, high, factors, 0, 0, 0, KIND), _value(low, high, factors, 0, 0, 1, KIND)
        v2, v3 = _value(low, high, factors, 0, 1, 0, KIND), _value(low, high, factors, 0, 1, 1, KIND)
        v4, v5 = _value(low, high, factors, 1, 0, 0, KIND), _value(low, high, factors, 1, 0, 1, KIND)
        v6, v7 = _value(low, high, factors, 1, 1, 0, KIND), _value(low, high, factors, 1, 1, 1, KIND)
    left = tl.join(tl.join(v0, v4), tl.join(v2, v6))
    right = tl.join(tl.join(v1, v5), tl.join(v3, v7))
    return tl.join(left, right)


@triton.jit
def tile_of(values, REPEATS: tl.constexpr, UNITS: tl.constexpr, WARPS: tl.constexpr, NATIVE: tl.constexpr):
    """Widened words of [REPEATS, UNITS, WARPS, 128] -> [outputs, inputs]: stripes are (repeat, warp), blocks units."""
    values = values.reshape(REPEATS, UNITS, WARPS, 8, 4, 2, 2, 2, 2, 2)  # g, t, group, row half, step, half, side
    tile = values.permute(0, 2, 6, 3, 1, 5, 7, 8, 4, 9).reshape(REPEATS * WARPS * 16, UNITS * 64)
    if NATIVE:
        # Where the compiler sees a join behind a dot, it takes inputs in another order than that of other layers, and
        # lanes would have to exchange values. It does not look through instructions that it must not move.
        tile = tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [tile], dtype=tl.float16, is_pure=False, pack=2)
    return tile


@triton.jit
def four_by_four(place, SHARE: tl.constexpr):
    """place // SHARE * 4 + place % 4, which is read in fours, whatever their size: so that lanes get what belongs to
    their own four words. The words of SHARE / 4 lanes have the same place."""
    return tl.max_contiguous(tl.multiple_of(place // SHARE * 4 + place % 4, 4), 4)


@triton.jit
def _rows_kernel(
    token_ids,
    low,
    high,
    factors,
    out,  # [rows, inputs]
    first,
    outputs,
    inputs,
    padded,
    SOME: tl.constexpr,
    KIND: tl.constexpr,
    CODES: tl.constexpr,
    HAS_HIGH: tl.constexpr,
    NATIVE: tl.constexpr,
    PDL: tl.constexpr,
):
    """Some inputs of row token_ids[i] - first of a weight, if there is one, or (not SOME) of row or stripe i."""
    begin(PDL)
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    token = row
    if SOME:
        token = tl.load(token_ids + row) - first
        if (token < 0) | (token >= outputs):
            return
    if CODES:
        stripe = token // _ROWS if SOME else row
        at = stripe * (padded // _INPUTS) + block
        place = tl.arange(0, 128)
        low_words = tl.load(low + at * 128 + place)
        high_words = low_words
        if HAS_HIGH:
            high_words = tl.load(high + at * 128 + four_by_four(place, 4)).to(tl.int32)
        of_groups = tl.load(factors + at * 32 + four_by_four(place, 16)).to(tl.int32)
        values = tile_of(widen(low_words, high_words, of_groups, KIND, NATIVE), 1, 1, 1, NATIVE)
        output, column = stripe * _ROWS + tl.arange(0, _ROWS)[:, None], block * _INPUTS + tl.arange(0, _INPUTS)[None, :]
        wanted = (output == token if SOME else output < outputs) & (column < inputs)
        target = (output - token + row if SOME else output) * inputs + column
        tl.store(out + target, values.to(out.dtype.element_ty), mask=wanted)
    else:
        column = block * 128 + tl.arange(0, 128)
        values = tl.load(low + token * inputs + column, mask=column < inputs, other=0.0)
        tl.store(out + row * inputs + column, values.to(out.dtype.element_ty), mask=column < inputs)


def all_rows(part: Packed) -> Packed:
    """The weight as the values that its codes stand for."""
    out = torch.empty((part.outputs, part.inputs), dtype=torch.float16, device=part.low.device)
    write_rows(part, None, 0, out)
    return Packed("f16", part.outputs, part.inputs, part.inputs, out)


def write_rows(part: Packed, token_ids: Tensor | None, first: int, out: Tensor) -> None:
    """out[i] becomes row token_ids[i] - first of the weight, where there is one. None: row i."""
    has_codes = part.factors is not None
    rows = triton.cdiv(len(out), STRIPE) if has_codes and token_ids is None else len(out)
    _rows_kernel[(rows, triton.cdiv(part.padded, BLOCK if has_codes else 128))](
        part.low if token_ids is None else token_ids,
        *words_of(part),
        *(out, first, part.outputs, part.inputs, part.padded),
        SOME=token_ids is not None,
        KIND=part.kind,
        CODES=has_codes,
        HAS_HIGH=part.high is not None,
        NATIVE=out.is_cuda,
        num_warps=1,
        **options(out.device),
    )


def words_of(part: Packed) -> tuple[Tensor, Tensor, Tensor]:
    """Low and high words and factors, or in their place what is there."""
    return part.low, part.low if part.high is None else part.high, part.low if part.factors is None else part.factors
