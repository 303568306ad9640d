"""Which K and V a drafting model may read: never those of another text, and never those of other tokens."""

from __future__ import annotations

from foredraft.params import SamplingParams
from foredraft.proposers.model.computed_tokens import ComputedTokens
from foredraft.types import Sequence

SIZE = 4


def text(sequence_id: int, tokens: list[int], blocks: list[int], salt: str = "") -> Sequence:
    """A text whose last token is the target's next one to run."""
    params = SamplingParams(cache_salt=salt)
    return Sequence(
        sequence_id, "", 0, tokens, 1, params, 0, 99, num_computed_tokens=len(tokens) - 1, block_table=blocks
    )


def test_a_text_is_known_as_far_as_it_went_as_drafted() -> None:
    computed = ComputedTokens(SIZE)
    before = text(1, [1, 2, 3, 4, 5], [7, 3, 9])
    assert computed.num_computed(before) == 0
    computed.record(before, 5, [6, 8], 9)
    assert computed.num_computed(text(1, [1, 2, 3, 4, 5, 6, 7, 1], [7, 3])) == 6
    assert computed.num_computed(text(1, [1, 2, 3, 4, 5, 6, 8, 1], [7, 3])) == 7


def test_a_new_text_is_known_by_the_blocks_that_it_shares() -> None:
    computed = ComputedTokens(SIZE)
    first = text(1, [1, 2, 3, 4, 5], [7, 3])
    computed.num_computed(first)
    computed.record(first, 5, [], 8)
    assert computed.num_computed(text(2, [1, 2, 3, 4, 9], [7, 5])) == 4
    assert computed.num_computed(text(3, [1, 2, 3, 4, 9], [6, 5])) == 0
    assert computed.num_computed(text(4, [1, 2, 2, 4, 9], [7, 5])) == 0


def test_what_a_drafting_model_has_computed_is_shared_among_equal_salts() -> None:
    computed = ComputedTokens(SIZE)
    first = text(1, [1, 2, 3, 4, 5], [7, 3], salt="one")
    computed.num_computed(first)
    computed.record(first, 5, [], 8)
    assert computed.num_computed(text(2, [1, 2, 3, 4, 9], [7, 5], salt="one")) == 4
    assert computed.num_computed(text(3, [1, 2, 3, 4, 9], [7, 5], salt="other")) == 0
    assert computed.num_computed(text(4, [1, 2, 3, 4, 9], [7, 5])) == 0


def test_drafts_in_a_block_that_served_another_text_are_not_known() -> None:
    """The block behind the text goes back after a step; another text's guesses are written there, and it returns."""
    computed = ComputedTokens(SIZE)
    first, second = text(1, [1, 2, 3, 4], [7, 3]), text(2, [5, 5, 5, 5], [8, 3])
    for sequence in (first, second):
        computed.num_computed(sequence)
    computed.record(first, 4, [5, 6], 8)
    assert computed.num_computed(text(1, [1, 2, 3, 4, 5, 6, 7], [7, 3])) == 6
    assert computed.num_computed(text(1, [1, 2, 3, 4, 5, 6, 7], [7, 9])) == 4
    computed.record(second, 4, [6, 6], 8)
    assert computed.num_computed(text(1, [1, 2, 3, 4, 5, 6, 7], [7, 3])) == 4


def test_a_block_of_drafts_that_came_otherwise_keeps_no_name() -> None:
    """A stage in the middle of a chain is asked with guesses as if they were text."""
    computed = ComputedTokens(SIZE)
    with_drafts = text(1, [1, 2, 3, 4, 5, 6, 7, 8, 9], [7, 3, 2])
    computed.num_computed(with_drafts)
    computed.record(with_drafts, 9, [], 12)
    otherwise = text(1, [1, 2, 3, 4, 5, 0, 0, 0, 0], [7, 3, 2])
    computed.num_computed(otherwise)
    computed.record(otherwise, 9, [], 12)
    assert computed.num_computed(text(2, [1, 2, 3, 4, 5, 6, 7, 8, 9], [7, 3, 2])) == 4
    assert computed.num_computed(text(3, [1, 2, 3, 4, 5, 0, 0, 0, 1], [7, 3, 2])) == 8


def test_a_long_text_is_known_as_far_as_it_went_as_drafted() -> None:
    """Only the last tokens are compared, and all of them where those differ."""
    computed = ComputedTokens(SIZE)
    tokens, drafted, blocks = list(range(600)), list(range(1000, 1060)), list(range(200))
    computed.num_computed(text(1, tokens, blocks))
    computed.record(text(1, tokens, blocks), 600, drafted, 664)
    for agreed in (0, 1, 30, 60):
        assert computed.num_computed(text(1, [*tokens, *drafted[:agreed], 7], blocks)) == 600 + agreed
    computed.record(text(1, [*tokens, 7, 8], blocks), 602, [9], 664)
    assert computed.num_computed(text(1, [*tokens, 7, 8, 9, 1], blocks)) == 603
    assert computed.num_computed(text(1, [*tokens[:599], 7], blocks)) == 599, "what stands there now is another token"
