"""Texts in C against texts in Python: whatever happens to them, they draft the same, to the last bit."""

from __future__ import annotations

from collections.abc import Callable
from ctypes import PyDLL
from functools import partial
from typing import TypeVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from foredraft.backends.native import library as native_library
from foredraft.kernels.build import Level
from foredraft.params import SamplingParams
from foredraft.proposers import suffix_native
from foredraft.proposers.suffix import Suffix
from foredraft.proposers.suffix_native import NativeText, library_of_texts, native_texts
from foredraft.proposers.suffix_text import PlainText, SuffixOptions
from foredraft.types import Commit, Sequence
from tests.backends import needs_native
from tests.native.conftest import LEVELS

pytestmark = needs_native

_T = TypeVar("_T", NativeText, PlainText)

SALTS = ("", "other")
options = st.builds(
    SuffixOptions,
    k=st.sampled_from([1, 16, 64]),
    min_n=st.integers(1, 3),
    max_n=st.sampled_from([3, 7, 16, 32]),
    depth=st.sampled_from([0.4, 1.0, 3.0, 64.0]),
    min_score=st.sampled_from([1e-6, 0.01, 0.1, 0.5]),
    store=st.sampled_from([0, 60, 100_000]),
    store_doubt=st.sampled_from([1.0, 1.7]),
    tree=st.sampled_from(["dynamic", "chain"]),
)
passages = st.lists(st.integers(0, 3), min_size=1, max_size=6)
repeated = st.builds(lambda passage, times: passage * times, passages, st.integers(1, 20))
# of which of three sequences: tokens to take back, tokens to add, whether it ends, and the budget of its draft
steps = st.lists(
    st.tuples(st.integers(0, 2), st.integers(0, 9), repeated, st.booleans(), st.sampled_from([0, 5, 64])), max_size=40
)


def recorded_suffix(new_text: Callable[[], _T], options: SuffixOptions) -> tuple[Suffix, list[_T]]:
    """A proposer that holds texts of one kind, and these texts in the order in which they were made."""
    texts: list[_T] = []

    def make() -> _T:
        texts.append(new_text())
        return texts[-1]

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("foredraft.proposers.suffix.native_texts", lambda options: make)
        return Suffix(options), texts


def both_kinds(options: SuffixOptions) -> tuple[Suffix, Suffix, list[NativeText], list[PlainText]]:
    new_native = native_texts(options)
    assert new_native is not None
    native, native_ones = recorded_suffix(new_native, options)
    plain, plain_ones = recorded_suffix(partial(PlainText, options), options)
    return native, plain, native_ones, plain_ones


def new_sequence(id: int) -> Sequence:
    params = SamplingParams(cache_salt=SALTS[id % 2]).resolved({})
    return Sequence(id, "", 0, [0], 1, params, seed=0, max_tokens=999)


@given(options, steps)
def test_drafts_are_those_of_python(options: SuffixOptions, steps: list[tuple[int, int, list[int], bool, int]]) -> None:
    native, plain, native_ones, plain_ones = both_kinds(options)
    sequences = [new_sequence(id) for id in range(3)]
    for id, taken_back, added, ends, budget in steps:
        sequence = sequences[id]
        del sequence.token_ids[max(1, len(sequence.token_ids) - taken_back) :]
        sequence.token_ids += added
        for each in sequences:
            assert native.propose([each], [budget], 0.0) == plain.propose([each], [budget], 0.0)
        if ends:
            for proposer in (native, plain):
                proposer.observe([Commit(sequence, (), (), (), "stop")])
                proposer.release([id])
            sequences[id] = new_sequence(id)
    for one, other in zip(plain_ones, native_ones, strict=True):
        assert (other.start, other.end, other.sizes()[0]) == (one.start, one.end, len(one.tokens))


@pytest.mark.parametrize("level", LEVELS, ids=lambda level: level.name)
def test_every_level_drafts_the_same(level: Level, monkeypatch: pytest.MonkeyPatch) -> None:
    library = native_library.open_library(level.library, PyDLL)
    monkeypatch.setattr(suffix_native, "library_of_texts", lambda: library)
    native, plain, _, _ = both_kinds(SuffixOptions(min_score=0.001))
    text = [place * place * place % 1009 % 7 for place in range(2000)]
    for id, length in enumerate(range(50, 2000, 50)):
        sequence = new_sequence(2 * id)
        sequence.token_ids += text[length // 2 : length]
        (draft,), (expected,) = (proposer.propose([sequence], [16], 0.0) for proposer in (native, plain))
        assert draft == expected
        for proposer in (native, plain):
            proposer.observe([Commit(sequence, (), (), (), "stop")])
    assert len(draft) == 16


@given(st.lists(st.tuples(st.sampled_from(["extend", "forget"]), st.integers(0, 20)), max_size=40))
def test_forgotten_tokens_leave_nothing_behind(changes: list[tuple[str, int]]) -> None:
    new_text = native_texts(SuffixOptions(min_n=1, max_n=4))
    assert new_text is not None
    text = new_text()
    for change, amount in changes:
        if change == "extend":
            text.extend([token % 3 for token in range(amount)])
        else:
            text.forget(min(amount, text.end - text.start))
        remembered = text.end - text.start
        num_tokens, num_grams = text.sizes()
        assert num_tokens <= 2 * remembered + 1 and num_grams <= 3 * remembered
    text.forget(text.end - text.start)
    assert text.sizes() == (0, 0)


def test_more_than_there_is_cannot_be_forgotten() -> None:
    new_text = native_texts(SuffixOptions())
    assert new_text is not None
    text = new_text()
    text.extend([1, 2, 3])
    with pytest.raises(ValueError, match="4 tokens cannot be forgotten of 3"):
        text.forget(4)
    assert (text.start, text.end) == (0, 3)


def test_without_a_library_python_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native_library, "sources_digest", lambda: "of another day")
    with pytest.raises(OSError, match="other sources"):
        native_library.open_library(LEVELS[0].library, PyDLL)
    library_of_texts.cache_clear()
    try:
        assert native_texts(SuffixOptions()) is None
        sequence = new_sequence(0)
        sequence.token_ids += [1, 2, 3, 4, 1, 2, 3]
        assert Suffix(SuffixOptions()).propose([sequence], [1], 0.0)[0].tokens == (4,)
    finally:
        library_of_texts.cache_clear()
