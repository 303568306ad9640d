# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, import-not-found, import-untyped"
"""Linear layers over packed codes, for few rows: every program has one segment of some stripes (cuda_pack).

A program reads the codes of its next inputs while it multiplies with the last ones, and the first ones while the kernel
before it still runs. Codes go from memory to the registers of the matrix instruction and pass through nothing between;
only x goes through shared memory, some steps ahead (num_stages).
"""

from __future__ import annotations

import triton
import triton.language as tl

from foredraft.backends.cuda_launch import activated, begin
from foredraft.backends.cuda_widen import four_by_four, tile_of, widen


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
