# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, import-not-found, import-untyped"
"""The floors of sampling/pipeline.py on a GPU, for all rows at once: the lowest logit of each that may be drawn.

A floor is found by bisection between logits: it is the highest one that enough tokens (top-k) or enough of the mass
(top-p) reach. In long rows two kernels go before this search, so that few logits are left for it: the first takes the
highest logit of every part of a row, and its mass; from these follows a cut below which no floor can lie, and the
second gathers what is above. Masses that are compared are sums of integers, so that the order of programs changes
nothing.

It is the reference's floor except where the mass comes so close to top_p that the rounding of the device's exponential
(some 1e-7 of the mass) decides.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_LONG = 32768  # shorter rows, such as those of heads, are searched as they are: two kernels more take as long
_PARTS = 4  # that one program looks at
_PART = 1024  # logits
_NEAR = 16384  # logits above the cut that are kept of a row; where there are more, the whole row is searched
_SCAN_NEAR, _SCAN_ROW = 1024, 8192  # logits that a search looks at together
_LOWEST = tl.constexpr(float("-inf"))
_LOWEST_FINITE = tl.constexpr(torch.finfo(torch.float32).min)
_WHOLE = tl.constexpr(2.0**44)  # the mass of the highest logit; 2 ** 18 such masses fit into 63 bits


@triton.jit
def _looks(temperature, top_k, top_p, min_p_log, NEEDED: tl.constexpr):
    """Whether anything of a row is to be known."""
    return NEEDED | ((temperature != 0) & ((top_k > 0) | (top_p < 1) | (min_p_log > _LOWEST)))


@triton.jit
def _parts_kernel(
    logits, stride, temperatures, top_ks, top_ps, min_p_logs, each, highests, sums, counts, masses, vocab, parts,
    NEEDED: tl.constexpr, PARTS: tl.constexpr, PART: tl.constexpr,
):  # fmt: skip
    """Some parts of a row: their highest logits, infinity where there is a NaN, and for top-p the sums of exponentials
    relative to these. And what the next kernel counts starts at 0."""
    row, chunk = tl.program_id(0), tl.program_id(1)
    limits = row // each
    temperature, top_k = tl.load(temperatures + limits), tl.load(top_ks + limits)
    top_p = tl.load(top_ps + limits)
    if _looks(temperature, top_k, top_p, tl.load(min_p_logs + limits), NEEDED):
        part = chunk * PARTS + tl.arange(0, PARTS)
        token = part[:, None] * PART + tl.arange(0, PART)[None, :]
        values = tl.load(logits + row.to(tl.int64) * stride + token, mask=token < vocab, other=_LOWEST)
        values = tl.where(values == values, values, float("inf"))
        highest = tl.max(values, 1)
        place = row * parts + part
        tl.store(highests + place, highest, mask=part < parts)
        if (temperature != 0) & (top_p < 1):
            highest = tl.where(tl.abs(highest) < float("inf"), highest, 0.0)
            sum_of_part = tl.sum(tl.exp((values - highest[:, None]) / temperature.to(tl.float32)), 1)
            tl.store(sums + place, sum_of_part, mask=part < parts)
        if chunk == 0:
            tl.store(counts + row, 0)
            tl.store(masses + row, 0)


@triton.jit
def _mass(values, highest, temperature):
    return (tl.exp((values - highest) / temperature) * _WHOLE).to(tl.int64)


@triton.jit
def _gather_kernel(
    logits, stride, temperatures, top_ks, top_ps, min_p_logs, each,
    highests, sums, cuts, near, counts, masses, vocab, parts,
    CHUNK: tl.constexpr, PARTS: tl.constexpr, NEAR: tl.constexpr,
):  # fmt: skip
    """One chunk of a row that has top-k or top-p: its logits above the row's cut, their count, and the chunk's mass."""
    row, chunk = tl.program_id(0), tl.program_id(1)
    limits = row // each
    temperature = tl.load(temperatures + limits)
    top_k, top_p = tl.load(top_ks + limits), tl.load(top_ps + limits)
    has_top_k = (top_k > 0) & (top_k < vocab)
    if (temperature != 0) & (has_top_k | (top_p < 1)):
        part = tl.arange(0, PARTS)
        of_parts = tl.load(highests + row * parts + part, mask=part < parts, other=_LOWEST)
        highest = tl.max(of_parts, 0)
        narrow = temperature.to(tl.float32)
        if tl.abs(highest) < float("inf"):
            cut = tl.full((), _LOWEST_FINITE, tl.float32)
            if not has_top_k:
                # All that lies below has less than the share 1 - top_p of the mass, by more than rounding could change.
                sum_of_part = tl.load(sums + row * parts + part, mask=part < parts, other=0.0)
                total = tl.sum(sum_of_part * tl.exp((of_parts - highest) / narrow), 0)
                depth = tl.log(vocab / ((1 - top_p).to(tl.float32) * total)) + 0.1
                cut = tl.maximum(highest - depth * narrow, cut)
            elif top_k <= parts:
                # So many parts reach it.
                best = tl.sort(of_parts, descending=True)
                cut = tl.maximum(tl.max(tl.where(part == top_k - 1, best, _LOWEST), 0), cut)
            token = chunk * CHUNK + tl.arange(0, CHUNK)
            values = tl.load(logits + row.to(tl.int64) * stride + token, mask=token < vocab, other=_LOWEST)
            above = (values >= cut).to(tl.int32)
            at = tl.atomic_add(counts + row, tl.sum(above, 0), sem="relaxed") + tl.cumsum(above, 0) - 1
            tl.store(near + row.to(tl.int64) * NEAR + at, values, mask=(above > 0) & (at < NEAR))
            if not has_top_k:
                tl.atomic_add(masses + row, tl.sum(_mass(values, highest, narrow), 0), sem="relaxed")
            if chunk == 0:
                tl.store(cuts + row, cut)


@triton.jit
def _reaching(values_in, length, least, highest, temperature, MASS: tl.constexpr, SCAN: tl.constexpr):
    """How many values are at least `least`, or what mass they have; the lowest of them, and the highest of the rest."""
    total = tl.zeros((SCAN,), tl.int64)
    lowest = tl.full((SCAN,), float("inf"), tl.float32)
    rest = tl.full((SCAN,), _LOWEST, tl.float32)
    for start in range(0, length, SCAN):
        place = start + tl.arange(0, SCAN)
        values = tl.load(values_in + place, mask=place < length, other=_LOWEST)
        reached = values >= least
        if MASS:
            total += tl.where(reached, _mass(values, highest, temperature), 0)
        else:
            total += reached.to(tl.int64)
        lowest = tl.minimum(lowest, tl.where(reached, values, float("inf")))
        rest = tl.maximum(rest, tl.where(reached, _LOWEST, values))
    return tl.sum(total, 0), tl.min(lowest, 0), tl.max(rest, 0)


@triton.jit
def _highest_reached(values, length, low, highest, temperature, needed, MASS: tl.constexpr, SCAN: tl.constexpr):
    """The highest value that, with all above it, has the needed count or mass; `low`, if none above it has."""
    high = highest
    while low < high:
        middle = low * 0.5 + high * 0.5
        middle = tl.where(middle > low, middle, high)
        reached, lowest, rest = _reaching(values, length, middle, highest, temperature, MASS, SCAN)
        enough = reached.to(tl.float64) >= needed
        low = tl.where(enough, lowest, low)
        high = tl.where(enough, high, tl.maximum(rest, low))
    return high


@triton.jit
def _searched(values, length, cut, mass, highest, temperature, top_k, top_p, ALL: tl.constexpr, SCAN: tl.constexpr):
    """The floor of a row by top-k (0: none) and top-p, among its logits above the cut, where the row has this mass. Or
    among ALL of the row, whose mass is not known."""
    kept = tl.full((), _LOWEST_FINITE, tl.float32)
    if top_k > 0:
        kept = _highest_reached(values, length, cut, highest, temperature, top_k.to(tl.float64), False, SCAN)
    if top_p < 1:
        if ALL | (top_k > 0):
            mass, _, _ = _reaching(values, length, kept, highest, temperature, True, SCAN)
        bottom = tl.maximum(tl.maximum(kept, cut), highest - 110 * temperature)  # what is lower has no mass
        kept = _highest_reached(values, length, bottom, highest, temperature, top_p * mass, True, SCAN)
    return kept


@triton.jit
def _range(row_logits, vocab, SCAN: tl.constexpr):
    """The highest logit, infinity if there is a NaN; the lowest that is not -inf."""
    highest = tl.full((SCAN,), _LOWEST, tl.float32)
    lowest = tl.full((SCAN,), float("inf"), tl.float32)
    for start in range(0, vocab, SCAN):
        token = start + tl.arange(0, SCAN)
        values = tl.load(row_logits + token, mask=token < vocab, other=_LOWEST)
        highest = tl.maximum(highest, tl.where(values == values, values, float("inf")))
        lowest = tl.minimum(lowest, tl.where(values > _LOWEST, values, float("inf")))
    return tl.max(highest, 0), tl.min(lowest, 0)


@triton.jit
def _floors_kernel(
    logits, stride, temperatures, top_ks, top_ps, min_p_logs, each,
    highests, cuts, near, counts, masses, floors, finite, vocab, parts,
    NEEDED: tl.constexpr, GATHERED: tl.constexpr, PARTS: tl.constexpr, NEAR: tl.constexpr,
    SCAN_NEAR: tl.constexpr, SCAN_ROW: tl.constexpr,
):  # fmt: skip
    """One row: the highest of its floors, and whether its largest logit is a finite number."""
    row = tl.program_id(0)
    limits = row // each
    temperature, top_k = tl.load(temperatures + limits), tl.load(top_ks + limits).to(tl.int32)
    top_p, min_p_log = tl.load(top_ps + limits), tl.load(min_p_logs + limits)
    row_logits = logits + row.to(tl.int64) * stride
    floor = tl.full((), _LOWEST, tl.float32)
    is_finite = False
    if _looks(temperature, top_k, top_p, min_p_log, NEEDED):
        if GATHERED:
            part = tl.arange(0, PARTS)
            highest = tl.max(tl.load(highests + row * parts + part, mask=part < parts, other=_LOWEST), 0)
        else:
            highest, lowest = _range(row_logits, vocab, SCAN_ROW)
        floor = highest
        is_finite = tl.abs(highest) < float("inf")
        if is_finite & (temperature != 0):
            # A logit of -inf cannot be drawn.
            floor = tl.maximum((highest + temperature * min_p_log).to(tl.float32), _LOWEST_FINITE)
            top_k = tl.where(top_k < vocab, top_k, 0)
            narrow = temperature.to(tl.float32)
            if (top_k > 0) | (top_p < 1):
                count, mass = tl.full((), NEAR + 1, tl.int32), tl.zeros((), tl.int64)
                if GATHERED:
                    lowest, count, mass = tl.load(cuts + row), tl.load(counts + row), tl.load(masses + row)
                if count <= NEAR:
                    values = near + row.to(tl.int64) * NEAR
                    kept = _searched(values, count, lowest, mass, highest, narrow, top_k, top_p, False, SCAN_NEAR)
                else:
                    kept = _searched(row_logits, vocab, lowest, mass, highest, narrow, top_k, top_p, True, SCAN_ROW)
                floor = tl.maximum(floor, kept)
    tl.store(floors + row, floor)
    tl.store(finite + row, is_finite)


def floors(
    logits: Tensor, temperatures: Tensor, top_ks: Tensor, top_ps: Tensor, min_p_logs: Tensor, needed: bool = True
) -> tuple[Tensor, Tensor]:
    """For every row the lowest logit that may be drawn (float32), and whether its largest logit is finite (bool). Top-k
    is an integer (0: all); temperatures, top-p and the logarithms of min-p (-inf: none) are float64, of as many rows
    each. Where floors are not `needed`, rows without noise or without such limits are not looked at: they have the
    floor -inf, and count as not finite."""
    (rows, vocab), device = logits.shape, logits.device
    parts, chunk = triton.cdiv(vocab, _PART), _PARTS * _PART
    highests, sums = torch.empty((2, rows, parts), dtype=torch.float32, device=device)
    near = torch.empty((rows, _NEAR), dtype=torch.float32, device=device)
    counts = torch.empty(rows, dtype=torch.int32, device=device)
    masses = torch.empty(rows, dtype=torch.int64, device=device)
    cuts, found = torch.empty((2, rows), dtype=torch.float32, device=device)
    finite = torch.empty(rows, dtype=torch.bool, device=device)
    given = logits, logits.stride(0), temperatures, top_ks, top_ps, min_p_logs, rows // len(top_ks)
    grid, of_row = (rows, triton.cdiv(vocab, chunk)), triton.next_power_of_2(parts)
    is_long = vocab > _LONG
    if is_long:
        _parts_kernel[grid](
            *(*given, highests, sums, counts, masses, vocab, parts),
            NEEDED=needed,
            PARTS=_PARTS,
            PART=_PART,
            num_warps=8,
            enable_fp_fusion=False,
        )
        _gather_kernel[grid](
            *(*given, highests, sums, cuts, near, counts, masses, vocab, parts),
            CHUNK=chunk,
            PARTS=of_row,
            NEAR=_NEAR,
            num_warps=8,
            enable_fp_fusion=False,
        )
    _floors_kernel[(rows,)](
        *(*given, highests, cuts, near, counts, masses, found, finite, vocab, parts),
        NEEDED=needed,
        GATHERED=is_long,
        PARTS=of_row,
        NEAR=_NEAR,
        SCAN_NEAR=_SCAN_NEAR,
        SCAN_ROW=_SCAN_ROW,
        num_warps=16,
        enable_fp_fusion=False,
    )
    return found, finite
