# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, import-not-found, import-untyped"
"""Linear layers on a GPU: y = x W', for 1 row as for thousands, with the same bits for a row in any company.

The product is computed as W x': outputs are the rows of the matrix instruction and the activations' rows its columns,
so every number of rows runs the same instruction, only wider. Each output is a chain of these over one segment of the
inputs, from 0; the segments' sums are added in order (pack.Cut). With few rows every segment has a program of its
own, so that the whole device reads the weight, and whoever reads the sums adds them up; with many rows a program goes
through all segments. Packed codes are widened to float16 in registers, or for many rows once before.

A program over codes has one segment of some stripes (see pack). It reads the codes of its next inputs while it
multiplies with the last ones, and the first ones while the kernel before it still runs. Codes go from memory to the
registers of the matrix instruction and pass through nothing between; only x goes through shared memory, some steps
ahead (num_stages).

What multiplies bfloat16 weights is rounded to bfloat16; what multiplies codes to float16, and to at most 65504.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from foredraft.backends.cuda.launch import LARGEST, activated, begin, options, prefetch_rows
from foredraft.backends.cuda.pack import STRIPE, Cut, Packed, cut
from foredraft.backends.cuda.widen import all_rows, four_by_four, tile_of, widen, words_of
from foredraft.backends.layers import Linear

SPLIT_ROWS = 256  # up to so many rows, every segment has a program of its own


@triton.jit
def _tile_outputs(tile, outputs, GATED: tl.constexpr, BO: tl.constexpr):
    """The outputs of a tile (clamped), and which of them exist. GATED: in turn 8 of the gate's and 8 of the up's."""
    place = tl.arange(0, BO)
    if GATED:
        half = outputs // 2
        output = tile * (BO // 2) + (place // 16) * 8 + place % 8
        return tl.minimum(output, half - 1) + tl.where(place % 16 >= 8, half, 0), output < half
    output = tile * BO + place
    return tl.minimum(output, outputs - 1), output < outputs


@triton.jit
def _segment(
    x_rows,
    known,
    weight_rows,
    bias,
    index,
    segment,
    inputs,
    HAS_BIAS: tl.constexpr,
    BO: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    EVEN: tl.constexpr,
):
    """The sums [BO, BN] of the index-th segment of a weight whose values are stored as they are. The first has the
    bias."""
    start, stop = index * segment, tl.minimum((index + 1) * segment, inputs)
    total = tl.zeros((BO, BN), tl.float32)
    k = tl.arange(0, BK)[None, :]
    for at in range(start, stop, BK):
        if EVEN:
            w = tl.load(weight_rows + at + k)
            x = tl.load(x_rows + at + k, mask=known, other=0.0)
        else:
            inside = at + k < stop
            w = tl.load(weight_rows + at + k, mask=inside, other=0.0)
            x = tl.load(x_rows + at + k, mask=known & inside, other=0.0)
        total = tl.dot(w, tl.trans(x), total, input_precision="ieee")
    if HAS_BIAS:
        total += tl.where(index == 0, tl.load(bias), 0.0)[:, None]
    return total


@triton.jit(do_not_specialize=["rows"])
def values_kernel(
    x,  # [rows, inputs]
    weight,  # [outputs, inputs], as x
    bias,
    out,  # [segments or 1, rows, columns] float32, or gated [rows, columns]
    rows,
    inputs,
    outputs,
    columns,
    segment,
    segments,
    HAS_BIAS: tl.constexpr,
    GATED: tl.constexpr,
    WHOLE: tl.constexpr,
    EVEN: tl.constexpr,
    BO: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    PDL: tl.constexpr,
):
    row_tile, tile, place = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    output, exists = _tile_outputs(tile, outputs, GATED, BO)
    row = row_tile * BN + tl.arange(0, BN)
    known = (row < rows)[:, None]
    weight_rows = weight + output.to(tl.int64)[:, None] * inputs
    x_rows = x + row.to(tl.int64)[:, None] * inputs
    prefetch_rows(weight_rows + place * segment, inputs - place * segment, PDL)
    begin(PDL)

    if WHOLE:
        total = tl.zeros((BO, BN), tl.float32)
        for index in range(segments):
            total += _segment(
                x_rows, known, weight_rows, bias + output, index, segment, inputs, HAS_BIAS, BO, BN, BK, EVEN
            )
    else:
        total = _segment(x_rows, known, weight_rows, bias + output, place, segment, inputs, HAS_BIAS, BO, BN, BK, EVEN)

    if GATED:
        gate, up = tl.split(total.reshape(BO // 16, 2, 8, BN).permute(0, 2, 3, 1))
        active = activated(gate, up, out).reshape(BO // 2, BN)
        output = tile * (BO // 2) + tl.arange(0, BO // 2)
        places = row.to(tl.int64)[None, :] * columns + output[:, None]
        tl.store(out + places, active, mask=(row < rows)[None, :] & (output < outputs // 2)[:, None])
    else:
        places = (place * rows + row).to(tl.int64)[None, :] * columns + output[:, None]
        tl.store(out + places, total, mask=(row < rows)[None, :] & exists[:, None])


@triton.jit
def _load(low_at, high_at, factors_at, unit, block, last, KIND: tl.constexpr, UNITS: tl.constexpr, EVEN: tl.constexpr):
    """The words and factors of some blocks. Behind the last block are zeros, or (EVEN) the last ones again."""
    if EVEN:
        block = tl.minimum(block, last - UNITS)
        low, factors = tl.load(low_at + block * 128), tl.load(factors_at + block * 32)
        high = low if KIND == "q4" else tl.load(high_at + block * 128)
    else:
        inside = block + unit < last
        low = tl.load(low_at + block * 128, mask=inside, other=0)
        factors = tl.load(factors_at + block * 32, mask=inside, other=0)
        high = low if KIND == "q4" else tl.load(high_at + block * 128, mask=inside, other=0)
    return low, high, factors


@triton.jit(do_not_specialize=["rows"])
def codes_kernel(
    x,  # [rows, inputs] float16
    low,
    high,
    factors,
    bias,
    out,  # [segments, rows, columns] float32, or gated [rows, columns]
    rows,
    inputs,
    padded,
    outputs,
    columns,
    segment,
    KIND: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    GATED: tl.constexpr,
    EVEN: tl.constexpr,
    NATIVE: tl.constexpr,
    BO: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    WARPS: tl.constexpr,
    PDL: tl.constexpr,
):
    """EVEN: every segment is a multiple of BK. NATIVE: runs on a device, not in the interpreter."""
    row_tile, tile, index = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    UNITS: tl.constexpr = BK // 64
    STRIPES: tl.constexpr = BO // 16
    blocks = padded // 64
    first = index * (segment // 64)
    last = tl.minimum(first + segment // 64, blocks)

    # GATED: the first half of the stripes is of the gate, the second of the up's.
    OWN: tl.constexpr = STRIPES // 2 if GATED else STRIPES
    place = tl.arange(0, STRIPES * UNITS * 128)  # repeat, unit, warp, lane, word
    nth = place // (UNITS * WARPS * 128) * WARPS + place // 128 % WARPS
    stripe = tile * OWN + nth % OWN + nth // OWN * (outputs // 32)
    unit = place // (WARPS * 128) % UNITS
    at = tl.minimum(stripe, (outputs + 15) // 16 - 1) * blocks + unit
    low_at = low + at * 128 + place % 128
    high_at = high + at * 128 + four_by_four(place % 128, 4)
    factors_at = factors + at * 32 + four_by_four(place % 128, 16)

    row = row_tile * BN + tl.arange(0, BN)
    known = (row < rows)[:, None]
    k = tl.arange(0, BK)[None, :]
    x_rows = x + row.to(tl.int64)[:, None] * inputs + k

    words, more, of_groups = _load(low_at, high_at, factors_at, unit, first, last, KIND, UNITS, EVEN)
    begin(PDL)
    total = tl.zeros((BO, BN), tl.float32)
    for block in range(first, last, UNITS):
        following = _load(low_at, high_at, factors_at, unit, block + UNITS, last, KIND, UNITS, EVEN)
        x_tile = tl.load(x_rows + block * 64, mask=known if EVEN else known & (block * 64 + k < inputs), other=0.0)
        values = widen(words, more.to(tl.int32), of_groups.to(tl.int32), KIND, NATIVE)
        w = tile_of(values, STRIPES // WARPS, UNITS, WARPS, NATIVE)
        total = tl.dot(w, tl.trans(x_tile), total)
        words, more, of_groups = following

    place = tl.arange(0, BO)
    OUTPUTS: tl.constexpr = OWN * 16
    output = tile * OUTPUTS + place % OUTPUTS
    if HAS_BIAS:
        whole = output + place // OUTPUTS * (outputs // 2)
        total += tl.where(index == 0, tl.load(bias + tl.minimum(whole, outputs - 1)), 0.0)[:, None]
    if GATED:
        gate, up = tl.split(total.reshape(2, OUTPUTS, BN).permute(1, 2, 0))
        output = tile * OUTPUTS + tl.arange(0, OUTPUTS)
        places = row.to(tl.int64)[None, :] * columns + output[:, None]
        known = (row < rows)[None, :] & (output < outputs // 2)[:, None]
        tl.store(out + places, activated(gate, up, out), mask=known)
    else:
        places = (index * rows + row).to(tl.int64)[None, :] * columns + output[:, None]
        tl.store(out + places, total, mask=(row < rows)[None, :] & (output < outputs)[:, None])


@dataclass(frozen=True)
class Tile:
    """The work of one program: outputs x rows, inputs at a time; its warps, and how many loads are under way."""

    outputs: int
    rows: int
    inputs: int
    warps: int
    stages: int


def tile_for(rows: int, packed: Packed, order: Cut) -> Tile:
    """What is fast for so many rows. Any choice gives the same bits."""
    if packed.kind == "f32":
        return Tile(64, 16 if rows <= 16 else 64, 32, 4, 2)
    if rows > SPLIT_ROWS:
        return Tile(128, 256, 64, 8, 3)
    wide = 16 if rows <= 16 else 32 if rows <= 32 else 64
    if packed.factors is not None:
        short = order.length < 1024
        if rows <= 8 or (rows <= 16 and short):
            return Tile(32, 8 if rows <= 8 else 16, 256, 2, 3)
        if rows <= 16 and packed.kind == "q4":  # others would need too many registers
            return Tile(32, 16, 256, 1, 3)
        return Tile(64, wide, 128, 4, 3) if rows <= 16 or short else Tile(128, wide, 128, 8, 3)
    if rows <= 8 and order.length < 1024:
        return Tile(16, 8, 64, 1, 4 if order.length < 512 else 8)
    if rows <= 8 and order.count == 1:
        return Tile(32, 8, 128, 2, 4)
    return Tile(64, wide, 128 if order.length % 128 == 0 else 64, 4, 3 if wide == 64 else 4)


def operand_dtype(weight: Linear) -> torch.dtype:
    """What a layer's input is rounded to."""
    kinds = {part.dtype for part in weight.parts}
    return kinds.pop() if len(kinds) == 1 else torch.float16 if torch.float16 in kinds else torch.float32


