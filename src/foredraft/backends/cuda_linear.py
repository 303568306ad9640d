# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, import-not-found, import-untyped"
"""Linear layers on a GPU: y = x W', for 1 row as for thousands, with the same bits for a row in any company.

The product is computed as W x': outputs are the rows of the matrix instruction and the activations' rows its columns,
so every number of rows runs the same instruction, only wider. Each output is a chain of these over one segment of the
inputs, from 0; the segments' sums are added in order (cuda_pack.Cut). With few rows every segment has a program of its
own, so that the whole device reads the weight, and whoever reads the sums adds them up; with many rows a program goes
through all segments. Weights of few bits are widened to bfloat16 in registers, or for many rows once before.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from foredraft.backends.base import Linear
from foredraft.backends.cuda_launch import begin, options, prefetch_rows
from foredraft.backends.cuda_pack import Cut, Packed, cut
from foredraft.backends.cuda_widen import SHRINK, all_rows, codes_of, halves, widen

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
def _sum_values(
    x_rows, known, low_rows, start, stop, BO: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, EVEN: tl.constexpr
):
    """One segment's sums [BO, BN] of a weight whose values are stored as they are."""
    total = tl.zeros((BO, BN), tl.float32)
    k = tl.arange(0, BK)[None, :]
    for at in range(start, stop, BK):
        if EVEN:
            w = tl.load(low_rows + at + k)
            x = tl.load(x_rows + at + k, mask=known, other=0.0)
        else:
            inside = at + k < stop
            w = tl.load(low_rows + at + k, mask=inside, other=0.0)
            x = tl.load(x_rows + at + k, mask=known & inside, other=0.0)
        total = tl.dot(w, tl.trans(x), total, input_precision="ieee")
    return total


@triton.jit
def _sum_codes(
    x_rows,
    known,
    low_rows,
    high_rows,
    factor_rows,
    block_factors,
    first,
    last,
    inputs,
    outputs,
    KIND: tl.constexpr,
    PLANES: tl.constexpr,
    BITS: tl.constexpr,
    HIGH_BITS: tl.constexpr,
    OFFSET: tl.constexpr,
    FACTORS: tl.constexpr,
    BO: tl.constexpr,
    BN: tl.constexpr,
    EVEN: tl.constexpr,
):
    """One segment's sums [BO, BN] of a weight of packed codes: its blocks first to last."""
    total = tl.zeros((BO, BN), tl.float32)
    k = tl.arange(0, 32)[None, :]
    for block in range(first, last):
        low = tl.load(low_rows + block * 32 + k).to(tl.int32)
        high = low
        if HIGH_BITS:
            high = tl.load(high_rows + block * 32 + k).to(tl.int32)
        factors = tl.load(factor_rows + block * FACTORS + tl.arange(0, FACTORS)[None, :])
        block_scale, block_minimum = factors, factors
        if KIND == "q4k" or KIND == "q5k" or KIND == "q6":
            block_scale, block_minimum = halves(tl.load(block_factors + block * outputs))
        for plane in tl.static_range(PLANES):
            at = (block * PLANES + plane) * 32
            x = tl.load(x_rows + at + k, mask=known if EVEN else known & (at + k < inputs), other=0.0)
            w = widen(
                low, high, factors, block_scale, block_minimum, plane, KIND, BITS, HIGH_BITS, OFFSET, FACTORS, BO
            )  # fmt: skip
            total = tl.dot(w, tl.trans(x), total)
    return total * 2.0**SHRINK


@triton.jit
def _segment(
    x_rows,
    known,
    low_rows,
    high_rows,
    factor_rows,
    block_factors,
    bias,
    index,
    segment,
    inputs,
    padded,
    outputs,
    KIND: tl.constexpr,
    PLANES: tl.constexpr,
    BITS: tl.constexpr,
    HIGH_BITS: tl.constexpr,
    OFFSET: tl.constexpr,
    FACTORS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BO: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    EVEN: tl.constexpr,
):
    """The sums [BO, BN] of the index-th segment. The first has the bias."""
    start, stop = index * segment, tl.minimum((index + 1) * segment, padded)
    if PLANES:
        BLOCK: tl.constexpr = PLANES * 32
        part = _sum_codes(
            x_rows, known, low_rows, high_rows, factor_rows, block_factors, start // BLOCK, stop // BLOCK,
            inputs, outputs, KIND, PLANES, BITS, HIGH_BITS, OFFSET, FACTORS, BO, BN, EVEN,
        )  # fmt: skip
    else:
        part = _sum_values(x_rows, known, low_rows, start, stop, BO, BN, BK, EVEN)
    if HAS_BIAS:
        part += tl.where(index == 0, tl.load(bias), 0.0)[:, None]
    return part


