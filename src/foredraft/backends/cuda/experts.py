# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, import-not-found, import-untyped"
"""Mixtures of experts on a GPU: which experts every row has, and what they make of it.

The experts of a row are chosen by its own scores. Then the choices of all rows are brought together by expert, and cut
into tasks of so many rows that one program has, so that an expert's weights are read once for all its rows, and not at
all where it has none. Nothing waits for the device to tell what was chosen: there are as many tasks as rows may need at
most, and those that are left over do nothing.

A row's bits do not depend on other rows: the products have none in common but the weights, and what a row gets of its
experts is added best first.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from foredraft.backends.cuda import linear, rows
from foredraft.backends.cuda.launch import begin, options
from foredraft.backends.cuda.linear import Routes
from foredraft.backends.cuda.pack import of_experts
from foredraft.backends.cuda.rows import added_up
from foredraft.backends.layers import Experts, Linear

_CHOICES = 1024  # that a program looks at together, at most
_TOGETHER = (8, 16, 32, 64)  # rows of a task
_LOWEST = tl.constexpr(float("-inf"))


@dataclass(frozen=True)
class Layers:
    """The layers of all experts, each as one."""

    gate_up: Linear
    down: Linear


def layers_of(experts: Experts) -> Layers:
    return Layers(*(of_experts([getattr(mlp, name) for mlp in experts.each]) for name in ("gate_up", "down")))


@triton.jit(do_not_specialize=["rows"])
def _choose_kernel(
    sums,  # [PARTS, rows, COUNT]: scores
    slots,  # [rows]
    chosen,  # [rows, CHOSEN] int32
    shares,  # [rows, CHOSEN] float32
    rows,
    HAS_SLOTS: tl.constexpr,
    NORMALISED: tl.constexpr,
    COUNT: tl.constexpr,
    CHOSEN: tl.constexpr,
    BLOCK: tl.constexpr,
    RANKS: tl.constexpr,
    PARTS: tl.constexpr,
    PDL: tl.constexpr,
):
    """The experts of one row, best first, and among equals the first ones. A row that only fills a bucket up has none,
    which is the expert COUNT. One whose scores are not finite has some, with shares that are no numbers."""
    row = tl.program_id(0)
    begin(PDL)
    expert = tl.arange(0, BLOCK)
    exists = expert < COUNT
    scores = added_up(sums, row.to(tl.int64) * COUNT + expert, exists, rows.to(tl.int64) * COUNT, PARTS)
    broken = tl.sum(tl.where(exists, scores * 0.0, 0.0), 0)
    scores = tl.where(scores == scores, scores, _LOWEST)
    highest = tl.max(tl.where(exists, scores, _LOWEST), 0)
    rank = tl.arange(0, RANKS)
    best = tl.full((RANKS,), COUNT, tl.int32)
    weights = tl.zeros((RANKS,), tl.float32)
    left = exists
    for nth in tl.static_range(CHOSEN):
        score = tl.max(tl.where(left, scores, _LOWEST), 0)
        place = tl.min(tl.where(left & (scores == score), expert, BLOCK), 0)
        best = tl.where(rank == nth, place, best)
        weights = tl.where(rank == nth, tl.exp(score - highest), weights)
        left = left & (expert != place)
    if NORMALISED:
        total = tl.sum(weights, 0)
    else:
        total = tl.sum(tl.where(exists, tl.exp(scores - highest), 0.0), 0)
    if HAS_SLOTS:
        best = tl.where(tl.load(slots + row) < 0, COUNT, best)
    places = row * CHOSEN + rank
    tl.store(chosen + places, best, mask=rank < CHOSEN)
    tl.store(shares + places, tl.div_rn(weights, total + broken + tl.zeros_like(weights)), mask=rank < CHOSEN)


@triton.jit(do_not_specialize=["count", "most_tasks"])
def _arrange_kernel(
    chosen,  # [count] int32
    choices,
    tasks,  # [most_tasks, 3]
    count,
    most_tasks,
    EXPERTS: tl.constexpr,
    TOGETHER: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """The choices of one expert, and its tasks.

    Those of an expert e with b choices before its own begin with task min(e, b) + b // TOGETHER: at most one by one for
    the experts before it, and one more for each TOGETHER of their choices. Every program fills up what it leaves over
    before the next expert's."""
    begin(PDL)
    expert = tl.program_id(0)
    place = tl.arange(0, BLOCK)
    before = tl.full((), 0, tl.int32)
    own = tl.full((), 0, tl.int32)
    for start in range(0, count, BLOCK):
        inside = start + place < count
        experts = tl.load(chosen + start + place, mask=inside, other=EXPERTS)
        before += tl.sum((experts < expert).to(tl.int32), 0)
        own += tl.sum((experts == expert).to(tl.int32), 0)
    at = before
    for start in range(0, tl.where(own > 0, count, 0), BLOCK):
        inside = start + place < count
        experts = tl.load(chosen + start + place, mask=inside, other=EXPERTS)
        mine = (experts == expert).to(tl.int32)
        tl.store(choices + at + tl.cumsum(mine, 0) - 1, start + place, mask=mine > 0)
        at += tl.sum(mine, 0)
    after = before + own
    first = tl.minimum(expert, before) + before // TOGETHER
    following = tl.minimum(expert + 1, after) + after // TOGETHER
    if expert == EXPERTS - 1:
        following = most_tasks
    for index in range(first, tl.minimum(following, most_tasks)):
        begins = before + (index - first) * TOGETHER
        task = tasks + index * 3
        tl.store(task, tl.where(begins < after, expert, -1))
        tl.store(task + 1, tl.minimum(begins, after))
        tl.store(task + 2, tl.minimum(begins + TOGETHER, after))


