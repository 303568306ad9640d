"""Whole drafts on the device: a model runs all levels of its trees one after the other, without the host in between.

Where waiting for the device costs more than running it, as on a GPU, a draft of k levels would lose k such waits, in
which the host chooses the nodes of the next level. Here the device chooses them (see backends/tree_ops), the whole
draft is one captured graph, and the host reads the candidates of all levels at once: the draft is the best of them.
"""

from __future__ import annotations

from collections.abc import Sequence as Items
from dataclasses import dataclass
from functools import cache
from heapq import heappop, heappush
from itertools import accumulate
from operator import add
from typing import NamedTuple, Protocol
from weakref import WeakKeyDictionary

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from foredraft.backends import tree_ops
from foredraft.backends.base import Backend
from foredraft.backends.layers import AttentionShape
from foredraft.backends.tree_ops import LEAST_PROBABILITY, Choice, Nodes, Noise, Places, TreeOps
from foredraft.batch import ForwardBatch, PackedBatch
from foredraft.proposers.model.candidates import NodeLogits
from foredraft.proposers.model.tree import TreeShape, computed_up_to, static_shares
from foredraft.sampling.noise import signed, stream_key
from foredraft.types import Draft, Work

_MOST_NODES = 64  # that a tree may have, run or drafted
_MOST_ROWS = 256  # of a first run and of a level: more are a batch that needs no graph
_SIZES = (1, 2, 4, 8, 16, 32)  # sequences that a program has room for
_FIRST_ROWS = 8  # that a sequence may begin with however shallow its draft is: the one before may have been deeper
_Key = tuple[int, TreeShape]
# What is told of a sequence: first whole numbers, then those of float64, and at last its keys.
_ROW, _LENGTH, _TOKEN, _SLOTS, _TOP_K, _TEMPERATURE, _TOP_P, _MIN_P_LOG, _KEYS = range(9)


@dataclass(frozen=True)
class Ends:
    """Where the sequences of a run end: [sequences] each. Those that only fill a program up have length 0."""

    rows: Tensor  # int64: the last row of each in the plan
    lengths: Tensor  # int64
    tokens: Tensor  # int64: the last of each


class AheadModel(Protocol):
    """The part of a model or head that runs on the device alone. The calls of one draft come in order."""

    def begin(self, plan: ForwardBatch, ends: Ends) -> NodeLogits:
        """Run the tokens of a plan: the logits behind the last one of every sequence."""

    def extend(self, nodes: Nodes, batch: ForwardBatch, depth: int) -> NodeLogits:
        """The logits behind nodes of a depth, from 1 on; `batch` are their rows."""


