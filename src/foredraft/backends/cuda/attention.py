# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, import-not-found, import-untyped"
"""Paged tree attention on a GPU: each row over the keys that it may see, in text order.

Keys are cut into blocks of KEY_BLOCK in text order. For every (row, block) there is a partial softmax: the largest
score, the sum of weights relative to it, and the weighted sum of values. The partial results are merged in order. Two
kernels do this, with the same operations and so the same bits: `split` has a program per block, for few rows, and
leaves the partial results to `merge`; `whole` goes through all blocks of many rows of one sequence, for prompts.

A program has the queries of all heads that share a KV head, of one row or of several rows of one sequence (a group). A
query's bits depend on that query alone: products add in the same order for any number of queries, and the weights are
summed by a product with ones. What a kernel may choose freely (warps, queries together) does not change them.

Where heads have sinks (layers.Layer), a query's partial results are merged into that of its head's sink: one key with
the sink as its score and nothing as its value.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from foredraft.backends.cuda.launch import begin, options, prefetch, stored_as_bfloat16
from foredraft.backends.layers import AttentionShape, LayerKV
from foredraft.batch import ForwardBatch

KEY_BLOCK = 128
_LOG2_E = tl.constexpr(1.4426950408889634)
_SPLIT_QUERIES, _WHOLE_QUERIES = 16, 128  # of a program
_ROWS_ALONE = 128  # so many rows of trees have a program each for every block of keys
_AT_ONCE = 8  # partial results that a merge loads together
_NOTHING = tl.constexpr(float("-inf"))


@dataclass(frozen=True)
class Groups:
    """Which rows of a batch attend together. A chain of drafted tokens is better told as a longer prefix. Rows that
    only fill a bucket up have a prefix and a path of length 0.

    `rows` are those that attend, in order of their sequences, and `bounds` cuts them into runs of one sequence: run i
    has rows[bounds[i] : bounds[i + 1]], at most `rows_together` of them. Runs that only fill up are empty.
    """

    rows: Tensor  # [n] int32
    bounds: Tensor  # [runs + 1] int32


@triton.jit
def _existing(key, end, low):
    """The keys that are loaded for `key` [KEY_BLOCK] by rows that see those from `low` to `end`. Instead of a key that
    they do not see, they load the lowest that they do; where they see none, their last one, because behind that lies
    memory of others."""
    low = tl.minimum(tl.maximum(end - 1, 0), low)
    return tl.where(key < end, tl.maximum(key, low), low)


@triton.jit
def _slots_of(key, row, prefix, sequence, paths, depth, block_tables, table_width, block_size):
    """Where the keys of a row lie: [KEY_BLOCK] int64. Beyond its prefix come those on its path."""
    beyond = key - prefix
    offset = tl.where(beyond < 0, key, tl.load(paths + row * depth + beyond, mask=beyond >= 0, other=0))
    block = tl.load(block_tables + sequence * table_width + offset // block_size)
    return block.to(tl.int64) * block_size + offset % block_size


@triton.jit
def _partial(
    q, k_cache, v_cache, slot, key, visible_from, visible_to, kv_head, scale,
    KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, D: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """The partial softmax of the queries q [M, D] over the keys at `slot` [BK], of which query m sees those from
    visible_from[m] to visible_to[m]: (largest score [M], sum of weights [M], weighted values [M, D])."""
    d = tl.arange(0, D)[None, :]
    places = slot[:, None] * (KV_HEADS * HEAD_DIM) + kv_head * HEAD_DIM + d
    if D == HEAD_DIM:
        k = tl.load(k_cache + places)
        v = tl.load(v_cache + places)
    else:
        k = tl.load(k_cache + places, mask=d < HEAD_DIM, other=0.0)
        v = tl.load(v_cache + places, mask=d < HEAD_DIM, other=0.0)
    scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale  # [M, BK]
    visible = (key[None, :] >= visible_from[:, None]) & (key[None, :] < visible_to[:, None])
    scores = tl.where(visible, scores, _NOTHING)
    highest = tl.max(scores, 1)
    weights = tl.exp2(scores - tl.where(highest == _NOTHING, 0.0, highest)[:, None]).to(v.dtype)
    ones = tl.full((BK, 16), 1.0, tl.float32).to(v.dtype)
    total = tl.max(tl.dot(weights, ones, input_precision="ieee"), 1)  # all columns of the product are the same
    mixed = tl.dot(weights, v, input_precision="ieee")
    return highest, total, mixed


@triton.jit
def _merge(highest, total, mixed, highest_b, total_b, mixed_b, ROWS: tl.constexpr):
    """Partial results and those of the next block; ROWS: of many rows at once. What has seen no key changes
    nothing."""
    new = tl.maximum(highest, highest_b)
    level = tl.where(new == _NOTHING, 0.0, new)
    old_share, new_share = tl.exp2(highest - level), tl.exp2(highest_b - level)
    total = total * old_share + total_b * new_share
    if ROWS:
        mixed = mixed * old_share[:, None] + mixed_b * new_share[:, None]
    else:
        mixed = mixed * old_share + mixed_b * new_share
    return new, total, mixed


@triton.jit
def _sink(sinks, head, mask, HAS_SINKS: tl.constexpr):
    """What partial results are merged into, for each head: the highest score and the sum of weights."""
    highest = tl.full(head.shape, _NOTHING, tl.float32)
    if HAS_SINKS:
        highest = tl.load(sinks + head, mask=mask, other=0.0) * _LOG2_E
    return highest, tl.full(head.shape, 1.0 if HAS_SINKS else 0.0, tl.float32)


@triton.jit
def _queries_of(
    rows, groups, prefix_lens, path_lens, kv_head,
    WINDOW: tl.constexpr, FIRST: tl.constexpr, GROUP: tl.constexpr, M: tl.constexpr,
):  # fmt: skip
    """What the queries of this program's group stand for. Of the group: its first place in `rows`, its number of rows.
    Of each query: which row of the group, whether it exists, its place in `rows`, row, head, prefix and path length,
    and the range of keys that it sees."""
    run = tl.program_id(0)
    first = tl.load(groups + run)
    count = tl.load(groups + run + 1) - first
    query = tl.arange(0, M)
    within = query // GROUP
    exists = within < count
    place = first + tl.where(exists, within, 0)
    row = tl.load(rows + place, mask=exists, other=0)
    head = kv_head * GROUP + query % GROUP
    prefix = tl.load(prefix_lens + row, mask=exists, other=0)
    path = tl.load(path_lens + row, mask=exists, other=0)
    visible_to = prefix + path
    visible_from = tl.maximum(visible_to - WINDOW, FIRST) if WINDOW else tl.zeros_like(visible_to) + FIRST
    return first, count, within, exists, place, row, head, prefix, path, visible_from, visible_to


@triton.jit
def _load_queries(q, row, head, exists, HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, D: tl.constexpr):
    """[M, D]"""
    d = tl.arange(0, D)[None, :]
    places = (row.to(tl.int64) * HEADS + head)[:, None] * HEAD_DIM + d
    return tl.load(q + places, mask=exists[:, None] & (d < HEAD_DIM), other=0.0)


# What differs from batch to batch is not compiled for: a request would wait for the compiler.
@triton.jit(do_not_specialize=["table_width", "depth", "blocks"], do_not_specialize_on_alignment=["total_out"])
def _split_kernel(
    q, k_cache, v_cache, highest_out, total_out, mixed_out,
    rows, groups, sequences, block_tables, prefix_lens, paths, path_lens, table_width, depth, block_size, blocks, scale,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, D: tl.constexpr, WINDOW: tl.constexpr,
    FIRST: tl.constexpr, BK: tl.constexpr, M: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One block of keys for one group of rows. Where all of its rows have the same keys there, these are loaded once;
    where drafted tokens on different paths begin, every row loads its own."""
    kv_head, block = tl.program_id(1), tl.program_id(2)
    GROUP: tl.constexpr = HEADS // KV_HEADS
    first, count, within, exists, place, row, head, prefix, path, visible_from, visible_to = _queries_of(
        rows, groups, prefix_lens, path_lens, kv_head, WINDOW, FIRST, GROUP, M
    )
    start = block * BK
    end = tl.max(visible_to, 0)
    low = tl.min(tl.where(exists, visible_from, end), 0)
    seen = (start < end) & (start + BK > low)
    shared = tl.min(tl.where(path > 0, prefix, end), 0) >= tl.minimum(start + BK, end)
    key = start + tl.arange(0, BK)
    common = tl.zeros((BK,), tl.int64)
    if seen & shared:
        some_row = tl.load(rows + first)
        sequence, existing = tl.load(sequences + some_row), _existing(key, end, low)
        common = _slots_of(existing, some_row, end, sequence, paths, depth, block_tables, table_width, block_size)
        LINE: tl.constexpr = 1024 // k_cache.dtype.element_ty.primitive_bitwidth
        line = (common * KV_HEADS + kv_head)[:, None] * HEAD_DIM + tl.arange(0, (D + LINE - 1) // LINE)[None, :] * LINE
        prefetch(k_cache + line, PDL)
        prefetch(v_cache + line, PDL)
    begin(PDL)
    if not seen:
        return
    queries = _load_queries(q, row, head, exists, HEADS, HEAD_DIM, D)
    highest = tl.full((M,), _NOTHING, tl.float32)
    total = tl.zeros((M,), tl.float32)
    mixed = tl.zeros((M, D), tl.float32)
    if shared:
        highest, total, mixed = _partial(
            queries, k_cache, v_cache, common, key, visible_from, visible_to, kv_head, scale,
            KV_HEADS, HEAD_DIM, D, BK,
        )  # fmt: skip
    else:
        for index in range(0, count):
            its_row = tl.load(rows + first + index)
            its_prefix = tl.load(prefix_lens + its_row)
            its_end = its_prefix + tl.load(path_lens + its_row)
            its_low = tl.maximum(its_end - WINDOW, FIRST) if WINDOW else FIRST
            slot = _slots_of(
                _existing(key, its_end, its_low), its_row, its_prefix, tl.load(sequences + its_row), paths, depth,
                block_tables, table_width, block_size,
            )  # fmt: skip
            highest_i, total_i, mixed_i = _partial(
                queries, k_cache, v_cache, slot, key, visible_from, visible_to, kv_head, scale,
                KV_HEADS, HEAD_DIM, D, BK,
            )  # fmt: skip
            mine = within == index
            highest = tl.where(mine, highest_i, highest)
            total = tl.where(mine, total_i, total)
            mixed = tl.where(mine[:, None], mixed_i, mixed)
    partial = (place.to(tl.int64) * HEADS + head) * blocks + block
    tl.store(highest_out + partial, highest, mask=exists)
    tl.store(total_out + partial, total, mask=exists)
    d = tl.arange(0, D)[None, :]
    tl.store(mixed_out + partial[:, None] * HEAD_DIM + d, mixed, mask=exists[:, None] & (d < HEAD_DIM))


@triton.jit(do_not_specialize=["blocks"], do_not_specialize_on_alignment=["total_in"])
def _merge_kernel(
    highest_in, total_in, mixed_in, out, rows, prefix_lens, path_lens, sinks, blocks,
    HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, D: tl.constexpr, WINDOW: tl.constexpr, HAS_SINKS: tl.constexpr,
    BK: tl.constexpr, AT_ONCE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One head of one row: its blocks' partial results, merged in order."""
    row, head = tl.load(rows + tl.program_id(0)), tl.program_id(1)
    visible_to = tl.load(prefix_lens + row) + tl.load(path_lens + row)
    begin(PDL)
    first_block = tl.maximum(visible_to - WINDOW, 0) // BK if WINDOW else 0
    last_block = tl.cdiv(visible_to, BK)
    base = (tl.program_id(0).to(tl.int64) * HEADS + head) * blocks
    d = tl.arange(0, D)
    highest, total = _sink(sinks, head, True, HAS_SINKS)
    mixed = tl.zeros((D,), tl.float32)
    for at in range(first_block, last_block, AT_ONCE):
        for step in tl.static_range(AT_ONCE):
            there = at + step < last_block
            partial = base + at + step
            highest_b = tl.load(highest_in + partial, mask=there, other=_NOTHING)
            total_b = tl.load(total_in + partial, mask=there, other=0.0)
            mixed_b = tl.load(mixed_in + partial * HEAD_DIM + d, mask=there & (d < HEAD_DIM), other=0.0)
            highest, total, mixed = _merge(highest, total, mixed, highest_b, total_b, mixed_b, False)
    result = tl.div_rn(mixed, tl.where(total > 0, total, 1.0))
    places = (row.to(tl.int64) * HEADS + head) * HEAD_DIM + d
    tl.store(out + places, stored_as_bfloat16(result, out), mask=d < HEAD_DIM)


@triton.jit(do_not_specialize=["table_width"])
def _whole_kernel(
    q, k_cache, v_cache, out, rows, groups, sequences, block_tables, prefix_lens, path_lens, sinks, table_width,
    block_size, scale,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, D: tl.constexpr, WINDOW: tl.constexpr,
    FIRST: tl.constexpr, HAS_SINKS: tl.constexpr, BK: tl.constexpr, M: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """All blocks of keys for one group of rows without paths."""
    begin(PDL)
    kv_head = tl.program_id(1)
    GROUP: tl.constexpr = HEADS // KV_HEADS
    first, _, _, exists, _, row, head, _, _, visible_from, visible_to = _queries_of(
        rows, groups, prefix_lens, path_lens, kv_head, WINDOW, FIRST, GROUP, M
    )
    end = tl.max(visible_to, 0)
    if end == 0:
        return
    queries = _load_queries(q, row, head, exists, HEADS, HEAD_DIM, D)
    table = block_tables + tl.load(sequences + tl.load(rows + first)) * table_width
    highest, total = _sink(sinks, head, exists, HAS_SINKS)
    mixed = tl.zeros((M, D), tl.float32)
    low = tl.min(tl.where(exists, visible_from, end), 0)
    for block in range(low // BK, tl.cdiv(end, BK)):
        key = block * BK + tl.arange(0, BK)
        existing = _existing(key, end, low)
        slot = tl.load(table + existing // block_size).to(tl.int64) * block_size + existing % block_size
        highest_b, total_b, mixed_b = _partial(
            queries, k_cache, v_cache, slot, key, visible_from, visible_to, kv_head, scale,
            KV_HEADS, HEAD_DIM, D, BK,
        )  # fmt: skip
        highest, total, mixed = _merge(highest, total, mixed, highest_b, total_b, mixed_b, True)
    result = tl.div_rn(mixed, tl.where(total > 0, total, 1.0)[:, None].broadcast_to(M, D))
    d = tl.arange(0, D)[None, :]
    places = (row.to(tl.int64) * HEADS + head)[:, None] * HEAD_DIM + d
    tl.store(out + places, stored_as_bfloat16(result, out), mask=exists[:, None] & (d < HEAD_DIM))


@cache
def rows_together(shape: AttentionShape, dtype: torch.dtype, whole: bool) -> int:
    """The most rows that a group may have."""
    return _queries_together(shape, dtype, whole) // (shape.num_heads // shape.num_kv_heads)


def rows_of_group(rows: int, together: int, has_paths: bool) -> int:
    """How many rows of a sequence share a program. Rows on different paths go through the last keys one after the
    other; few rows leave enough of the device free for a program each. Any choice gives the same bits."""
    return 1 if has_paths and rows <= _ROWS_ALONE else together


def _queries_together(shape: AttentionShape, dtype: torch.dtype, whole: bool) -> int:
    """Without matrix instructions, which float32 does not use, many queries need too many registers."""
    group: int = triton.next_power_of_2(shape.num_heads // shape.num_kv_heads)
    return max(group, _WHOLE_QUERIES if whole and dtype is not torch.float32 else _SPLIT_QUERIES)


def attend_split(
    q: Tensor,
    kv: LayerKV,
    shape: AttentionShape,
    batch: ForwardBatch,
    sinks: Tensor | None,
    groups: Groups,
    out: Tensor,
) -> None:
    """For few rows, with any paths: writes groups.rows of `out` [rows, heads * head_dim]."""
    rows, heads = len(groups.rows), shape.num_heads
    blocks = triton.cdiv(batch.max_keys, KEY_BLOCK)
    d = max(16, triton.next_power_of_2(shape.head_dim))
    highest, total = torch.empty((2, rows, heads, blocks), dtype=torch.float32, device=q.device)
    mixed = torch.empty((rows, heads, blocks, shape.head_dim), dtype=torch.float32, device=q.device)
    _split_kernel[(len(groups.bounds) - 1, shape.num_kv_heads, blocks)](
        *(q, kv.k, kv.v, highest, total, mixed, groups.rows, groups.bounds, batch.sequences, batch.block_tables),
        *(batch.prefix_lens, batch.paths, batch.path_lens, batch.block_tables.shape[1], batch.paths.shape[1]),
        *(batch.block_size, blocks, shape.scale * _LOG2_E.value),
        HEADS=heads,
        KV_HEADS=shape.num_kv_heads,
        HEAD_DIM=shape.head_dim,
        D=d,
        WINDOW=shape.window,
        FIRST=shape.first_key,
        BK=KEY_BLOCK,
        M=_queries_together(shape, q.dtype, whole=False),
        num_warps=4,
        num_stages=1,
        **options(q.device),
    )
    _merge_kernel[(rows, heads)](
        *(highest, total, mixed, out, groups.rows, batch.prefix_lens, batch.path_lens, q if sinks is None else sinks),
        blocks,
        HEADS=heads,
        HEAD_DIM=shape.head_dim,
        D=d,
        WINDOW=shape.window,
        HAS_SINKS=sinks is not None,
        BK=KEY_BLOCK,
        AT_ONCE=_AT_ONCE,
        num_warps=1,
        **options(q.device),
    )


def attend_whole(
    q: Tensor,
    kv: LayerKV,
    shape: AttentionShape,
    batch: ForwardBatch,
    sinks: Tensor | None,
    groups: Groups,
    out: Tensor,
) -> None:
    """For many rows of a sequence, without paths: writes groups.rows of `out`."""
    d = max(16, triton.next_power_of_2(shape.head_dim))
    _whole_kernel[(len(groups.bounds) - 1, shape.num_kv_heads)](
        *(q, kv.k, kv.v, out, groups.rows, groups.bounds, batch.sequences, batch.block_tables, batch.prefix_lens),
        *(batch.path_lens, q if sinks is None else sinks, batch.block_tables.shape[1], batch.block_size),
        shape.scale * _LOG2_E.value,
        HEADS=shape.num_heads,
        KV_HEADS=shape.num_kv_heads,
        HEAD_DIM=shape.head_dim,
        D=d,
        WINDOW=shape.window,
        FIRST=shape.first_key,
        HAS_SINKS=sinks is not None,
        BK=KEY_BLOCK,
        M=_queries_together(shape, q.dtype, whole=True),
        num_warps=4 if q.dtype is torch.float32 else 8,
        num_stages=1 if q.dtype is torch.float32 else 2,
        **options(q.device),
    )
