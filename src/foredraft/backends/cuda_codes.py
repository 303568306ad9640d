# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, import-not-found, import-untyped"
"""Linear layers over packed codes, for few rows: every program has one segment of some stripes (cuda_pack).

A program reads the codes of its next inputs while it multiplies with the last ones, and the first ones while the kernel
before it still runs. Codes go from memory to the registers of the matrix instruction and pass through nothing between.
"""

from __future__ import annotations

import triton
import triton.language as tl

from foredraft.backends.cuda_launch import activated, begin, prefetch
from foredraft.backends.cuda_widen import factor_place, tile_of, widen


@triton.jit
def _load(low_at, high_at, factors_at, unit, block, last, KIND: tl.constexpr, EVEN: tl.constexpr):
    """The words and factors of some blocks; those behind the last one are 0."""
    high = low_at
    if EVEN:
        low = tl.load(low_at + block * 128)
        if KIND != "q4":
            high = tl.load(high_at + block * 128)
        factors = tl.load(factors_at + block * 32)
    else:
        inside = block + unit < last
        low = tl.load(low_at + block * 128, mask=inside, other=0)
        if KIND != "q4":
            high = tl.load(high_at + block * 128, mask=inside, other=0)
        factors = tl.load(factors_at + block * 32, mask=inside, other=0)
    return low, low if KIND == "q4" else high, factors


@triton.jit
def _load_x(x_rows, known, k, block, inputs, EVEN: tl.constexpr):
    return tl.load(x_rows + block * 64, mask=known if EVEN else known & (block * 64 + k < inputs), other=0.0)


@triton.jit
def _multiply(
    total, low, high, factors, x,
    KIND: tl.constexpr, NATIVE: tl.constexpr, REPEATS: tl.constexpr, UNITS: tl.constexpr, WARPS: tl.constexpr,
):  # fmt: skip
    w = tile_of(widen(low, high.to(tl.int32), factors.to(tl.int32), KIND, NATIVE), REPEATS, UNITS, WARPS)
    if NATIVE:
        w = tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [w], dtype=tl.float16, is_pure=False, pack=2)
    return tl.dot(w, tl.trans(x), total)


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
    MANUAL: tl.constexpr,
    UNROLL: tl.constexpr,
    AHEAD: tl.constexpr,
    PDL: tl.constexpr,
):
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
    unit = place // (WARPS * 128) % UNITS
    stripe = tile * OWN + nth % OWN + nth // OWN * (outputs // 32)
    stripe = tl.minimum(stripe, (outputs + 15) // 16 - 1)
    at = stripe * blocks + unit
    low_at = low + at * 128 + place % 128
    high_at = high + at * 128 + place % 128
    factors_at = factors + at * 32 + factor_place(place % 128)

    row = row_tile * BN + tl.arange(0, BN)
    known = (row < rows)[:, None]
    k = tl.arange(0, BK)[None, :]
    x_rows = x + row.to(tl.int64)[:, None] * inputs + k

    total = tl.zeros((BO, BN), tl.float32)
    REPEATS: tl.constexpr = STRIPES // WARPS
    # What lies some steps ahead is fetched to the cache: lines of 128 bytes, 4 of codes and 1 of factors a block.
    line = tl.arange(0, STRIPES * UNITS * 8)
    nth, part = line // (UNITS * 8), line % (UNITS * 8)
    stripe = tl.minimum(tile * OWN + nth % OWN + nth // OWN * (outputs // 32), (outputs + 15) // 16 - 1)
    is_codes = part < UNITS * 4
    codes_line = (low + stripe * blocks * 128 + part % 4 * 32).to(tl.int64)
    far = tl.where(is_codes, codes_line, (factors + stripe * blocks * 32).to(tl.int64))
    nearest, stride = tl.where(is_codes, part // 4, part % UNITS), tl.where(is_codes, 512, 128)
    for ahead in tl.static_range(1, AHEAD + 1):
        prefetch(far + tl.minimum(first + ahead * UNITS + nearest, last - 1) * stride, NATIVE)
    if MANUAL:
        words, more, of_groups = _load(low_at, high_at, factors_at, unit, first, last, KIND, EVEN)
        begin(PDL)
        x_tile = _load_x(x_rows, known, k, first, inputs, EVEN)
        for block in tl.range(first + UNITS, last, UNITS, loop_unroll_factor=UNROLL):
            if AHEAD:
                prefetch(far + tl.minimum(block + AHEAD * UNITS + nearest, last - 1) * stride, NATIVE)
            next_words, next_more, next_groups = _load(low_at, high_at, factors_at, unit, block, last, KIND, EVEN)
            next_x = _load_x(x_rows, known, k, block, inputs, EVEN)
            total = _multiply(total, words, more, of_groups, x_tile, KIND, NATIVE, REPEATS, UNITS, WARPS)
            words, more, of_groups, x_tile = next_words, next_more, next_groups, next_x
        total = _multiply(total, words, more, of_groups, x_tile, KIND, NATIVE, REPEATS, UNITS, WARPS)
    else:
        begin(PDL)
        for block in range(first, last, UNITS):
            if AHEAD:
                prefetch(far + tl.minimum(block + (1 + AHEAD) * UNITS + nearest, last - 1) * stride, NATIVE)
            words, more, of_groups = _load(low_at, high_at, factors_at, unit, block, last, KIND, EVEN)
            x_tile = _load_x(x_rows, known, k, block, inputs, EVEN)
            total = _multiply(total, words, more, of_groups, x_tile, KIND, NATIVE, REPEATS, UNITS, WARPS)

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