class Levels:
    """All levels of the trees of a call, on the host; see WholeDrafts. The nodes of a level are the best candidates
    behind the level before; the last level has candidates only.

    Candidates are numbered as their nodes come: `width` behind the end of the sequence, then as many behind each node
    of the first level, and so on.
    """

    def __init__(self, program: _Program) -> None:
        self._shape, found = program.shape, program.found
        order, of_candidates, self._firsts = _order(program.size, program.shape.width, program.shape.depth)
        # Of every sequence: the tokens of its candidates, and behind them the places of its nodes.
        self._tokens: list[list[int]] = found.tokens_and_places.take(order).tolist()
        probabilities = found.probabilities.take(of_candidates)
        shares = np.minimum(np.maximum(probabilities, LEAST_PROBABILITY), 1.0)
        self._shares: list[list[float]] = np.where(probabilities > 0, shares, 0.0).tolist()

    def chain(self, lane: int) -> list[int]:
        """The tokens of leading nodes that were run one behind the other: all of a chain, the first of a tree."""
        nodes, tokens = self._nodes(lane), self._tokens[lane]
        return [tokens[node] for node in (nodes[:1] if self._shape.width > 1 else nodes)]

    def _nodes(self, lane: int) -> list[int]:
        """Which candidates are nodes, in order."""
        return list(map(add, self._firsts, self._tokens[lane][len(self._shares[lane]) :]))

    def draft(self, lane: int, budget: int, name: str) -> Draft:
        """The draft of one sequence: the best candidates of all levels, or, where the shape does not prune, the nodes
        that were run and the best of the last level."""
        shape, width, tokens, shares = self._shape, self._shape.width, self._tokens[lane], self._shares[lane]
        above = [-1, *self._nodes(lane)]  # what each group of `width` candidates is behind; -1: the end of the sequence
        weights = static_shares(width) * len(above) if shape.static else shares
        kept = _best(above, weights, budget) if shape.prunes else _run_and_last(above, weights)[:budget]
        place = {-1: -1}
        drafted: list[int] = []
        parents: list[int] = []
        scores: list[float] = []
        for node in kept:
            parent = place.get(above[node // width])
            if parent is None or not shares[node]:
                continue  # it cannot be drawn, or what it is behind
            place[node] = len(drafted)
            drafted.append(tokens[node])
            parents.append(parent)
            scores.append((scores[parent] if parent >= 0 else 1.0) * shares[node])
        return Draft(tuple(drafted), tuple(parents), tuple(scores), (name,) * len(drafted))


class Found(NamedTuple):
    """What a program leaves on the host, level by level: the first one has a row of candidates for each sequence, the
    others `width` of them, one for each node."""

    tokens_and_places: NDArray[np.int64]  # of all candidates; then of every node, which candidate of its level it is
    probabilities: NDArray[np.float32]  # of all candidates


@cache
def _order(size: int, width: int, depth: int) -> tuple[NDArray[np.int64], NDArray[np.int64], list[int]]:
    """Where in it that is which belongs to each sequence: tokens and places [sequences, candidates + nodes], and
    probabilities [sequences, candidates]. And of every node, the number of the first candidate of its level."""
    levels = range(depth - 1)
    of_level = np.arange(size * width).reshape(size, width)
    nodes = np.concatenate([level * size * width + of_level for level in levels] or [of_level[:, :0]], axis=1)
    rows = np.concatenate([np.arange(size)[:, None], size + nodes], axis=1)
    candidates = (rows[:, :, None] * width + np.arange(width)).reshape(size, -1)
    firsts = [0 if level == 0 else width + (level - 1) * width * width for level in levels for _ in range(width)]
    return np.concatenate([candidates, candidates.size + nodes], axis=1), candidates, firsts


def _best(above: list[int], shares: list[float], budget: int) -> list[int]:
    """The candidates that weigh most; of equal ones, the first.

    None weighs more than its parent, nor more than the one before it behind the same node: each is found by way of
    those. The ones that are most probably accepted come first, one behind the other: then their K and V lie where they
    belong. No candidate comes before its parent.
    """
    width = len(shares) // len(above)
    first_behind = {node: width * group for group, node in enumerate(above)}
    best: set[int] = set()
    found = [(-shares[0], 0, -1.0)]  # weight, candidate, weight of its parent; negative, as a heap wants them
    while found and len(best) < budget:
        weight, node, weight_above = heappop(found)
        best.add(node)
        behind, beside = first_behind.get(node), node + 1
        if beside % width:
            heappush(found, (weight_above * shares[beside], beside, weight_above))
        if behind is not None:
            heappush(found, (weight * shares[behind], behind, weight))
    chain: list[int] = []
    likeliest = 0
    while likeliest in best:
        chain.append(likeliest)
        likeliest = first_behind.get(likeliest, -1)
    return chain + sorted(best.difference(chain))


def _run_and_last(above: list[int], shares: list[float]) -> list[int]:
    """The candidates that were run, and the best of the last level: its first, and then those that weigh most."""
    width = len(shares) // len(above)
    weights: list[float] = []
    for place, share in enumerate(shares):
        parent = above[place // width]
        weights.append((weights[parent] if parent >= 0 else 1.0) * share)
    first = len(weights) - (width * width if len(above) > 1 else width)
    last = sorted(range(first + 1, len(weights)), key=weights.__getitem__, reverse=True)
    return [*above[1:], first, *last[: width - 1]]


class RunAhead:
    """The programs of one model, by the size and shape of what they draft; see Ahead."""

    stops_early = False

    def __init__(self, model: AheadModel, backend: Backend, shape: AttentionShape, block_size: int) -> None:
        assert backend.tree_ops is not None
        self.model, self.backend, self.attention, self.block_size = model, backend, shape, block_size
        self.ops: TreeOps = backend.tree_ops
        self._programs: WeakKeyDictionary[ForwardBatch, dict[_Key, _Program]] = WeakKeyDictionary()  # by their plan

    @torch.inference_mode()
    def warm(self, shape: TreeShape, max_keys: int, max_sequences: int) -> None:
        """Make the programs that sequences need which draft at every step: making one takes longer than many drafts.
        Such a sequence runs what was accepted of its last draft first, and the token behind it."""
        sizes = [size for size in _SIZES if size < 2 * max_sequences and size * shape.width <= _MOST_ROWS]
        for plan in self.backend.warm_plans(self.attention, self.block_size, max_keys):
            for size in sizes:
                if size <= plan.num_rows <= min(_MOST_ROWS, 2 * size * _first_rows(shape) - 1):
                    program = self._program(plan, (size, shape))
                    self.backend.replay(program, plan, program.run)
                    program.wait()  # what the next run is told must not reach this one

    def __call__(
        self, works: Items[Work], first: PackedBatch, shape: TreeShape, budgets: Items[int], min_score: float
    ) -> Levels | None:
        """All levels, whatever they are worth: the device does not wait to see that. None: there are too many works for
        one program."""
        size = next((size for size in _SIZES if size >= len(works)), 0)
        if not size or first.num_rows > _MOST_ROWS or size * shape.width > _MOST_ROWS:
            return None
        # The plan's block tables serve all levels, so they reach as far as the last one.
        reach = max(work.sequence.num_tokens for work in works) + _MOST_NODES + self.block_size
        plan = self.backend.prepare(first._replace(max_keys=reach), self.attention)
        program = self._program(plan, (min(size, len(plan.block_tables)), shape))
        program.tell(works, first)
        self.backend.replay(program, plan, program.run)
        program.wait()
        return Levels(program)

    def _program(self, plan: ForwardBatch, key: _Key) -> _Program:
        programs = self._programs.setdefault(plan, {})
        if key not in programs:
            programs[key] = _Program(self, plan, *key)
        return programs[key]


def _first_rows(shape: TreeShape) -> int:
    """The most tokens of a sequence that a program begins with: what was accepted, as a rule, and one more."""
    return max(_FIRST_ROWS, shape.depth + 1)


def split_catch_up(works: Items[Work], shape: TreeShape) -> tuple[list[Work], list[Work]]:
    """Works for all catch-up tokens but the last, where they are more than a program begins with, and works with what
    is left."""
    behind: list[Work] = []
    left: list[Work] = []
    for work in works:
        sequence, more = work.sequence, work.num_new_tokens - 1
        if more >= _first_rows(shape):
            behind.append(work._replace(num_new_tokens=more))
            caught_up = computed_up_to(sequence, sequence.num_computed_tokens + more)
            work = work._replace(sequence=caught_up, num_new_tokens=1)
        left.append(work)
    return behind, left


def run_ahead(model: AheadModel, backend: Backend, shape: AttentionShape, block_size: int) -> RunAhead | None:
    """None where the host may well grow trees level by level."""
    return None if backend.tree_ops is None else RunAhead(model, backend, shape, block_size)


class _Program:
    """One graph: its inputs, the rows of all levels, and what it leaves on the host."""

    def __init__(self, ahead: RunAhead, plan: ForwardBatch, size: int, shape: TreeShape) -> None:
        self._ahead, self.shape, self.size = ahead, shape, size
        device, width, levels = ahead.backend.device, shape.width, shape.depth - 1
        pinned = device.type == "cuda"
        self._told = torch.zeros((_KEYS + shape.depth, size), dtype=torch.int64, pin_memory=pinned)
        self._columns = self._told.numpy()
        self._floats = self._columns[_TEMPERATURE:_KEYS].view(np.float64)
        self._inputs = torch.zeros_like(self._told, device=device, pin_memory=False)
        rows = size * (1 + levels * width)

        def made(dtype: torch.dtype, *sizes: int) -> Tensor:
            return torch.zeros(sizes, dtype=dtype, device=device)

        tokens_and_places = made(torch.int64, rows * width + rows - size)  # one behind the other: read in one copy
        tokens, places = tokens_and_places.split([rows * width, rows - size])
        found = {"tokens": tokens.view(rows, width), "probabilities": made(torch.float32, rows, width)}
        nodes = {name: made(torch.int64, rows - size) for name in ("token_ids", "parents")} | {"places": places}
        self._left = [tokens_and_places, found["probabilities"]]
        self._read = [torch.zeros_like(x, device="cpu", pin_memory=pinned) for x in self._left]
        self.found = Found(*(x.numpy() for x in self._read))
        self._found = [tree_ops.Candidates(**{name: x[:size] for name, x in found.items()})]
        kinds = torch.int64, torch.int64, torch.int32, torch.int32
        self._places = Places(*(made(kind, levels, size * width) for kind in kinds))
        sequences = torch.arange(size, dtype=torch.int32, device=device).repeat_interleave(width)
        self._nodes: list[Nodes] = []
        self._batches: list[ForwardBatch] = []
        for level in range(levels):
            start, stop = size * (1 + level * width), size * (1 + (level + 1) * width)
            self._found.append(tree_ops.Candidates(**{name: x[start:stop] for name, x in found.items()}))
            paths = made(torch.int32, size * width, max(1, levels))
            own = {name: x[start - size : stop - size] for name, x in nodes.items()}
            weights = made(torch.float64, size * width)
            self._nodes.append(Nodes(**own, weights=weights, paths=paths, offsets=self._places.offsets[level]))
            rows_of_level = ForwardBatch(
                token_ids=own["token_ids"],
                positions=self._places.positions[level],
                slots=self._places.slots[level],
                sequences=sequences,
                block_tables=plan.block_tables,
                prefix_lens=self._places.prefix_lens[level],
                paths=paths,
                path_lens=made(torch.int32, size * width) + level + 1,
                logit_rows=None,
                block_size=ahead.block_size,
                max_keys=plan.max_keys,
            )
            self._batches.append(ahead.ops.batch(plan, rows_of_level, width))
        shares = torch.tensor(static_shares(width), dtype=torch.float64, device=device) if shape.static else None
        self._choice = Choice(shares, keeps_first=not shape.prunes)

    def tell(self, works: Items[Work], first: PackedBatch) -> None:
        """Write what the next run is to know of its sequences."""
        columns, block_size, depth = self._columns, self._ahead.block_size, self.shape.depth
        told: list[list[int]] = []
        floats: list[tuple[float, float, float]] = []
        for work, end in zip(works, accumulate(first.row_counts), strict=True):
            sequence = work.sequence
            temperature, top_p, min_p_log, top_k = sequence.params.draw_settings
            length, slots, keys = sequence.num_tokens, len(sequence.block_table) * block_size, [0] * depth
            if temperature:
                keys = [signed(stream_key(sequence.noise_seed, length + place)) for place in range(depth)]
            told.append([end - 1, length, sequence.token_ids[-1], slots, int(top_k), 0, 0, 0, *keys])
            floats.append((temperature, top_p, min_p_log))
        columns[:, : len(works)] = np.array(told).T
        self._floats[:, : len(works)] = np.array(floats).T
        columns[:, len(works) :] = 0

    def run(self, plan: ForwardBatch) -> None:
        ahead, size = self._ahead, self.size
        ops, model = ahead.ops, ahead.model
        self._inputs.copy_(self._told, non_blocking=True)
        ends = Ends(*(self._inputs[place] for place in (_ROW, _LENGTH, _TOKEN)))
        if self._batches:
            ops.place(plan.block_tables, ahead.block_size, ends.lengths, self._inputs[_SLOTS], self._places)
        logits = model.begin(plan, ends)
        self._find(logits, 0)
        before: Nodes | None = None
        for level, (nodes, batch) in enumerate(zip(self._nodes, self._batches, strict=True)):
            ops.grow(self._found[level], before, level + 1, size, self._choice, nodes)
            logits = model.extend(nodes, batch, level + 1)
            self._find(logits, level + 1)
            before = nodes
        for read, left in zip(self._read, self._left, strict=True):
            read.copy_(left, non_blocking=True)

    def _find(self, logits: NodeLogits, level: int) -> None:
        """The candidates behind rows of a level."""
        found = self._found[level]
        temperatures, top_ps, min_p_logs = self._inputs[_TEMPERATURE:_KEYS].view(torch.float64)
        noise = Noise(self._inputs[_KEYS + level], temperatures, top_ps, min_p_logs, self._inputs[_TOP_K])
        self._ahead.ops.likely(logits.values, logits.token_ids, noise, found)
        if logits.confidence is not None:
            found.probabilities.mul_(logits.confidence[:, None])

    def wait(self) -> None:
        if self._inputs.is_cuda:
            torch.cuda.current_stream(self._inputs.device.index).synchronize()
