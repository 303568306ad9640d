# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, import-not-found, import-untyped"
"""The matrix products of a GPU: y = x W', for 1 row as for thousands, with the same bits for a row in any company.

The product is computed as W x': outputs are the rows of the matrix instruction and the activations' rows its columns,
so every number of rows runs the same instruction, only wider. Each output is a chain of these over one segment of the
inputs, from 0; the segments' sums are added in order (pack.Cut). With few rows every segment has a program of its
own, so that the whole device reads the weight, and whoever reads the sums adds them up; with many rows a program goes
through all segments. Packed codes are widened to float16 in registers, or for many rows once before.

A program over codes has one segment of some stripes (see pack). It reads the codes of its next inputs while it
multiplies with the last ones, and the first ones while the kernel before it still runs. Codes go from memory to the
registers of the matrix instruction and pass through nothing between; only x goes through shared memory, some steps
ahead (num_stages).

With experts a program has a task in place of a tile of rows: some rows that one expert has, wherever they are
(linear.Routes). The first product of an expert reads rows and writes choices, task by task; the second reads these and
writes to the rows, times the expert's share of each.
"""

from __future__ import annotations

import triton
import triton.language as tl

from foredraft.backends.cuda.launch import activated, begin, prefetch_rows
from foredraft.backends.cuda.widen import four_by_four, tile_of, widen

# How the rows of a program are found.
DENSE = tl.constexpr(0)  # one behind the other
TO_EXPERTS = tl.constexpr(1)  # those of a task; results lie in the order of choices
FROM_EXPERTS = tl.constexpr(2)  # what that has given, back to the rows


@triton.jit
def _rows_of(tile, rows, tasks, choices, shares, chosen, ROUTE: tl.constexpr, BN: tl.constexpr):
    """Of a program's rows [BN]: where each is read, where its result goes, whether it exists, and its share. And the
    expert, which is negative where there is nothing to do."""
    place = tl.arange(0, BN)
    expert = 0
    share = 1.0
    if ROUTE == DENSE:
        source = tile * BN + place
        target = source
        known = source < rows
    else:
        task = tasks + tile * 3
        expert = tl.load(task)
        place += tl.load(task + 1)
        known = place < tl.load(task + 2)
        choice = tl.load(choices + place, mask=known, other=0)
        if ROUTE == TO_EXPERTS:
            source = choice // chosen
            target = place
        else:
            source = place
            target = choice % chosen * rows + choice // chosen
            share = tl.load(shares + choice, mask=known, other=0.0)
    return source, target, known, share, expert


@triton.jit
def _distance(distances, expert, part: tl.constexpr):
    """How far an expert's weight lies from the first one's. Allocations begin at multiples of many bytes."""
    return tl.multiple_of(tl.load(distances + tl.maximum(expert, 0) * 3 + part), 16)


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
            x = tl.load(x_rows + at + k, mask=known, other=0.0).to(w.dtype)
        else:
            inside = at + k < stop
            w = tl.load(weight_rows + at + k, mask=inside, other=0.0)
            x = tl.load(x_rows + at + k, mask=known & inside, other=0.0).to(w.dtype)
        total = tl.dot(w, tl.trans(x), total, input_precision="ieee")
    if HAS_BIAS:
        total += tl.where(index == 0, tl.load(bias), 0.0)[:, None]
    return total


