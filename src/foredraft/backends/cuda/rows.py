# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, import-not-found, import-untyped"
"""What happens to single rows on a GPU: embedding, norms, residual, rope and KV store, taps, gated activation.

Each row, or each part of it, has its own program, of the same shape however many rows there are, so its sums are always
added in the same order. Those that follow a linear layer add up its segments' sums as they read them.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from foredraft.backends.base import HeadNorms
from foredraft.backends.cuda.launch import activated, begin, options, stored_as_bfloat16
from foredraft.backends.cuda.widen import write_rows
from foredraft.backends.layers import AttentionShape, LayerKV, Linear

_HEADS = 8  # that one program of rope and store has


@triton.jit
def added_up(sums, places, mask, stride, PARTS: tl.constexpr):
    """The segments' sums at `places`, added in order."""
    total = tl.load(sums + places, mask=mask, other=0.0) + 0.0
    for part in tl.static_range(1, PARTS):
        total += tl.load(sums + part * stride + places, mask=mask, other=0.0)
    return total


@triton.jit(do_not_specialize=["rows"])
def _add_norm_kernel(
    x,  # [rows, WIDTH] float32, changed where there are sums
    sums,  # [PARTS, rows, WIDTH]
    weight,
    normed,
    rows,
    multiplier,
    eps,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    PARTS: tl.constexpr,
    SCALED: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0)
    column = tl.arange(0, BLOCK)
    inside = column < WIDTH
    scale = tl.load(weight + column, mask=inside, other=0.0)
    begin(PDL)
    places = row.to(tl.int64) * WIDTH + column
    y = tl.load(x + places, mask=inside, other=0.0)
    if PARTS:
        update = added_up(sums, places, inside, rows.to(tl.int64) * WIDTH, PARTS)
        y += update * multiplier if SCALED else update
        tl.store(x + places, y, mask=inside)
    mean = tl.sum(y * y) / WIDTH
    result = y * tl.rsqrt(mean + eps) * scale
    tl.store(normed + places, stored_as_bfloat16(result, normed), mask=inside)


@triton.jit(do_not_specialize=["size"])
def _collect_kernel(sums, out, size, BLOCK: tl.constexpr, PARTS: tl.constexpr, PDL: tl.constexpr):
    begin(PDL)
    places = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = places < size
    tl.store(out + places, added_up(sums, places, inside, size.to(tl.int64), PARTS), mask=inside)


@triton.jit(do_not_specialize=["rows"])
def _gated_kernel(
    sums, out, rows, WIDTH, ACTIVATION: tl.constexpr, BLOCK: tl.constexpr, PARTS: tl.constexpr, PDL: tl.constexpr
):
    begin(PDL)
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < WIDTH
    stride = rows.to(tl.int64) * 2 * WIDTH
    gate = added_up(sums, row * 2 * WIDTH + column, inside, stride, PARTS)
    up = added_up(sums, row * 2 * WIDTH + WIDTH + column, inside, stride, PARTS)
    tl.store(out + row * WIDTH + column, activated(gate, up, out, ACTIVATION), mask=inside)