def route(sums: Tensor, experts: Experts, slots: Tensor | None) -> Routes:
    """By the segments' sums of the router. A row whose slot is -1 has no experts."""
    (_, num_rows, count), chosen = sums.shape, experts.num_chosen
    best = torch.empty((num_rows, chosen), dtype=torch.int32, device=sums.device)
    shares = torch.empty((num_rows, chosen), dtype=torch.float32, device=sums.device)
    block = triton.next_power_of_2(count)
    _choose_kernel[(num_rows,)](
        *(sums, best if slots is None else slots, best, shares, num_rows),
        HAS_SLOTS=slots is not None,
        NORMALISED=experts.normalised,
        COUNT=count,
        CHOSEN=chosen,
        BLOCK=block,
        RANKS=triton.next_power_of_2(chosen),
        PARTS=len(sums),
        num_warps=max(1, block // 128),
        **options(sums.device),
    )
    together = rows_together(num_rows, chosen, count)
    num_choices = num_rows * chosen
    most_tasks = min(count, num_choices) + (num_choices - 1) // together
    choices = torch.empty(num_choices, dtype=torch.int32, device=sums.device)
    tasks = torch.empty((most_tasks, 3), dtype=torch.int32, device=sums.device)
    block = min(_CHOICES, triton.next_power_of_2(num_choices))
    _arrange_kernel[(count,)](
        *(best, choices, tasks, num_choices, most_tasks),
        EXPERTS=count,
        TOGETHER=together,
        BLOCK=block,
        num_warps=max(1, block // 256),
        **options(sums.device),
    )
    return Routes(tasks, choices, shares, together)


def rows_together(num_rows: int, chosen: int, count: int) -> int:
    """The most rows of a task: about twice as many as an expert has on average. Any choice gives the same bits."""
    wanted = min(num_rows, 2 * -(-num_rows * chosen // count))
    return next((size for size in _TOGETHER if size >= wanted), _TOGETHER[-1])


def mix(
    x: Tensor, experts: Experts, layers: Layers, dtype: torch.dtype, activation: str, slots: Tensor | None
) -> Tensor:
    """What the experts of each row give it, still to be added in order: float32 [chosen, rows, width]. For rows without
    experts, nothing is written. `dtype` is what the second layer reads."""
    routes = route(linear.sums(x, experts.router), experts, slots)
    if linear.can_gate(layers.gate_up):
        active = linear.gated(x, layers.gate_up, dtype, activation, routes)
    else:
        active = rows.gated(linear.to_experts(x, layers.gate_up, routes), dtype, activation)
    return linear.from_experts(active, layers.down, routes)