@triton.jit(do_not_specialize=["rows"])
def values_kernel(
    x,  # [rows, inputs], as the weight, or for one in float32 in fewer bits
    weight,  # [outputs, inputs]
    bias,
    out,  # [segments or 1, rows, columns] float32, or gated [rows, columns]
    tasks,
    choices,
    shares,
    distances,
    rows,
    inputs,
    outputs,
    columns,
    segment,
    segments,
    chosen,
    ROUTE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    GATED: tl.constexpr,
    ACTIVATION: tl.constexpr,
    WHOLE: tl.constexpr,
    EVEN: tl.constexpr,
    BO: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    PDL: tl.constexpr,
):
    """With routes, out is [1, choices, columns] or gated [choices, columns], and then [chosen, rows, columns]."""
    row_tile, tile, place = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    output, exists = _tile_outputs(tile, outputs, GATED, BO)
    if ROUTE == TO_EXPERTS:  # the kernel before this one has written the tasks
        begin(PDL)
    source, target, known, share, expert = _rows_of(row_tile, rows, tasks, choices, shares, chosen, ROUTE, BN)
    if ROUTE != DENSE:
        weight += _distance(distances, expert, 0)
        bias += expert * (outputs if GATED else columns)
    weight_rows = weight + output.to(tl.int64)[:, None] * inputs
    x_rows = x + source.to(tl.int64)[:, None] * inputs
    if ROUTE != TO_EXPERTS:
        prefetch_rows(weight_rows + place * segment, inputs - place * segment, PDL)
        begin(PDL)
    if ROUTE != DENSE and expert < 0:
        return

    if WHOLE:
        total = tl.zeros((BO, BN), tl.float32)
        for index in range(segments):
            total += _segment(
                x_rows, known[:, None], weight_rows, bias + output, index, segment, inputs, HAS_BIAS, BO, BN, BK, EVEN
            )
    else:
        total = _segment(
            x_rows, known[:, None], weight_rows, bias + output, place, segment, inputs, HAS_BIAS, BO, BN, BK, EVEN
        )

    if GATED:
        gate, up = tl.split(total.reshape(BO // 16, 2, 8, BN).permute(0, 2, 3, 1))
        active = activated(gate, up, out, ACTIVATION).reshape(BO // 2, BN)
        output = tile * (BO // 2) + tl.arange(0, BO // 2)
        places = target.to(tl.int64)[None, :] * columns + output[:, None]
        tl.store(out + places, active, mask=known[None, :] & (output < outputs // 2)[:, None])
    else:
        if ROUTE == FROM_EXPERTS:
            total *= share[None, :]
        places = (place * rows + target).to(tl.int64)[None, :] * columns + output[:, None]
        tl.store(out + places, total, mask=known[None, :] & exists[:, None])


@triton.jit
def _load(
    low_at, high_at, factors_at, unit, block, last, HAS_HIGH: tl.constexpr, UNITS: tl.constexpr, EVEN: tl.constexpr
):
    """The words and factors of some blocks. Behind the last block are zeros, or (EVEN) the last ones again."""
    if EVEN:
        block = tl.minimum(block, last - UNITS)
        low, factors = tl.load(low_at + block * 128), tl.load(factors_at + block * 32)
        high = tl.load(high_at + block * 128) if HAS_HIGH else low
    else:
        inside = block + unit < last
        low = tl.load(low_at + block * 128, mask=inside, other=0)
        factors = tl.load(factors_at + block * 32, mask=inside, other=0)
        high = tl.load(high_at + block * 128, mask=inside, other=0) if HAS_HIGH else low
    return low, high, factors


@triton.jit(do_not_specialize=["rows"])
def codes_kernel(
    x,  # [rows, inputs] float16
    low,
    high,
    factors,
    bias,
    out,  # [segments, rows, columns] float32, or gated [rows, columns]; with routes as that of values_kernel
    tasks,
    choices,
    shares,
    distances,
    rows,
    inputs,
    padded,
    outputs,
    columns,
    segment,
    chosen,
    KIND: tl.constexpr,
    HAS_HIGH: tl.constexpr,
    ROUTE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    GATED: tl.constexpr,
    ACTIVATION: tl.constexpr,
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
    if ROUTE == TO_EXPERTS:  # the kernel before this one has written the tasks
        begin(PDL)
    source, target, known, share, expert = _rows_of(row_tile, rows, tasks, choices, shares, chosen, ROUTE, BN)
    if ROUTE != DENSE:
        low += _distance(distances, expert, 0)
        high += _distance(distances, expert, 1)
        factors += _distance(distances, expert, 2)
        bias += expert * (outputs if GATED else columns)
    low_at = low + at * 128 + place % 128
    high_at = high + at * 128 + four_by_four(place % 128, 4)
    factors_at = factors + at * 32 + four_by_four(place % 128, 16)

    there = known[:, None]
    k = tl.arange(0, BK)[None, :]
    x_rows = x + source.to(tl.int64)[:, None] * inputs + k

    words, more, of_groups = _load(low_at, high_at, factors_at, unit, first, last, HAS_HIGH, UNITS, EVEN)
    if ROUTE != TO_EXPERTS:
        begin(PDL)
    if ROUTE != DENSE and expert < 0:
        return
    total = tl.zeros((BO, BN), tl.float32)
    for block in range(first, last, UNITS):
        following = _load(low_at, high_at, factors_at, unit, block + UNITS, last, HAS_HIGH, UNITS, EVEN)
        x_tile = tl.load(x_rows + block * 64, mask=there if EVEN else there & (block * 64 + k < inputs), other=0.0)
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
        places = target.to(tl.int64)[None, :] * columns + output[:, None]
        active = activated(gate, up, out, ACTIVATION)
        tl.store(out + places, active, mask=known[None, :] & (output < outputs // 2)[:, None])
    else:
        if ROUTE == FROM_EXPERTS:
            total *= share[None, :]
        places = (index * rows + target).to(tl.int64)[None, :] * columns + output[:, None]
        tl.store(out + places, total, mask=known[None, :] & (output < outputs)[:, None])