@triton.jit(do_not_specialize=["rows"])
def _rope_kernel(
    sums,  # [PARTS, rows, (HEADS + 2 * KV_HEADS) * HEAD_DIM]
    q_norm,
    k_norm,
    rope,  # [positions, 2, HALF]
    positions,
    slots,
    q,
    k_cache,
    v_cache,
    rows,
    eps,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HALF: tl.constexpr,
    HAS_Q_NORM: tl.constexpr,
    HAS_K_NORM: tl.constexpr,
    BLOCK: tl.constexpr,
    SOME_HEADS: tl.constexpr,
    PARTS: tl.constexpr,
    PDL: tl.constexpr,
):
    """SOME_HEADS of a row's q, k and v heads. Element d of a head turns with its partner HALF further on."""
    row = tl.program_id(0)
    head = tl.program_id(1) * SOME_HEADS + tl.arange(0, SOME_HEADS)[:, None]
    d = tl.arange(0, BLOCK)[None, :]
    position = tl.load(positions + row)
    slot = tl.load(slots + row)
    left, turns = d < HALF, d < 2 * HALF
    partner = tl.where(left, d + HALF, tl.where(turns, d - HALF, d))
    angle = position * 2 * HALF + tl.where(left, d, d - HALF)
    cos = tl.load(rope + angle, mask=turns, other=1.0)
    sin = tl.load(rope + angle + HALF, mask=turns, other=0.0)
    begin(PDL)
    ALL: tl.constexpr = HEADS + 2 * KV_HEADS
    is_q, is_k, is_v = head < HEADS, (head >= HEADS) & (head < HEADS + KV_HEADS), head >= HEADS + KV_HEADS
    inside = (d < HEAD_DIM) & (head < ALL)
    base = row.to(tl.int64) * ALL * HEAD_DIM + head * HEAD_DIM
    stride = rows.to(tl.int64) * ALL * HEAD_DIM
    own = added_up(sums, base + d, inside, stride, PARTS)
    other = added_up(sums, base + partner, inside, stride, PARTS)
    if HAS_Q_NORM or HAS_K_NORM:
        factor = tl.rsqrt(tl.sum(own * own, 1) / HEAD_DIM + eps)[:, None]
        if HAS_Q_NORM:
            own = tl.where(is_q, own * factor * tl.load(q_norm + d, mask=d < HEAD_DIM, other=0.0), own)
            other = tl.where(is_q, other * factor * tl.load(q_norm + partner, mask=d < HEAD_DIM, other=0.0), other)
        if HAS_K_NORM:
            own = tl.where(is_k, own * factor * tl.load(k_norm + d, mask=d < HEAD_DIM, other=0.0), own)
            other = tl.where(is_k, other * factor * tl.load(k_norm + partner, mask=d < HEAD_DIM, other=0.0), other)
    turned = tl.where(turns, own * cos + tl.where(left, -other, other) * sin, own)
    q_places = row.to(tl.int64) * HEADS * HEAD_DIM + head * HEAD_DIM + d
    tl.store(q + q_places, turned.to(q.dtype.element_ty), mask=inside & is_q)
    stored = inside & (slot >= 0)  # rows that fill a bucket up have no slot
    place = slot.to(tl.int64) * KV_HEADS * HEAD_DIM + d
    k_places = place + (head - HEADS) * HEAD_DIM
    tl.store(k_cache + k_places, turned.to(k_cache.dtype.element_ty), mask=stored & is_k)
    v_places = place + (head - HEADS - KV_HEADS) * HEAD_DIM
    tl.store(v_cache + v_places, own.to(v_cache.dtype.element_ty), mask=stored & is_v)


@triton.jit
def _dots_kernel(
    vectors, lanes, x, out, COUNT, WIDTH, SOME: tl.constexpr, BLOCK: tl.constexpr, STEP: tl.constexpr, PDL: tl.constexpr
):
    """SOME of the vectors of a row's lane, STEP of their elements after the other."""
    begin(PDL)
    row = tl.program_id(0).to(tl.int64)
    vector = tl.program_id(1) * SOME + tl.arange(0, SOME)
    base = (tl.load(lanes + row) * COUNT + vector)[:, None] * WIDTH
    sums = tl.zeros((SOME, STEP), tl.float32)
    for start in range(0, BLOCK, STEP):
        place = start + tl.arange(0, STEP)
        own = tl.load(x + row * WIDTH + place, mask=place < WIDTH, other=0.0)
        inside = (vector < COUNT)[:, None] & (place < WIDTH)[None, :]
        sums += tl.load(vectors + base + place[None, :], mask=inside, other=0.0) * own[None, :]
    tl.store(out + row * COUNT + vector, tl.sum(sums, 1), mask=vector < COUNT)


