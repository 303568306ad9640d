"""The index of n-grams against a search through the whole text."""

from __future__ import annotations

import time

from hypothesis import given
from hypothesis import strategies as st

from foredraft.proposers.occurrences import Occurrences, shared_prefix

LENGTHS = (1, 2, 4)
texts = st.lists(st.integers(0, 2), max_size=40)
changes = st.lists(st.tuples(st.sampled_from(["append", "shrink", "forget"]), st.integers(0, 6)), max_size=40)


def searched(tokens: list[int], start: int, suffix: list[int], n: int) -> list[int]:
    if len(suffix) < n:
        return []
    return [start + end for end in range(n, len(tokens)) if tokens[end - n : end] == suffix[-n:]]


@given(changes)
def test_places_are_those_of_a_full_search(steps: list[tuple[str, int]]) -> None:
    index = Occurrences(LENGTHS)
    tokens: list[int] = []
    start = 0
    for change, amount in steps:
        if change == "append":
            index.extend([amount % 3])
            tokens.append(amount % 3)
        elif change == "shrink":
            length = max(0, len(tokens) - amount)
            index.shrink(length)
            del tokens[length:]
        else:
            count = min(amount, len(tokens))
            index.forget(count)
            del tokens[:count]
            start += count
        assert (index.tokens[index.start - index.offset :], index.start) == (tokens, start)
        assert len(index.tokens) <= 2 * len(tokens) + 1, "what is forgotten goes sooner or later"
        for n in LENGTHS:
            if n & amount:  # others are looked at later, or never
                places = searched(tokens, start, tokens, n)
                assert index.places(tokens, n) == places
                assert index.places(tokens, n, 2) == places[-2:]
    index.forget(len(tokens))
    assert (len(index), index.tokens) == (0, [])


def test_forgetting_costs_the_same_however_often_an_n_gram_occurred() -> None:
    """A text that loops has one n-gram with as many places as tokens. To cut them one by one costs the square."""

    def seconds(size: int) -> float:
        index = Occurrences(LENGTHS)
        index.follow([5] * size)
        assert all(index.places([5] * n, n) for n in LENGTHS)
        started = time.process_time()
        for _ in range(size // 8):
            index.forget(8)
        return time.process_time() - started

    assert min(seconds(64_000) for _ in range(3)) < 25 * min(seconds(8_000) for _ in range(3))


@given(st.lists(texts, max_size=6))
def test_following_a_text_equals_starting_anew(versions: list[list[int]]) -> None:
    index = Occurrences(LENGTHS)
    for text in versions:
        index.follow(text)
        fresh = Occurrences(LENGTHS)
        fresh.follow(text)
        for n in LENGTHS:
            for end in range(n, len(text) + 1):
                assert index.places(text[:end], n) == fresh.places(text[:end], n)
        assert (index.tokens, len(index)) == (fresh.tokens, len(fresh))


@given(texts, texts, st.integers(0, 10))
def test_matches_are_compared_token_by_token(tokens: list[int], suffix: list[int], limit: int) -> None:
    index = Occurrences(LENGTHS)
    index.follow(tokens)
    for place in range(len(tokens) + 1):
        alike = shared_prefix(tokens[:place][::-1], suffix[::-1], place)
        assert index.matched(place, suffix, limit) == min(limit, alike)