def sums(x: Tensor, weight: Linear, tile: Tile | None = None) -> Tensor:
    """The segments' sums of a layer, still to be added in order: float32 [segments or 1, rows, outputs]."""
    order, rows = cut(weight), len(x)
    out = torch.empty(
        (1 if rows > SPLIT_ROWS else order.count, rows, weight.outputs), dtype=torch.float32, device=x.device
    )
    column = 0
    for part in weight.parts:
        bias = None if weight.bias is None else weight.bias[column : column + part.outputs]
        _launch(x, part, bias, order, out[:, :, column:], weight.outputs, False, tile)
        column += part.outputs
    return out


def can_gate(weight: Linear) -> bool:
    """Whether one program has a gate's whole sum beside its up's."""
    return len(weight.parts) == 1 and cut(weight).count == 1 and weight.outputs % (2 * STRIPE) == 0


def gated(x: Tensor, weight: Linear, dtype: torch.dtype, tile: Tile | None = None) -> Tensor:
    """silu(left half) * right half of the layer's outputs: [rows, outputs / 2]."""
    out = torch.empty((len(x), weight.outputs // 2), dtype=dtype, device=x.device)
    _launch(x, weight.parts[0], weight.bias, cut(weight), out, weight.outputs // 2, True, tile)
    return out


def _launch(
    x: Tensor, part: Packed, bias: Tensor | None, order: Cut, out: Tensor, columns: int, gate: bool, tile: Tile | None
) -> None:
    rows, whole = len(x), len(x) > SPLIT_ROWS
    if whole and part.factors is not None:  # widened once, instead of by every tile of rows
        part = all_rows(part)
    x = _rounded(x, part.dtype)
    tile = tile or tile_for(rows, part, order)
    grid = (triton.cdiv(rows, tile.rows), triton.cdiv(part.outputs, tile.outputs), 1 if whole else order.count)
    shared = {
        "HAS_BIAS": bias is not None,
        "GATED": gate,
        "BO": tile.outputs,
        "BN": tile.rows,
        "BK": tile.inputs,
        "num_warps": tile.warps,
        "num_stages": tile.stages,
        **options(x.device),
    }
    bias = x if bias is None else bias
    even = part.inputs % tile.inputs == 0 and (order.length % tile.inputs == 0 or order.count == 1)
    if part.factors is not None:
        codes_kernel[grid](
            *(x, *words_of(part), bias, out, rows, part.inputs, part.padded, part.outputs, columns, order.length),
            KIND=part.kind,
            EVEN=even,
            NATIVE=x.is_cuda,
            WARPS=tile.warps,
            **shared,
        )
    else:
        values_kernel[grid](
            *(x, part.low, bias, out, rows, part.inputs, part.outputs, columns, order.length, order.count),
            WHOLE=whole,
            EVEN=even,
            **shared,
        )


def _rounded(x: Tensor, dtype: torch.dtype) -> Tensor:
    if dtype is torch.float16 and x.dtype is not dtype:
        x = x.clamp(-LARGEST, LARGEST)
    return x.to(dtype)