@triton.jit
def _store_kernel(x, cache, slots, stride, column, WIDTH: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    row = tl.program_id(0)
    slot = tl.load(slots + row)
    begin(PDL)
    place = tl.arange(0, BLOCK)
    inside = place < WIDTH
    values = tl.load(x + row.to(tl.int64) * WIDTH + place, mask=inside, other=0.0)
    target = cache + slot.to(tl.int64) * stride + column + place
    tl.store(target, values.to(cache.dtype.element_ty), mask=inside & (slot >= 0))


def add_norm(
    x: Tensor, sums: Tensor | None, multiplier: float, weight: Tensor, eps: float, dtype: torch.dtype
) -> Tensor:
    """x += multiplier * (the segments' sums, added up), in place; returns its RMS norm in `dtype`."""
    rows, width = x.shape
    normed = torch.empty_like(x, dtype=dtype)
    block = triton.next_power_of_2(width)
    _add_norm_kernel[(rows,)](
        *(x, x if sums is None else sums, weight, normed, rows, multiplier, eps),
        WIDTH=width,
        BLOCK=block,
        PARTS=0 if sums is None else len(sums),
        SCALED=multiplier != 1,
        num_warps=min(8, max(1, block // 256)),
        **options(x.device),
    )
    return normed


def store(x: Tensor, cache: Tensor, column: int, slots: Tensor) -> None:
    """See Backend.store."""
    rows, width = x.shape
    block = triton.next_power_of_2(width)
    _store_kernel[(rows,)](
        *(x, cache, slots, cache.stride(0), column),
        WIDTH=width,
        BLOCK=block,
        num_warps=min(8, max(1, block // 256)),
        **options(x.device),
    )


def collect(sums: Tensor) -> Tensor:
    """The segments' sums added up: [rows, outputs]."""
    out = torch.empty(sums.shape[1:], dtype=sums.dtype, device=sums.device)
    size = out.numel()
    _collect_kernel[(triton.cdiv(size, 1024),)](
        sums, out, size, BLOCK=1024, PARTS=len(sums), num_warps=4, **options(sums.device)
    )
    return out


def gated(sums: Tensor, dtype: torch.dtype, activation: str = "silu") -> Tensor:
    """activation(left half) * right half: [segments, rows, 2 * width] -> [rows, width]."""
    _, rows, both = sums.shape
    out = torch.empty((rows, both // 2), dtype=dtype, device=sums.device)
    _gated_kernel[(rows, triton.cdiv(both // 2, 1024))](
        *(sums, out, rows, both // 2),
        ACTIVATION=activation,
        BLOCK=1024,
        PARTS=len(sums),
        num_warps=4,
        **options(sums.device),
    )
    return out


def dots(vectors: Tensor, lanes: Tensor, x: Tensor) -> Tensor:
    """See Backend.dots."""
    _, count, width = vectors.shape
    out = torch.empty((len(x), count), dtype=torch.float32, device=x.device)
    step = min(128, triton.next_power_of_2(width))
    _dots_kernel[(len(x), triton.cdiv(count, 16))](
        *(vectors, lanes, x, out, count, width),
        SOME=16,
        BLOCK=triton.cdiv(width, step) * step,
        STEP=step,
        num_warps=4,
        **options(x.device),
    )
    return out


def rope_and_store(
    sums: Tensor, norms: HeadNorms, rope: Tensor, kv: LayerKV, shape: AttentionShape, positions: Tensor, slots: Tensor
) -> Tensor:
    """See Backend.rope_and_store; `sums` are the segments' sums of qkv. Returns q in the cache's dtype. A row whose
    slot is -1 is stored nowhere."""
    (_, rows, _), (q_norm, k_norm) = sums.shape, norms
    q = torch.empty((rows, shape.num_heads * shape.head_dim), dtype=kv.k.dtype, device=sums.device)
    heads = shape.num_heads + 2 * shape.num_kv_heads
    _rope_kernel[(rows, triton.cdiv(heads, _HEADS))](
        *(sums, sums if q_norm is None else q_norm, sums if k_norm is None else k_norm, rope, positions, slots),
        *(q, kv.k, kv.v, rows, shape.norm_eps),
        HEADS=shape.num_heads,
        KV_HEADS=shape.num_kv_heads,
        HEAD_DIM=shape.head_dim,
        HALF=shape.rotary_dim // 2,
        HAS_Q_NORM=q_norm is not None,
        HAS_K_NORM=k_norm is not None,
        BLOCK=triton.next_power_of_2(shape.head_dim),
        SOME_HEADS=_HEADS,
        PARTS=len(sums),
        num_warps=4,
        **options(sums.device),
    )
    return q


def embed(token_ids: Tensor, weight: Linear) -> Tensor:
    """The weight's rows `token_ids`: float32 [rows, inputs]. A token that is none leaves its row unwritten."""
    out = torch.empty((len(token_ids), weight.inputs), dtype=torch.float32, device=token_ids.device)
    first = 0
    for part in weight.parts:
        write_rows(part, token_ids, first, out)
        first += part.outputs
    return out
