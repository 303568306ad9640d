"""Which K and V a drafting model may read: never those of another text, and never those of other tokens."""

from __future__ import annotations

from foredraft.params import SamplingParams
from foredraft.proposers.accounts import Accounts
from foredraft.types import Sequence

SIZE = 4


def text(sequence_id: int, tokens: list[int], blocks: list[int]) -> Sequence:
    """A text whose last token is the target's next one to run."""
    return Sequence(
        sequence_id, "", 0, tokens, 1, SamplingParams(), 0, 99, num_computed_tokens=len(tokens) - 1, block_table=blocks
    )


def test_a_text_is_known_as_far_as_it_went_as_guessed() -> None:
    accounts = Accounts(SIZE)
    before = text(1, [1, 2, 3, 4, 5], [7, 3, 9])
    assert accounts.known_tokens(before) == 0
    accounts.wrote(before, [1, 2, 3, 4, 5, 6, 8], 9)
    assert accounts.known_tokens(text(1, [1, 2, 3, 4, 5, 6, 7, 1], [7, 3])) == 6
    assert accounts.known_tokens(text(1, [1, 2, 3, 4, 5, 6, 8, 1], [7, 3])) == 7


def test_a_new_text_is_known_by_the_blocks_that_it_shares() -> None:
    accounts = Accounts(SIZE)
    first = text(1, [1, 2, 3, 4, 5], [7, 3])
    accounts.known_tokens(first)
    accounts.wrote(first, [1, 2, 3, 4, 5], 8)
    assert accounts.known_tokens(text(2, [1, 2, 3, 4, 9], [7, 5])) == 4
    assert accounts.known_tokens(text(3, [1, 2, 3, 4, 9], [6, 5])) == 0
    assert accounts.known_tokens(text(4, [1, 2, 2, 4, 9], [7, 5])) == 0


def test_guesses_in_a_block_that_served_another_text_are_not_known() -> None:
    """The block behind the text goes back after a step; another text's guesses are written there, and it returns."""
    accounts = Accounts(SIZE)
    first, second = text(1, [1, 2, 3, 4], [7, 3]), text(2, [5, 5, 5, 5], [8, 3])
    for sequence in (first, second):
        accounts.known_tokens(sequence)
    accounts.wrote(first, [1, 2, 3, 4, 5, 6], 8)
    assert accounts.known_tokens(text(1, [1, 2, 3, 4, 5, 6, 7], [7, 3])) == 6
    assert accounts.known_tokens(text(1, [1, 2, 3, 4, 5, 6, 7], [7, 9])) == 4
    accounts.wrote(second, [5, 5, 5, 5, 6, 6], 8)
    assert accounts.known_tokens(text(1, [1, 2, 3, 4, 5, 6, 7], [7, 3])) == 4


def test_a_block_of_guesses_that_came_otherwise_keeps_no_name() -> None:
    """A stage in the middle of a chain is asked with guesses as if they were text."""
    accounts = Accounts(SIZE)
    with_guesses = text(1, [1, 2, 3, 4, 5, 6, 7, 8, 9], [7, 3, 2])
    accounts.known_tokens(with_guesses)
    accounts.wrote(with_guesses, with_guesses.token_ids, 12)
    otherwise = text(1, [1, 2, 3, 4, 5, 0, 0, 0, 0], [7, 3, 2])
    accounts.known_tokens(otherwise)
    accounts.wrote(otherwise, otherwise.token_ids, 12)
    assert accounts.known_tokens(text(2, [1, 2, 3, 4, 5, 6, 7, 8, 9], [7, 3, 2])) == 4
    assert accounts.known_tokens(text(3, [1, 2, 3, 4, 5, 0, 0, 0, 1], [7, 3, 2])) == 8
