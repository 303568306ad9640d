"""Which blocks layers with a window keep: by hand, what the machine of test_scheduler_properties.py does at random."""

from __future__ import annotations

from collections.abc import Sequence as Items

import pytest

from foredraft.engine.blocks import BlockPool
from foredraft.engine.window_blocks import NONE, WindowBlocks
from foredraft.types import Sequence
from tests.unit.unit_helpers import make_sequence


def make_pool(
    num_window_blocks: int = 6, window: int = 4, num_blocks: int = 32, prefix_caching: bool = True
) -> tuple[BlockPool, WindowBlocks]:
    windows = WindowBlocks(window, 2, num_window_blocks, [NONE] * num_blocks)
    return BlockPool(num_blocks, 2, prefix_caching=prefix_caching, windows=windows), windows


def compute(pool: BlockPool, sequence: Sequence, num_tokens: int, others: Items[Sequence] = ()) -> None:
    """Up to so many tokens, as a step does."""
    assert pool.reserve(sequence, num_tokens)
    sequence.num_computed_tokens = num_tokens
    pool.register(sequence)
    pool.check_integrity([*others, sequence])


def find(pool: BlockPool, sequence: Sequence) -> int:
    sequence.num_computed_tokens = pool.match_prefix(sequence)
    return sequence.num_computed_tokens


def kept_of(windows: WindowBlocks, sequence: Sequence) -> list[bool]:
    return [windows.keeps(block) for block in sequence.block_table]


@pytest.mark.parametrize(
    ("num_computed", "kept"),
    [(3, [1, 1]), (4, [1, 1]), (5, [0, 1, 1]), (6, [0, 1, 1]), (7, [0, 0, 1, 1]), (8, [0, 0, 1, 1])],
)
def test_a_sequence_keeps_the_blocks_that_its_next_row_sees(num_computed: int, kept: list[int]) -> None:
    """The row behind 5 tokens sees the keys 2, 3, 4 and its own."""
    pool, windows = make_pool(prefix_caching=False)
    sequence = make_sequence(range(20))
    for num_tokens in range(1, num_computed + 1):
        compute(pool, sequence, num_tokens)
    assert kept_of(windows, sequence) == [bool(each) for each in kept]
    pool.free(sequence)
    assert windows.num_available == 6 and set(windows.of_block) == {NONE}


def test_blocks_need_window_blocks() -> None:
    pool, windows = make_pool(num_window_blocks=3, prefix_caching=False)
    first, second = make_sequence(range(9), id=0), make_sequence(range(9), id=1)
    compute(pool, first, 4)
    assert (pool.num_free_blocks, pool.num_available_blocks, windows.num_available) == (30, 1, 1)
    assert not pool.reserve(second, 3) and not second.block_table
    assert pool.reserve(second, 2)
    pool.check_integrity([first, second])


def test_what_was_left_behind_stays_until_it_is_needed() -> None:
    """The oldest goes first, and the block stays where other layers need it."""
    pool, windows = make_pool(num_window_blocks=5)
    sequence = make_sequence(range(30))
    for num_tokens in range(2, 17, 2):
        compute(pool, sequence, num_tokens)
    assert kept_of(windows, sequence) == [False, False, False, True, True, True, True, True]
    assert sorted(windows.of_block[block] for block in sequence.block_table[3:]) == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(
    ("lost", "num_found"),
    [([], 16), ([0, 3], 16), ([6], 12), ([7], 14), ([5, 6], 10), ([2, 4, 6], 4), ([0, 2, 4, 6], 0)],
)
def test_a_prefix_is_found_as_far_as_a_window_behind_it_is_whole(lost: list[int], num_found: int) -> None:
    """Behind 16 tokens a row sees the keys from 13 on, in the blocks 6 and 7."""
    pool, windows = make_pool(num_window_blocks=20)
    compute(pool, first := make_sequence(range(17)), 16)
    blocks = list(first.block_table)
    pool.free(first)
    for index in lost:
        windows.forget(blocks[index])
    second = make_sequence([*range(16), 99], id=1)
    assert pool.num_cached_tokens(second) == find(pool, second) == num_found
    pool.check_integrity([second])
    held = blocks[max(0, num_found + 1 - 4) // 2 : num_found // 2]
    assert [block for block in blocks if windows._holders[block]] == held


def test_a_prefix_that_was_lost_is_found_again_once_it_is_computed_again() -> None:
    """Even while somebody holds the blocks that had its names."""
    pool, _ = make_pool(num_window_blocks=8)
    first = make_sequence(range(40), id=0)
    for num_tokens in range(2, 31, 2):
        compute(pool, first, num_tokens)
    second, third = (make_sequence([*range(8), 99], id=id) for id in (1, 2))
    assert find(pool, second) == 0
    compute(pool, second, 8, [first])
    assert find(pool, third) == 8 and list(third.block_table) == list(second.block_table)
    pool.check_integrity([first, second, third])


def test_a_shared_block_is_kept_for_the_one_that_is_behind() -> None:
    pool, windows = make_pool(num_window_blocks=20)
    compute(pool, first := make_sequence(range(30), id=0), 8)
    second = make_sequence([*range(8), 99], id=1)
    assert find(pool, second) == 8
    shared = second.block_table[3]
    compute(pool, first, 20, [second])
    assert windows._holders[shared] == 1
    pool.free(second)
    assert windows._holders[shared] == 0 and windows.keeps(shared)
    pool.check_integrity([first])


def test_nothing_is_kept_of_what_is_not_to_be_found() -> None:
    pool, windows = make_pool(num_window_blocks=20)
    compute(pool, sequence := make_sequence(range(30)), 20)
    assert windows.num_available == 20 - 2
    pool.free(sequence, forget=True)
    assert set(windows.of_block) == {NONE} and windows.num_available == 20
    pool.check_integrity([])
