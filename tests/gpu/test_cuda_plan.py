"""Plans resolve every key of every row to the slot that the batch means, also where buckets begin. Needs Triton, but no
device."""

from __future__ import annotations

import random

import pytest
import torch

from foredraft.backends.layers import AttentionShape
from foredraft.batch import ForwardBatch, pack
from foredraft.params import SamplingParams
from foredraft.types import Draft, Sequence, Work

pytest.importorskip("triton", reason="the CUDA kernels need Triton")
from foredraft.backends.cuda.plan import ROW_BUCKETS, Plan, Plans

pytestmark = pytest.mark.gpu
SIZE = 16
SHAPE = AttentionShape(9, 3, 64, 64, 0.125, 0, 1e-5)


def tree(rng: random.Random, nodes: int) -> Draft:
    parents = tuple(rng.randrange(-1, node) if node else -1 for node in range(nodes))
    return Draft(tuple(range(nodes)), parents, (1.0,) * nodes, ("",) * nodes)


def work(rng: random.Random, length: int, nodes: int, new: int = 1, size: int = SIZE) -> Work:
    blocks = rng.sample(range(1000), -(-(length + nodes) // size))
    params = SamplingParams().resolved({})
    sequence = Sequence(0, "", 0, [1] * length, length, params, 0, 99, block_table=blocks)
    sequence.num_computed_tokens = length - new
    return Work(sequence, new, nodes, tree(rng, nodes))


def key_slots(plan: Plan, row: int) -> list[int]:
    """The slots of a row's keys as the kernels find them."""
    prefix, path = int(plan.prefix_lens[row]), int(plan.path_lens[row])
    offsets = [*range(prefix), *plan.paths[row, :path].tolist()]
    table = plan.block_tables.flatten()[int(plan.sequences[row]) * plan.block_tables.shape[1] :]
    size = plan.block_size
    return [int(table[offset // size]) * size + offset % size for offset in offsets]


def check(batch: ForwardBatch, plan: Plan) -> None:
    plan.upload()
    for row in range(batch.num_rows):
        wanted = batch.key_slots[row, : int(batch.positions[row]) + 1].tolist()
        assert key_slots(plan, row) == wanted, row
    views = [view for view in (plan.split, plan.whole) if view is not None]
    attending = sorted(int(row) for view in views for row in view.rows[: int(view.bounds[-1])])
    assert attending == list(range(batch.num_rows)), "every row is in one view, and padding in none"
    assert torch.equal(plan.slots[: batch.num_rows], batch.slots)
    assert (plan.slots[batch.num_rows :] == -1).all()


@pytest.mark.parametrize("length", [3, 500, 505, 511, 512, 513, 1020, 2047])
@pytest.mark.parametrize("nodes", [0, 1, 10, 30])
def test_keys_are_where_the_batch_says(length: int, nodes: int) -> None:
    rng = random.Random(length + nodes)
    plans = Plans(torch.device("cpu"), torch.bfloat16)
    for _ in range(3):  # a bucket's memory is used again
        batch = pack([work(rng, length, nodes), work(rng, 40, 2), work(rng, length, 0)], SIZE)
        plan = plans.plan(batch, SHAPE)
        assert plan.bucket is not None and plan.num_rows in ROW_BUCKETS
        check(batch.tensors(), plan)


def test_caches_may_have_blocks_of_different_sizes() -> None:
    """The start-up proof has a cache of its own."""
    rng = random.Random(3)
    plans = Plans(torch.device("cpu"), torch.bfloat16)
    for size in (16, 4, 32, 4):
        batch = pack([work(rng, 60, 5, size=size), work(rng, 30, 0, size=size)], size)
        check(batch.tensors(), plans.plan(batch, SHAPE))


def test_prompts_have_a_plan_of_their_own() -> None:
    rng = random.Random(1)
    plans = Plans(torch.device("cpu"), torch.bfloat16)
    batch = pack([work(rng, 700, 0, new=600), work(rng, 90, 7), work(rng, 33, 0, new=20)], SIZE)
    plan = plans.plan(batch, SHAPE)
    assert plan.bucket is None and plan.split is not None and plan.whole is not None
    check(batch.tensors(), plan)
    assert batch.logit_rows is not None and plan.logit_rows is not None
    assert plan.logit_rows.tolist() == batch.logit_rows


def test_short_prompts_are_captured_in_the_plans_that_were_warmed() -> None:
    rng = random.Random(2)
    plans = Plans(torch.device("cpu"), torch.bfloat16)
    warmed = list(plans.empty(SHAPE, SIZE, 600))
    for plan in warmed:
        plan.upload()
    assert {plan.num_rows for plan in warmed} == set(ROW_BUCKETS)
    assert all((plan.slots == -1).all() and not plan.prefix_lens.any() for plan in warmed)
    for works in ([work(rng, 60, 0, new=60)], [work(rng, 598, 0), work(rng, 100, 7, new=90)], [work(rng, 40, 12)]):
        batch = pack(works, SIZE)
        plan = plans.plan(batch, SHAPE)
        assert any(plan is each for each in warmed)
        check(batch.tensors(), plan)
