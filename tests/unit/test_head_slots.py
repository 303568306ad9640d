"""Which slot a row of a head reads: that of the key before its own."""

from __future__ import annotations

import torch

from foredraft.batch import ForwardBatch
from foredraft.models.heads.weights import previous_slots

BLOCK_SIZE = 4


def test_every_row_reads_the_slot_before_its_own_key() -> None:
    """Sequence 0 has five tokens and a draft tree, its nodes at the offsets 5, 6 and 7."""
    #              prefix, path
    rows = [
        (5, []),  # the last token
        (5, [5]),  # a node behind it
        (5, [5, 7]),  # a node behind node 5, not behind its neighbour 6
        (1, []),  # a first token: nothing is before it
        (0, []),  # only fills a plan up
    ]
    assert previous_slots(batch(rows)).tolist() == [11, 4, 5, 8, 8]


def test_a_row_that_fills_a_plan_up_reads_no_slot_of_an_earlier_batch() -> None:
    """Its path is left from a batch whose nodes lay in blocks behind those that the taps have room for."""
    rows = batch([(0, [7]), (1, [7])])
    rows.path_lens.zero_()
    assert previous_slots(rows).tolist() == [8, 8]


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
