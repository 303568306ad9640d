# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, import-not-found, import-untyped"
"""Draft trees that grow on a GPU (see tree_ops): four small kernels per level, three for its candidates, one for the
nodes of the next. They are launched without programmatic dependence: the plan of the next level is what they write."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from foredraft.backends.cuda.attention import Groups, rows_of_group
from foredraft.backends.cuda.floors import floors
from foredraft.backends.cuda.plan import Plan
from foredraft.backends.cuda.sample import gumbel
from foredraft.backends.tree_ops import LEAST_PROBABILITY, Candidates, Choice, Nodes, Noise, Places
from foredraft.batch import ForwardBatch

_LOWEST = tl.constexpr(float("-inf"))
_LEAST = tl.constexpr(LEAST_PROBABILITY)
_CHUNK = 2048  # logits whose best one program finds


@triton.jit
def _place_kernel(
    lengths, num_slots, tables, tables_stride, num_blocks, positions, slots, offsets, prefix_lens, rows, width,
    BLOCK_SIZE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One level."""
    level, row = tl.program_id(0), tl.arange(0, BLOCK)
    inside = row < rows
    sequence = row // width
    length = tl.load(lengths + sequence, mask=inside, other=0)
    offset = length + level * width + row % width
    block = tl.minimum(offset // BLOCK_SIZE, num_blocks - 1)
    slot = tl.load(tables + sequence * tables_stride + block, mask=inside, other=0).to(tl.int64) * BLOCK_SIZE
    slot = tl.where(offset < tl.load(num_slots + sequence, mask=inside, other=0), slot + offset % BLOCK_SIZE, -1)
    place = level * rows + row
    tl.store(slots + place, slot, mask=inside)
    tl.store(positions + place, length + level, mask=inside)
    tl.store(offsets + place, offset.to(tl.int32), mask=inside)
    tl.store(prefix_lens + place, length.to(tl.int32), mask=inside)


@triton.jit
def _best_kernel(
    logits, stride, token_ids, ids_stride, keys, temperatures, floors, each,
    values_out, columns_out, highest_out, totals, columns,
    HAS_IDS: tl.constexpr, COUNT: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """The best columns of one chunk of a row, and the sum of exponentials over it."""
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    part = row * tl.num_programs(1) + chunk
    place = tl.arange(0, CHUNK)
    column = chunk * CHUNK + place
    inside = column < columns
    values = tl.load(logits + row * stride + column, mask=inside, other=_LOWEST)
    temperature = tl.load(temperatures + row // each)
    if temperature > 0:
        token = column.to(tl.int64)
        if HAS_IDS:
            token = tl.load(token_ids + row * ids_stride + column, mask=inside, other=0)
        noise = gumbel(tl.load(keys + row // each), token)
        noisy = (values.to(tl.float64) + temperature * noise).to(tl.float32)
        values = tl.where(values >= tl.load(floors + row), noisy, _LOWEST)
    highest = tl.max(values, 0)
    tl.store(highest_out + part, highest)
    tl.store(totals + part, tl.sum(tl.exp(values - tl.where(highest == _LOWEST, 0.0, highest)), 0))
    for rank in tl.static_range(COUNT):
        best, at = tl.max(values, 0, return_indices=True)
        tl.store(values_out + part * COUNT + rank, best)
        tl.store(columns_out + part * COUNT + rank, chunk * CHUNK + at)
        values = tl.where(place == at, _LOWEST, values)


@triton.jit
def _likely_kernel(
    values_in, columns_in, highest_in, totals, token_ids, ids_stride, tokens, probabilities, columns, chunks,
    HAS_IDS: tl.constexpr, COUNT: tl.constexpr, CHUNKS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One row: the best of its chunks. Of equal values the lowest column comes first."""
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.arange(0, CHUNKS)
    highests = tl.load(highest_in + row * chunks + chunk, mask=chunk < chunks, other=_LOWEST)
    highest = tl.max(highests, 0)
    total = tl.sum(
        tl.exp(highests - highest) * tl.load(totals + row * chunks + chunk, mask=chunk < chunks, other=0.0), 0
    )
    place = tl.arange(0, BLOCK)
    inside = place < chunks * COUNT
    values = tl.load(values_in + row * chunks * COUNT + place, mask=inside, other=_LOWEST)
    for rank in tl.static_range(COUNT):
        best, at = tl.max(values, 0, return_indices=True)
        at = tl.minimum(at, chunks * COUNT - 1)  # where nothing is a number
        column = tl.minimum(tl.load(columns_in + row * chunks * COUNT + at), columns - 1).to(tl.int64)
        tl.store(tokens + row * COUNT + rank, tl.load(token_ids + row * ids_stride + column) if HAS_IDS else column)
        tl.store(probabilities + row * COUNT + rank, tl.exp(best - highest) / total)
        values = tl.where(place == at, _LOWEST, values)


@triton.jit
def _grow_kernel(
    found_tokens, found_probabilities, shares, weights_before, paths_before, offsets,
    token_ids, parents, places, weights, paths, depth, most_depth,
    HAS_BEFORE: tl.constexpr, HAS_SHARES: tl.constexpr, KEEPS_FIRST: tl.constexpr, NODES: tl.constexpr,
    COUNT: tl.constexpr, EACH: tl.constexpr, BLOCK: tl.constexpr, PATH: tl.constexpr,
):  # fmt: skip
    """One sequence. Weights are products of two roundings in float64, as the host makes them."""
    sequence = tl.program_id(0).to(tl.int64)
    place = tl.arange(0, BLOCK)
    inside = place < NODES * COUNT
    node = sequence * NODES + place // COUNT
    if HAS_SHARES:
        share = tl.load(shares + place % COUNT, mask=inside, other=0.0)
    else:
        found = tl.load(found_probabilities + sequence * NODES * COUNT + place, mask=inside, other=0.0)
        found = tl.where(found == found, found, 0.0)  # what only fills a program up may be no number
        share = tl.minimum(tl.maximum(found.to(tl.float64), _LEAST), 1.0)
    weighed = share
    if HAS_BEFORE:
        weighed = tl.load(weights_before + node, mask=inside, other=0.0) * share
    ranked = tl.where(inside, weighed, _LOWEST)
    if KEEPS_FIRST:
        ranked = tl.where(place == 0, float("inf"), ranked)
    step = tl.arange(0, PATH)
    for rank in tl.static_range(EACH):
        best = tl.min(tl.where(ranked == tl.max(ranked, 0), place, BLOCK), 0)
        row = sequence * EACH + rank
        parent = sequence * NODES + best // COUNT
        tl.store(token_ids + row, tl.load(found_tokens + sequence * NODES * COUNT + best))
        tl.store(parents + row, parent)
        tl.store(places + row, best)
        tl.store(weights + row, tl.sum(tl.where(place == best, weighed, 0.0), 0))
        path = tl.zeros((PATH,), tl.int32)
        if HAS_BEFORE:
            path = tl.load(paths_before + parent * most_depth + step, mask=step < depth - 1, other=0)
        path = tl.where(step == depth - 1, tl.load(offsets + row), path)
        tl.store(paths + row * most_depth + step, path, mask=step < most_depth)
        ranked = tl.where(place == best, _LOWEST, ranked)


class CudaTreeOps:
    """See TreeOps."""

    def batch(self, plan: ForwardBatch, rows: ForwardBatch, each: int) -> Plan:
        assert isinstance(plan, Plan) and plan.bucket is not None, "only few rows run ahead"
        together = rows_of_group(rows.num_rows, plan.bucket.together, has_paths=True)
        every = torch.arange(rows.num_rows, dtype=torch.int32, device=plan.positions.device)
        of_rows = ("token_ids", "positions", "slots", "sequences", "prefix_lens", "paths", "path_lens")
        return replace(
            plan,
            **{name: getattr(rows, name) for name in of_rows},
            logit_rows=None,
            split=Groups(every, _bounds(rows.num_rows, each, together, plan.positions.device)),
            whole=None,
            bucket=None,
            staging=None,
        )

    def place(self, tables: Tensor, block_size: int, lengths: Tensor, num_slots: Tensor, into: Places) -> None:
        levels, rows = into.slots.shape
        _place_kernel[(levels,)](
            *(lengths, num_slots, tables, tables.stride(0), tables.shape[1]),
            *(into.positions, into.slots, into.offsets, into.prefix_lens, rows, rows // len(lengths)),
            BLOCK_SIZE=block_size,
            BLOCK=triton.next_power_of_2(rows),
            num_warps=1,
        )

    def likely(self, logits: Tensor, token_ids: Tensor | None, noise: Noise, into: Candidates) -> None:
        (rows, columns), count = logits.shape, into.tokens.shape[1]
        chunks, device = triton.cdiv(columns, _CHUNK), logits.device
        values, highest, totals = (
            torch.empty(rows * chunks * each, dtype=torch.float32, device=device) for each in (count, 1, 1)
        )
        found = torch.empty(rows * chunks * count, dtype=torch.int32, device=device)
        names = logits if token_ids is None else token_ids
        ids_stride = 0 if token_ids is None or token_ids.dim() == 1 else token_ids.stride(0)
        options = {"HAS_IDS": token_ids is not None, "COUNT": count, "enable_fp_fusion": False}
        limits = noise.top_ks, noise.top_ps, noise.min_p_logs
        lowest, _ = floors(logits, noise.temperatures, *limits, needed=False)
        each = rows // len(noise.keys)
        _best_kernel[(rows, chunks)](
            *(logits, logits.stride(0), names, ids_stride, noise.keys, noise.temperatures, lowest, each),
            *(values, found, highest, totals, columns),
            CHUNK=_CHUNK,
            num_warps=4,
            **options,
        )
        _likely_kernel[(rows,)](
            *(values, found, highest, totals, names, ids_stride, into.tokens, into.probabilities, columns, chunks),
            CHUNKS=triton.next_power_of_2(chunks),
            BLOCK=triton.next_power_of_2(chunks * count),
            num_warps=1,
            **options,
        )

    def grow(
        self, found: Candidates, before: Nodes | None, depth: int, sequences: int, choice: Choice, into: Nodes
    ) -> None:
        rows, count = found.tokens.shape
        most_depth = into.paths.shape[1]
        _grow_kernel[(sequences,)](
            *(found.tokens, found.probabilities, found.probabilities if choice.shares is None else choice.shares),
            *((into.weights, into.paths) if before is None else (before.weights, before.paths)),
            *(into.offsets, into.token_ids, into.parents, into.places, into.weights, into.paths, depth, most_depth),
            HAS_BEFORE=before is not None,
            HAS_SHARES=choice.shares is not None,
            KEEPS_FIRST=choice.keeps_first,
            NODES=rows // sequences,
            COUNT=count,
            EACH=len(into.token_ids) // sequences,
            BLOCK=triton.next_power_of_2(rows // sequences * count),
            PATH=triton.next_power_of_2(most_depth),
            num_warps=1,
            enable_fp_fusion=False,
        )


@cache
def _bounds(rows: int, each: int, together: int, device: torch.device) -> Tensor:
    """Bounds of groups: `together` rows of one sequence at most."""
    starts = [row for first in range(0, rows, each) for row in range(first, first + each, together)]
    return torch.tensor([*starts, rows], dtype=torch.int32, device=device)
