"""What `suffix` remembers of finished answers, for how long, and for whom."""

from __future__ import annotations

import gc
from collections.abc import Callable
from functools import partial
from typing import Any, cast
from weakref import WeakSet

import pytest

from foredraft.params import SamplingParams
from foredraft.proposers.suffix import Suffix
from foredraft.proposers.suffix_native import NativeText, native_texts
from foredraft.proposers.suffix_text import PlainText, SuffixOptions, Text
from foredraft.types import Commit, Sequence
from tests.backends import needs_native


class Texts(WeakSet[Text]):
    """All texts that are held: one per running sequence, and one of finished answers per salt."""

    @property
    def num_tokens(self) -> int:
        gc.collect()
        return sum(text.end - text.start for text in self)

    def __len__(self) -> int:
        gc.collect()
        return super().__len__()


@pytest.fixture(autouse=True, params=["python", pytest.param("c", marks=needs_native)])
def texts(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Texts:
    """Held by code in either language."""
    texts = Texts()

    def recorded(options: SuffixOptions) -> Callable[[], Text]:
        new_text = native_texts(options) if request.param == "c" else partial(PlainText, options)
        assert new_text is not None

        def make() -> Text:
            text = new_text()
            texts.add(text)
            return text

        return make

    monkeypatch.setattr("foredraft.proposers.suffix.native_texts", recorded)
    return texts


def plain_sequence(tokens: list[int], id: int = 0, **fields: Any) -> Sequence:
    return Sequence(id, "", 0, tokens, 1, SamplingParams(**fields).resolved({}), seed=0, max_tokens=999)


def remember(proposer: Suffix, tokens: list[int], **fields: Any) -> None:
    """Let a request end with these tokens."""
    proposer.observe([Commit(plain_sequence([7, *tokens], **fields), (), (), (), "stop")])


def knows(proposer: Suffix, tokens: list[int], **fields: Any) -> bool:
    """Whether a new request that ends with these tokens gets a draft."""
    (draft,) = proposer.propose([plain_sequence([7, *tokens], **fields)], [8], 0.0)
    proposer.release([0])
    return len(draft) > 0


def num_held(text: Text) -> int:
    """Of how many tokens there is memory."""
    return text.sizes()[0] if isinstance(text, NativeText) else len(cast(PlainText, text).tokens)


def test_the_suffix_store_forgets_the_oldest_answers(texts: Texts) -> None:
    proposer = Suffix(SuffixOptions(store=100))
    for id in range(50):
        remember(proposer, [1000 + 37 * id + j for j in range(30)])
    (store,) = texts
    assert store.end - store.start <= 100 and num_held(store) <= 200
    assert len(store) <= 100 * len(proposer.options.lengths)
    assert not knows(proposer, [1001, 1002, 1003])
    assert knows(proposer, [1000 + 37 * 49 + 1, 1000 + 37 * 49 + 2])
    remember(proposer, [*range(99)], cache_salt="other")  # with its end as much as there is room for
    assert len(store) == 0 and num_held(store) == 0, "what is forgotten leaves nothing behind"
    del store
    assert len(texts) == 1


def test_answers_are_shared_only_among_equal_salts() -> None:
    proposer = Suffix(SuffixOptions(store=100))
    remember(proposer, [10, 11, 12, 13, 14], cache_salt="one")
    assert knows(proposer, [10, 11, 12], cache_salt="one")
    assert not knows(proposer, [10, 11, 12], cache_salt="other")
    assert not knows(proposer, [10, 11, 12])
    remember(proposer, [10, 11, 12, 13, 14])
    assert knows(proposer, [10, 11, 12])
    proposer.clear()
    assert not knows(proposer, [10, 11, 12], cache_salt="one")


def test_an_answer_that_is_not_to_be_remembered_takes_no_place() -> None:
    proposer = Suffix(SuffixOptions(store=100))
    remember(proposer, [10, 11, 12, 13, 14])
    for _ in range(50):
        remember(proposer, [20, 21, 22, 23, 24], remember=False)
    assert knows(proposer, [10, 11, 12]) and not knows(proposer, [20, 21, 22])


def test_stores_of_all_salts_are_limited_together(texts: Texts) -> None:
    proposer = Suffix(SuffixOptions(store=100))
    remember(proposer, [10, 11, 12, 13, 14], cache_salt="0")
    for salt in range(1, 60):
        remember(proposer, [*range(20, 30)], cache_salt=str(salt))
    assert len(texts) == 9 and texts.num_tokens == 99, "a salt goes with its last answer"
    assert [knows(proposer, [20, 21, 22], cache_salt=str(salt)) for salt in (0, 50, 51, 59)] == [
        False,
        False,
        True,
        True,
    ]


def test_one_salt_too_many_costs_only_the_salt_that_was_used_least_recently(
    texts: Texts, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("foredraft.proposers.suffix._MOST_SALTS", 3)
    proposer = Suffix(SuffixOptions(store=100))
    remember(proposer, [10, 11, 12, 13], cache_salt="often")
    for salt in ("idle", "read"):
        for first in (20, 30):
            remember(proposer, [*range(first, first + 4)], cache_salt=salt)
    remember(proposer, [14, 15, 16, 17], cache_salt="often")
    assert knows(proposer, [20, 21, 22], cache_salt="read")
    remember(proposer, [40, 41, 42, 43], cache_salt="new")
    assert len(texts) == 3 and texts.num_tokens == 25
    assert not knows(proposer, [20, 21, 22], cache_salt="idle") and knows(proposer, [40, 41, 42], cache_salt="new")
    assert knows(proposer, [10, 11, 12], cache_salt="often") and knows(proposer, [14, 15, 16], cache_salt="often")
    assert knows(proposer, [30, 31, 32], cache_salt="read")
    for first in (100, 200, 300):
        remember(proposer, [*range(first, first + 24)], cache_salt="new")
    assert texts.num_tokens == 100 and knows(proposer, [10, 11, 12], cache_salt="often"), "all of the room can be used"
    remember(proposer, [*range(99)], cache_salt="new")
    assert len(texts) == 1 and texts.num_tokens == 100, "and all of it is given back"


@pytest.mark.parametrize("acceptance", ["rejection", "block"])
def test_what_coins_have_drawn_is_not_remembered(acceptance: str) -> None:
    proposer = Suffix(SuffixOptions())
    remember(proposer, [10, 11, 12, 13, 14], acceptance=acceptance, temperature=0.8)
    assert not knows(proposer, [10, 11, 12])
    remember(proposer, [10, 11, 12, 13, 14], acceptance=acceptance, temperature=0.0)
    assert knows(proposer, [10, 11, 12], acceptance=acceptance, temperature=0.8), "no coin decides at temperature 0"


def test_earlier_answers_can_be_doubted_more_than_the_sequence_itself() -> None:
    def scores(store_doubt: float, tokens: list[int]) -> tuple[float, ...]:
        proposer = Suffix(SuffixOptions(store_doubt=store_doubt))
        remember(proposer, [10, 11, 12, 13, 14])
        (draft,) = proposer.propose([plain_sequence(tokens)], [1], 0.0)
        return draft.scores

    assert scores(4.0, [7, 10, 11, 12]) < scores(1.0, [7, 10, 11, 12]), "known from an earlier answer"
    both = [7, 10, 11, 12, 13, 7, 10, 11, 12]
    assert scores(4.0, both) == scores(1.0, both), "known from the sequence itself"
