"""The block pool alone: who is forgotten first, what is found again, what is never found."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from foredraft.engine.blocks import BlockPool
from foredraft.prefix import root_name
from foredraft.types import Sequence
from tests.unit.unit_helpers import make_sequence


def computed(pool: BlockPool, tokens: Iterable[int], id: int) -> Sequence:
    """A sequence whose tokens have all been computed in blocks of their own or found ones."""
    sequence = make_sequence(tokens, id=id)
    sequence.num_computed_tokens = pool.match_prefix(sequence)
    assert pool.reserve(sequence, sequence.num_tokens)
    sequence.num_computed_tokens = sequence.num_tokens
    pool.register(sequence)
    return sequence


def found(pool: BlockPool, tokens: Iterable[int]) -> int:
    """How many tokens of a text the pool would find, leaving the pool as it was but for the order of forgetting."""
    sequence = make_sequence(tokens, id=10_000)
    count = pool.match_prefix(sequence)
    pool.free(sequence)
    return count


def names(pool: BlockPool) -> set[bytes]:
    """Of the blocks that can be found."""
    return set(pool._block_of_name)


class TestReserve:
    def test_covers_the_tokens_with_no_block_too_many(self) -> None:
        pool, sequence = BlockPool(8, 4), make_sequence([1] * 9)
        for tokens, blocks in [(0, 0), (1, 1), (4, 1), (5, 2), (9, 3)]:
            assert pool.reserve(sequence, tokens)
            assert len(sequence.block_table) == blocks
            assert pool.num_free_blocks == 8 - blocks

    def test_what_is_reserved_already_is_not_reserved_again(self) -> None:
        pool, sequence = BlockPool(8, 4), make_sequence([1] * 9)
        pool.reserve(sequence, 9)
        table = list(sequence.block_table)
        assert pool.reserve(sequence, 3)
        assert list(sequence.block_table) == table

    def test_is_all_or_nothing(self) -> None:
        pool = BlockPool(4, 2)
        first, second = make_sequence([1], id=0), make_sequence([1], id=1)
        assert pool.reserve(first, 5)
        assert not pool.reserve(second, 3)
        assert list(second.block_table) == []
        assert pool.num_free_blocks == 1
        assert pool.reserve(second, 2)
        assert pool.num_free_blocks == 0
        pool.check_integrity([first, second])


class TestTruncate:
    def test_gives_back_only_blocks_that_lie_wholly_beyond(self) -> None:
        pool, sequence = BlockPool(8, 4), make_sequence([1])
        pool.reserve(sequence, 16)
        table = list(sequence.block_table)
        for tokens, blocks in [(16, 4), (13, 4), (12, 3), (5, 2), (1, 1), (0, 0)]:
            pool.truncate(sequence, tokens)
            assert list(sequence.block_table) == table[:blocks]
            pool.check_integrity([sequence])

    def test_refuses_to_cut_named_blocks(self) -> None:
        pool = BlockPool(8, 4)
        sequence = computed(pool, range(8), id=0)
        with pytest.raises(AssertionError, match="never cut"):
            pool.truncate(sequence, 4)

    def test_what_was_never_named_is_used_up_first(self) -> None:
        pool = BlockPool(3, 2)
        pool.free(computed(pool, [1, 2], id=0))
        other = make_sequence([9], id=1)
        pool.reserve(other, 4)
        pool.truncate(other, 0)
        pool.reserve(other, 4)  # the two nameless blocks again
        assert found(pool, [1, 2, 3]) == 2


class TestPrefix:
    def test_is_found_after_its_holder_has_gone(self) -> None:
        pool = BlockPool(8, 4)
        first = computed(pool, range(10), id=0)
        table = list(first.block_table)
        pool.free(first)
        assert pool.num_free_blocks == 8
        second = make_sequence([*range(10), 99], id=1)
        assert pool.match_prefix(second) == 8
        assert list(second.block_table) == table[:2]
        assert pool.num_free_blocks == 6
        second.num_computed_tokens = 8
        pool.check_integrity([second])

    def test_is_shared_while_its_holder_runs(self) -> None:
        pool = BlockPool(8, 4)
        first, second = computed(pool, range(9), id=0), make_sequence(range(12), id=1)
        second.num_computed_tokens = pool.match_prefix(second)
        assert second.num_computed_tokens == 8
        assert list(second.block_table) == list(first.block_table[:2])
        pool.check_integrity([first, second])
        pool.free(first)
        assert pool.num_free_blocks == 6
        pool.check_integrity([second])

    @pytest.mark.parametrize(("length", "hit"), [(1, 0), (4, 0), (5, 4), (8, 4), (9, 8), (12, 8), (13, 12), (14, 12)])
    def test_leaves_at_least_one_token_to_compute(self, length: int, hit: int) -> None:
        pool = BlockPool(8, 4)
        pool.free(computed(pool, range(12), id=0))
        assert found(pool, range(length)) == hit

    def test_stops_at_the_first_difference(self) -> None:
        pool = BlockPool(8, 2)
        pool.free(computed(pool, [1, 2, 3, 4, 5, 6], id=0))
        assert found(pool, [1, 2, 3, 9, 5, 6, 7]) == 2
        assert found(pool, [1, 9, 3, 4, 5, 6, 7]) == 0

    def test_depends_on_everything_before(self) -> None:
        pool = BlockPool(8, 2)
        pool.free(computed(pool, [1, 2, 3, 4], id=0))
        pool.free(computed(pool, [5, 6, 7, 8], id=1))
        assert found(pool, [5, 6, 3, 4, 9]) == 2
        assert found(pool, [3, 4, 9]) == 0

    def test_token_ids_do_not_run_together(self) -> None:
        """Ids are hashed at full width: 1 then 0 is not 0 then 1, nor is 256 one byte with a carry."""
        pool = BlockPool(8, 2)
        pool.free(computed(pool, [1, 0], id=0))
        for other in ([0, 1], [256, 0], [1, 1 << 32], [1 << 16, 0]):
            assert found(pool, [*other, 5]) == 0

    def test_only_computed_tokens_are_named(self) -> None:
        pool, sequence = BlockPool(8, 2), make_sequence([1, 2, 3, 4, 5], id=0)
        pool.reserve(sequence, 5)
        sequence.num_computed_tokens = 3
        pool.register(sequence)
        assert found(pool, [1, 2, 3, 4, 5]) == 2
        sequence.num_computed_tokens = 4
        pool.register(sequence)
        assert found(pool, [1, 2, 3, 4, 5]) == 4

    def test_output_is_found_like_prompt(self) -> None:
        pool, sequence = BlockPool(8, 2), make_sequence([1], [2, 3, 4], id=0)
        pool.reserve(sequence, 4)
        sequence.num_computed_tokens = 4
        pool.register(sequence)
        pool.free(sequence)
        assert found(pool, [1, 2, 3, 4, 5]) == 4

    def test_blocks_are_shared_among_requests_of_equal_salts(self) -> None:
        pool = BlockPool(8, 2)
        for id, salt, count in [(0, "one", 0), (1, "other", 0), (2, "one", 4), (3, "", 0), (4, "other", 4)]:
            sequence = make_sequence([1, 2, 3, 4, 5], id=id, cache_salt=salt)
            assert pool.match_prefix(sequence) == count
            assert pool.reserve(sequence, 5)
            sequence.num_computed_tokens = 5
            pool.register(sequence)
            pool.free(sequence)

    def test_the_salts_of_pool_and_request_do_not_run_into_each_other(self) -> None:
        assert len({root_name("ab", "c"), root_name("a", "bc"), root_name("", "abc")}) == 3

    def test_the_salt_separates(self) -> None:
        """A name of one salt means nothing under another."""
        pools = [BlockPool(8, 2, salt) for salt in ("", "one", "other")]
        for pool in pools:
            computed(pool, [1, 2], id=0)
        assert len(set().union(*map(names, pools))) == 3
        other = BlockPool(8, 2, "one")
        computed(other, [1, 2], id=0)
        assert names(other) == names(pools[1])

    def test_is_off_when_switched_off(self) -> None:
        pool = BlockPool(8, 2, prefix_caching=False)
        pool.free(computed(pool, [1, 2, 3, 4], id=0))
        assert found(pool, [1, 2, 3, 4]) == 0

    def test_a_request_for_prompt_logprobs_computes_everything_but_shares_it(self) -> None:
        pool = BlockPool(8, 2)
        pool.free(computed(pool, [1, 2, 3, 4], id=0))
        querying = make_sequence([1, 2, 3, 4], id=1, prompt_logprobs=1)
        assert pool.match_prefix(querying) == 0
        assert list(querying.block_table) == []
        pool.reserve(querying, 4)
        querying.num_computed_tokens = 4
        pool.register(querying)
        pool.check_integrity([querying])


class TestDuplicateNames:
    """Two sequences compute the same block side by side: the first one's keeps the name, the second's is nameless."""

    def side_by_side(self, pool: BlockPool) -> tuple[Sequence, Sequence]:
        first, second = (make_sequence([1, 2, 3], id=id) for id in range(2))
        for sequence in (first, second):
            assert pool.match_prefix(sequence) == 0
            pool.reserve(sequence, 3)
        for sequence in (first, second):
            sequence.num_computed_tokens = 3
            pool.register(sequence)
        return first, second

    def test_the_first_block_keeps_the_name(self) -> None:
        pool = BlockPool(8, 2)
        first, second = self.side_by_side(pool)
        pool.check_integrity([first, second])
        third = make_sequence([1, 2, 3], id=2)
        assert pool.match_prefix(third) == 2
        assert list(third.block_table) == list(first.block_table[:1])

    def test_the_second_may_go_first(self) -> None:
        pool = BlockPool(8, 2)
        first, second = self.side_by_side(pool)
        pool.free(second)
        assert found(pool, [1, 2, 3]) == 2
        pool.check_integrity([first])

    def test_failure_of_the_second_does_not_forget_the_first(self) -> None:
        pool = BlockPool(8, 2)
        first, second = self.side_by_side(pool)
        pool.free(second, forget=True)
        assert found(pool, [1, 2, 3]) == 2
        pool.check_integrity([first])

    def test_failure_of_the_first_forgets_its_block(self) -> None:
        pool = BlockPool(8, 2)
        first, second = self.side_by_side(pool)
        pool.free(first, forget=True)
        assert found(pool, [1, 2, 3]) == 0
        pool.check_integrity([second])


class TestForgetting:
    """A free block is remembered until its place is needed."""

    def test_least_recently_used_first(self) -> None:
        pool = BlockPool(3, 2)
        texts = [[10, 11], [20, 21], [30, 31]]
        for id, text in enumerate(texts):
            pool.free(computed(pool, text, id=id))
        assert found(pool, [*texts[0], 0]) == 2  # and thereby used: now the second is the oldest
        pool.reserve(make_sequence([0], id=5), 2)
        assert [found(pool, [*text, 0]) for text in texts] == [2, 0, 2]

    def test_the_shared_head_is_forgotten_last(self) -> None:
        pool = BlockPool(4, 2)
        pool.free(computed(pool, range(8), id=0))
        other = make_sequence([99], id=1)
        for blocks, remembered in [(1, 6), (2, 4), (3, 2), (4, 0)]:
            pool.reserve(other, 2 * blocks)
            assert len(other.block_table) == blocks
            assert 2 * len(names(pool)) == remembered
            pool.check_integrity([other])
        assert found(pool, range(8)) == 0

    def test_what_is_remembered_is_a_prefix(self) -> None:
        """Of a text of four blocks the head stays: a tail without its head could never be found."""
        pool = BlockPool(5, 2)
        pool.free(computed(pool, range(8), id=0))
        pool.reserve(make_sequence([99], id=1), 6)  # one unused block and the two last of the text
        assert found(pool, [*range(8), 8]) == 4

    def test_held_blocks_are_never_forgotten(self) -> None:
        pool = BlockPool(4, 2)
        holder = computed(pool, range(4), id=0)
        other = make_sequence([99], id=1)
        assert not pool.reserve(other, 6)
        assert pool.reserve(other, 4)
        assert found(pool, [*range(4), 4]) == 4
        pool.check_integrity([holder, other])

    def test_a_failed_sequence_is_forgotten_at_once(self) -> None:
        pool = BlockPool(8, 2)
        pool.free(computed(pool, range(6), id=0), forget=True)
        assert found(pool, range(6)) == 0
        assert pool.num_free_blocks == 8
        pool.check_integrity([])

    def test_what_is_not_remembered_stays_for_whoever_holds_it_and_no_longer(self) -> None:
        pool = BlockPool(8, 2)
        first, second = computed(pool, range(7), id=0), computed(pool, range(7), id=1)
        pool.free(first, forget=True)
        assert found(pool, [*range(6), 6]) == 6
        pool.free(second, forget=True)
        assert found(pool, [*range(6), 6]) == 0 and not names(pool)
        pool.check_integrity([])

    def test_what_is_forgotten_is_used_up_before_what_is_remembered(self) -> None:
        pool = BlockPool(4, 2)
        pool.free(computed(pool, range(4), id=0))
        pool.free(computed(pool, range(10, 14), id=1), forget=True)
        assert pool.reserve(make_sequence([99], id=2), 4)
        assert found(pool, [*range(4), 4]) == 4

    def test_a_failed_sequence_takes_nothing_from_one_that_shares_its_head(self) -> None:
        pool = BlockPool(8, 2)
        first = computed(pool, range(6), id=0)
        second = computed(pool, [0, 1, 2, 3, 9, 9], id=1)
        pool.free(second, forget=True)
        pool.check_integrity([first])
        assert list(first.block_table) == [0, 1, 2]
        assert pool.num_free_blocks == 5
        assert found(pool, [0, 1, 2, 3, 9, 9, 9]) in (0, 4)  # its own block is gone; the head may stay, being shared

    def test_a_failed_sequence_may_share_with_two_others(self) -> None:
        pool = BlockPool(8, 2)
        sequences = [computed(pool, range(5), id=id) for id in range(3)]
        pool.free(sequences.pop(), forget=True)
        pool.check_integrity(sequences)


class TestIntegrity:
    """check_integrity must be able to fail."""

    def test_a_leak(self) -> None:
        pool, sequence = BlockPool(4, 2), make_sequence([1])
        pool.reserve(sequence, 4)
        sequence.block_table.pop()
        with pytest.raises(AssertionError, match="miscounted"):
            pool.check_integrity([sequence])

    def test_a_block_held_twice(self) -> None:
        pool, sequence = BlockPool(4, 2), make_sequence([1])
        pool.reserve(sequence, 2)
        sequence.block_table *= 2
        with pytest.raises(AssertionError, match="twice"):
            pool.check_integrity([sequence])

    def test_a_block_both_free_and_held(self) -> None:
        pool, sequence = BlockPool(4, 2), make_sequence([1])
        pool.reserve(sequence, 2)
        pool._free[sequence.block_table[0]] = None
        with pytest.raises(AssertionError, match="given twice"):
            pool.check_integrity([sequence])

    def test_sharing_without_a_name(self) -> None:
        pool, first, second = BlockPool(4, 2), make_sequence([1], id=0), make_sequence([1], id=1)
        pool.reserve(first, 2)
        second.block_table = list(first.block_table)
        pool._holders[first.block_table[0]] = 2
        with pytest.raises(AssertionError, match="without a name"):
            pool.check_integrity([first, second])

    def test_a_name_too_early(self) -> None:
        pool = BlockPool(4, 2)
        sequence = computed(pool, [1, 2, 3, 4], id=0)
        sequence.num_computed_tokens = 3
        with pytest.raises(AssertionError, match="before it is full"):
            pool.check_integrity([sequence])
