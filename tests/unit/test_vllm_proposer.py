"""Our proposers, driven as vLLM drives a custom class: a batch of rows that move, come and go, without names."""

from __future__ import annotations

import random
from collections.abc import Iterable
from collections.abc import Sequence as Items
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from foredraft.integrations.vllm import MergedProposer, SuffixProposer, best_path
from foredraft.params import SamplingParams
from foredraft.proposers.base import Proposer
from foredraft.proposers.suffix import Suffix
from foredraft.proposers.suffix_text import SuffixOptions
from foredraft.types import NO_DRAFT, Commit, Draft, Sequence

K = 5
MAX_LEN = 200


def config(k: int = K, max_model_len: int = MAX_LEN) -> Any:
    return SimpleNamespace(
        speculative_config=SimpleNamespace(num_speculative_tokens=k),
        model_config=SimpleNamespace(max_model_len=max_model_len),
    )


class Watched(Proposer):
    """Proposes nothing; remembers which sequences it was asked about in a step, and which have ended."""

    name = "watched"
    num_lookahead_tokens = K

    def __init__(self) -> None:
        self.seen: list[tuple[int, list[int]]] = []  # ids and tokens
        self.ended: set[int] = set()

    def propose(self, sequences: Items[Sequence], budgets: Items[int], min_score: float) -> list[Draft]:
        self.seen += [(sequence.id, list(sequence.token_ids)) for sequence in sequences]
        return [NO_DRAFT] * len(sequences)

    def release(self, sequence_ids: Iterable[int]) -> None:
        self.ended |= set(sequence_ids)


class Batch:
    """What vLLM keeps of its running requests: one row of tokens each, in any order."""

    def __init__(self, proposer: type[SuffixProposer]) -> None:
        self.watched = watched = Watched()

        class WithWatched(proposer):  # type: ignore[valid-type,misc]
            def proposers(self) -> list[Proposer]:
                return [*super().proposers(), watched]

        self.proposer = WithWatched(config())
        self.proposer.load_model(None)
        self.rows: list[list[int]] = []

    def step(self, *sampled: list[int]) -> list[list[int]]:
        """Commit these tokens, row by row, and let the proposer draft."""
        for row, tokens in zip(self.rows, sampled, strict=True):
            row.extend(tokens)
        lengths = np.array([len(row) for row in self.rows], np.int32)
        tokens = np.full((len(self.rows) + 2, MAX_LEN + 8), 77, np.int32)  # what lies behind the tokens is not theirs
        for index, row in enumerate(self.rows):
            tokens[index, : len(row)] = row
        self.watched.seen = []
        return self.proposer.propose([list(each) for each in sampled], lengths, tokens, slot_mappings=None)


@pytest.fixture(params=[SuffixProposer, MergedProposer])
def batch(request: pytest.FixtureRequest) -> Batch:
    return Batch(request.param)


def test_it_copies_what_followed(batch: Batch) -> None:
    batch.rows = [[1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 1, 2, 3, 4, 5]]
    (draft,) = batch.step([6])
    assert draft == [7, 8, 9, 10, 11] and all(type(token) is int for token in draft)


def test_never_more_than_k_nor_beyond_the_context(batch: Batch) -> None:
    batch.rows = [[1, 2, 3, 4] * 40]
    assert len(batch.step([1])[0]) == K
    batch.rows = [[1, 2, 3, 4] * 49]  # 196 tokens, and 197 with the sampled one: two more and the target's own fit
    assert len(batch.step([1])[0]) == 2
    batch.rows = [[1, 2, 3, 4] * 49 + [1, 2, 3]]
    assert batch.step([4]) == [[]]


def test_a_prompt_that_is_not_computed_yet_gets_no_draft(batch: Batch) -> None:
    batch.rows = [[1, 2, 3, 1, 2], [5, 6, 7, 8, 5, 6]]
    assert batch.step([], [7])[0] == []
    assert batch.step([], [8])[0] == []
    assert batch.step([3], [5])[0][:2] == [1, 2]


def test_rows_may_move(batch: Batch) -> None:
    """A request keeps its sequence wherever its row is, and the index of its tokens with it."""
    batch.rows = [[1, 2, 3, 1, 2], [5, 6, 7, 8, 5, 6], [9, 10, 11, 9]]
    batch.step([3], [7], [10])
    ids = [id for id, _ in batch.watched.seen]
    batch.rows = batch.rows[::-1]
    batch.step([11], [8, 5], [1])
    assert batch.watched.seen == list(zip(ids[::-1], batch.rows)) and not batch.watched.ended


def test_equal_requests_keep_a_sequence_each(batch: Batch) -> None:
    batch.rows = [[1, 2, 3], [1, 2, 3]]
    batch.step([4], [4])
    batch.step([5], [6])
    (first, one), (second, other) = batch.watched.seen
    assert (one[-1], other[-1]) == (5, 6) and first != second and not batch.watched.ended


def test_answers_of_ended_requests_are_remembered_and_prompts_are_not(batch: Batch) -> None:
    batch.rows = [[100, 101, 102, 103]]
    batch.step([20])
    batch.step([21, 22, 23])
    batch.step([24])
    batch.rows = [[50, 20, 21]]
    assert batch.step([22])[0][:1] == [23]
    batch.rows = [[60, 100, 101]]
    assert batch.step([102]) == [[]]
    assert len(batch.watched.ended) == 2


def test_batch_mates_do_not_matter() -> None:
    """A batch of requests at random, against each request alone."""
    dice = random.Random(0)
    together = Batch(SuffixProposer)
    alone = [Batch(SuffixProposer) for _ in range(4)]
    together.rows = [[dice.randrange(4) for _ in range(12)] for _ in alone]
    for one, row in zip(alone, together.rows):
        one.rows = [list(row)]
    for _ in range(20):
        sampled = [[dice.randrange(4) for _ in range(dice.randint(1, 3))] for _ in alone]
        drafts = together.step(*sampled)
        assert drafts == [one.step(tokens)[0] for one, tokens in zip(alone, sampled)]


def test_drafts_are_those_of_the_engine() -> None:
    """The same proposer with the options that docs/labs/02_vllm.md names for both sides, answer by answer."""
    dice = random.Random(1)
    options = SuffixOptions(k=K, tree="chain", min_n=1, min_score=0.39, store_doubt=2)
    batch, offline = Batch(SuffixProposer), Suffix(options)
    drafted = 0
    for request in range(4):
        tokens = [dice.randrange(5) for _ in range(20)]
        sequence = Sequence(request, "", 0, list(tokens), len(tokens), SamplingParams(), seed=0, max_tokens=MAX_LEN)
        batch.rows = [tokens]
        for _ in range(30):
            token = dice.randrange(5)
            sequence.token_ids.append(token)
            (theirs,), (ours,) = batch.step([token]), offline.propose([sequence], [K], 0.0)
            assert theirs == list(ours.tokens) and ours.parents == tuple(range(-1, len(ours) - 1))
            drafted += bool(theirs)
        offline.observe([Commit(sequence, (), (), (), "stop")])
        offline.release([request])
        batch.rows = []
        batch.step()
    assert drafted > 50


def test_the_best_path_of_a_tree() -> None:
    draft = Draft((1, 2, 3, 4, 5), (-1, -1, 1, 1, 0), (0.3, 0.6, 0.2, 0.4, 0.3), ("",) * 5)
    assert best_path(draft) == [2, 4]
    assert best_path(Draft()) == []
