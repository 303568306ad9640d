"""What a row of a head reads: parts of a cache at the slot of the key before its own, on every backend."""

from __future__ import annotations

import pytest
import torch

from foredraft.backends.base import Backend
from foredraft.backends.choose import choose_backend
from foredraft.batch import ForwardBatch
from tests.backends import BACKENDS, needs_native

BLOCK_SIZE = 4


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> Backend:
    return choose_backend(request.param, "bfloat16", torch.device("cpu"), 2)


def test_every_row_reads_the_slot_before_its_own_key(backend: Backend) -> None:
    """Sequence 0 has five tokens and a draft tree, its nodes at the offsets 5, 6 and 7."""
    #              prefix, path
    rows = [
        (5, []),  # the last token
        (5, [5]),  # a node behind it
        (5, [5, 7]),  # a node behind node 5, not behind its neighbour 6
        (1, []),  # a first token: nothing is before it
        (0, []),  # only fills a plan up
    ]
    assert previous_slots(backend, batch(rows)) == [11, 4, 5, 8, 8]


def test_a_row_that_fills_a_plan_up_reads_no_slot_of_an_earlier_batch(backend: Backend) -> None:
    """Its path is left from a batch whose nodes lay in blocks behind those that the taps have room for."""
    rows = batch([(0, [7]), (1, [7])])
    rows.path_lens.zero_()
    assert previous_slots(backend, rows) == [8, 8]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_cache_is_read_in_parts(backend: Backend, dtype: torch.dtype) -> None:
    cache = torch.randn(9, 3, 20).to(dtype)
    if cache.dtype is torch.float32 and backend.activation_dtype is not torch.float32:
        cache = cache.bfloat16().float()
    slots = torch.tensor([4, 0, 8, 4])
    rows = backend.read(cache, None, slots)
    assert rows.dtype is backend.activation_dtype and torch.equal(rows.float(), cache[slots].flatten(1).float())
    some = backend.read(cache, torch.tensor([2, 0]), slots)
    assert torch.equal(some.float(), torch.cat([cache[slots, 2], cache[slots, 0]], 1).float())


@needs_native
def test_slots_and_parts_that_are_not_there_are_an_error() -> None:
    native = choose_backend("native", "bfloat16", torch.device("cpu"), 2)
    cache = torch.zeros(9, 3, 20)
    for parts, slots in ((None, [9]), (None, [-1]), ([3], [0]), ([-1], [0])):
        with pytest.raises(ValueError, match="outside its table"):
            native.read(cache, None if parts is None else torch.tensor(parts), torch.tensor(slots))
    with pytest.raises(ValueError, match="outside its table"):
        native.read_previous(cache, None, batch([(5, [40, 41])]))
    with pytest.raises(ValueError, match="must be"):
        native.read(cache[:, 0], None, torch.tensor([0]))
    with pytest.raises(ValueError, match="must be"):
        native.read(cache.double(), None, torch.tensor([0]))


def previous_slots(backend: Backend, rows: ForwardBatch) -> list[float]:
    """A cache of slots' own numbers tells which were read."""
    cache = torch.arange(12, dtype=backend.activation_dtype)[:, None, None]
    return backend.read_previous(cache.contiguous(), None, rows)[:, 0].tolist()


def batch(rows: list[tuple[int, list[int]]]) -> ForwardBatch:
    count, depth = len(rows), max(len(path) for _, path in rows)
    return ForwardBatch(
        token_ids=torch.zeros(count, dtype=torch.int64),
        positions=torch.zeros(count, dtype=torch.int64),
        slots=torch.zeros(count, dtype=torch.int64),
        sequences=torch.zeros(count, dtype=torch.int32),
        block_tables=torch.tensor([[2, 1]], dtype=torch.int32),
        prefix_lens=torch.tensor([prefix for prefix, _ in rows], dtype=torch.int32),
        paths=torch.tensor([path + [0] * (depth - len(path)) for _, path in rows], dtype=torch.int32),
        path_lens=torch.tensor([len(path) for _, path in rows], dtype=torch.int32),
        logit_rows=None,
        block_size=BLOCK_SIZE,
        max_keys=8,
    )