@triton.jit(do_not_specialize=["rows"])
def linear_kernel(
    x,  # [rows, inputs]
    low,
    high,
    factors,
    block_factors,
    bias,
    out,  # [segments or 1, rows, columns] float32, or gated [rows, columns]
    rows,
    inputs,
    padded,
    outputs,
    columns,
    segment,
    segments,
    KIND: tl.constexpr,
    PLANES: tl.constexpr,
    BITS: tl.constexpr,
    HIGH_BITS: tl.constexpr,
    OFFSET: tl.constexpr,
    FACTORS: tl.constexpr,
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
    PACK: tl.constexpr = PLANES if PLANES else 1
    low_rows = low + output.to(tl.int64)[:, None] * (padded // PACK)
    high_rows = high + output.to(tl.int64)[:, None] * (padded // PACK)
    factor_rows = factors + output.to(tl.int64)[:, None] * (padded // (PACK * 32) * FACTORS)
    x_rows = x + row.to(tl.int64)[:, None] * inputs
    prefetch_rows(low_rows + place * segment // PACK, (padded - place * segment) // PACK, PDL)
    begin(PDL)

    if WHOLE:
        total = tl.zeros((BO, BN), tl.float32)
        for index in range(segments):
            total += _segment(
                x_rows, known, low_rows, high_rows, factor_rows, block_factors + output, bias + output,
                index, segment, inputs, padded, outputs,
                KIND, PLANES, BITS, HIGH_BITS, OFFSET, FACTORS, HAS_BIAS, BO, BN, BK, EVEN,
            )  # fmt: skip
    else:
        total = _segment(
            x_rows, known, low_rows, high_rows, factor_rows, block_factors + output, bias + output,
            place, segment, inputs, padded, outputs,
            KIND, PLANES, BITS, HIGH_BITS, OFFSET, FACTORS, HAS_BIAS, BO, BN, BK, EVEN,
        )  # fmt: skip

    if GATED:
        gate, up = tl.split(total.reshape(BO // 16, 2, 8, BN).permute(0, 2, 3, 1))
        active = (gate / (1 + tl.exp(-gate)) * up).reshape(BO // 2, BN).to(out.dtype.element_ty)
        output = tile * (BO // 2) + tl.arange(0, BO // 2)
        places = row.to(tl.int64)[None, :] * columns + output[:, None]
        tl.store(out + places, active, mask=(row < rows)[None, :] & (output < outputs // 2)[:, None])
    else:
        places = (place * rows + row).to(tl.int64)[None, :] * columns + output[:, None]
        tl.store(out + places, total, mask=(row < rows)[None, :] & exists[:, None])


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
    if packed.form is not None:
        if packed.kind in ("q5", "q5k"):  # of these, smaller tiles would add up in another order
            return Tile(64, wide, 0, 4, 3)
        return Tile(32, 8, 0, 2, 4) if rows <= 8 else Tile(128, wide, 0, 8, 2 if wide == 64 else 3)
    if rows <= 8 and order.length < 1024:
        return Tile(16, 8, 64, 1, 4 if order.length < 512 else 8)
    if rows <= 8 and order.count == 1:
        return Tile(32, 8, 128, 2, 4)
    return Tile(64, wide, 128 if order.length % 128 == 0 else 64, 4, 3 if wide == 64 else 4)


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
    return len(weight.parts) == 1 and cut(weight).count == 1 and weight.outputs % 16 == 0


def gated(x: Tensor, weight: Linear, tile: Tile | None = None) -> Tensor:
    """silu(left half) * right half of the layer's outputs: [rows, outputs / 2], as x."""
    out = torch.empty((len(x), weight.outputs // 2), dtype=x.dtype, device=x.device)
    _launch(x, weight.parts[0], weight.bias, cut(weight), out, weight.outputs // 2, True, tile)
    return out


def _launch(
    x: Tensor, part: Packed, bias: Tensor | None, order: Cut, out: Tensor, columns: int, gate: bool, tile: Tile | None
) -> None:
    rows = len(x)
    if rows > SPLIT_ROWS and part.form is not None:  # widened once, instead of by every tile of rows
        part = Packed("bf16", part.outputs, part.inputs, part.inputs, all_rows(part))
    x = x.to(torch.float32 if part.kind == "f32" else torch.bfloat16)
    tile = tile or tile_for(rows, part, order)
    step = tile.inputs if part.form is None else part.form.block
    even = part.inputs % step == 0 and (part.form is not None or order.length % step == 0 or order.count == 1)
    tiles, row_tiles = triton.cdiv(part.outputs, tile.outputs), triton.cdiv(rows, tile.rows)
    linear_kernel[(row_tiles, tiles, 1 if rows > SPLIT_ROWS else order.count)](
        *(x, part.low, part.low if part.high is None else part.high),
        part.low if part.factors is None else part.factors,
        part.low if part.block_factors is None else part.block_factors,
        *(x if bias is None else bias, out, rows, part.inputs, part.padded, part.outputs, columns),
        *(order.length, order.count),
        HAS_BIAS=bias is not None,
        GATED=gate,
        WHOLE=rows > SPLIT_ROWS,
        EVEN=even,
        BO=tile.outputs,
        BN=tile.rows,
        BK=tile.inputs,
        num_warps=tile.warps,
        num_stages=tile.stages,
        **codes_of(part),
        **options(x.device),
    )
