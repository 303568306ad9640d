"""Drafts what followed the longest known suffix, in this sequence and in earlier answers: a tree, frequent ones first.
Costs a few look-ups per committed token and a few dozen comparisons per step, whatever the length of the sequence.
Shines where traffic repeats itself: agents, templates, edits, retries."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterable
from collections.abc import Sequence as Items
from dataclasses import dataclass
from functools import cache
from typing import ClassVar

from foredraft.errors import InvalidSpec
from foredraft.proposers.base import Proposer
from foredraft.proposers.occurrences import Occurrences
from foredraft.proposers.target import TargetModel
from foredraft.types import NO_DRAFT, Commit, Draft, Sequence

_MOST = 32  # occurrences that are looked at, the latest ones
_MOST_SALTS = 1024  # among whose requests answers are shared
_SEPARATOR = -1  # behind every answer in the store: nothing follows across it

# An occurrence's continuation: tokens, the place in them where it begins, after how many it comes round again (where it
# runs into the end of the sequence it goes on with itself, for a loop goes on), and how much it is doubted.
_Ending = tuple[list[int], int, int, float]


@dataclass(frozen=True)
class SuffixOptions:
    k: int = 16  # nodes of a draft
    min_n: int = 2  # shortest suffix that is looked up, and the longest that is told apart
    max_n: int = 16
    depth: float = 3.0  # a match of n tokens is followed for at most depth * n
    min_score: float = 0.1  # a node that is reached less often than this is not drafted
    store: int = 100_000  # tokens of earlier answers that are remembered, of all salts together; 0: none
    store_doubt: float = 1.0  # times as much as what the sequence itself holds, what earlier answers hold is doubted
    tree: str = "dynamic"  # or chain: every node has its most frequent child only

    owner_only: ClassVar[frozenset[str]] = frozenset({"store"})  # options that no request of a server may choose

    def __post_init__(self) -> None:
        if not 1 <= self.k <= 64:
            raise InvalidSpec(f"suffix: k={self.k} must be from 1 to 64.")
        if not 1 <= self.min_n <= self.max_n <= 32:
            raise InvalidSpec(f"suffix: min_n={self.min_n}, max_n={self.max_n} must keep 1 ≤ min_n ≤ max_n ≤ 32.")
        if not (0 < self.min_score < 1 and 0 < self.depth <= 64 and 0 <= self.store <= 10**7):
            raise InvalidSpec(
                f"suffix: min_score={self.min_score} must lie between 0 and 1, depth={self.depth} above 0 and up to "
                f"64, store={self.store} from 0 to 10000000."
            )
        if not 1 <= self.store_doubt <= 64:
            raise InvalidSpec(f"suffix: store_doubt={self.store_doubt} must be from 1 to 64.")
        if self.tree not in ("dynamic", "chain"):
            raise InvalidSpec(f"suffix: tree={self.tree!r} must be dynamic or chain.")


class Suffix(Proposer):
    """One index per running sequence, and one of finished answers for every salt. Together these have a limit; beyond
    it the oldest answers are forgotten. Beyond the limit of salts, all answers of the salt that was used least recently
    are forgotten. Answers are shared only among requests of equal salts.

    Where a suffix has occurred before, what followed is read off the tokens themselves: the occurrences that go on
    alike share a node of the draft, so a node's children are the ways in which its own occurrences part.
    """

    name = "suffix"
    Options = SuffixOptions

    def __init__(self, options: SuffixOptions, target: TargetModel | None = None) -> None:
        self.options = options
        self.num_lookahead_tokens = options.k
        # Doubling lengths: the longest that is found leaves few occurrences to compare.
        lengths = {options.min_n << step for step in range(5) if options.min_n << step <= options.max_n}
        self._lengths = tuple(sorted(lengths))
        self._indexes: dict[int, Occurrences] = {}
        self.clear()

    def propose(self, sequences: Items[Sequence], budgets: Items[int], min_score: float) -> list[Draft]:
        return [self._draft(sequence, budget) for sequence, budget in zip(sequences, budgets, strict=True)]

    def observe(self, commits: Items[Commit]) -> None:
        for commit in commits:
            sequence = commit.sequence
            if commit.finish_reason in ("stop", "length") and sequence.may_be_remembered:
                self._remember(sequence.params.cache_salt, sequence.output_token_ids)

    def release(self, sequence_ids: Iterable[int]) -> None:
        for sequence_id in sequence_ids:
            self._indexes.pop(sequence_id, None)

    def clear(self) -> None:
        """Forget all finished answers."""
        self._stores: dict[str, Occurrences] = {}  # by salt, least recently used first; none is empty
        self._answers: deque[tuple[str, int]] = deque()  # salts and sizes of those in the stores, oldest first
        self._num_stored = 0  # tokens in all stores

    def _draft(self, sequence: Sequence, budget: int) -> Draft:
        """Best-first: always the node that is most likely reached, until nodes run out or get too unlikely."""
        size = min(budget, self.options.k)
        matched, endings = self._endings(sequence)
        if not endings or not size:
            return NO_DRAFT
        max_depth, min_score = int(self.options.depth * matched), self.options.min_score
        tokens: list[int] = []
        parents: list[int] = []
        scores: list[float] = []
        depths: list[int] = []
        queue: list[tuple[float, int, int, int, list[_Ending]]] = []  # -score, order, parent, token, endings

        def expand(parent: int, score: float, depth: int, endings: list[_Ending]) -> None:
            if depth == max_depth:
                return
            branches: dict[int, list[_Ending]] = {}
            for ending in endings:
                source, place, period, _ = ending
                token = source[place + depth % period]
                if token != _SEPARATOR:
                    branches.setdefault(token, []).append(ending)
            count, doubt = sum(map(len, branches.values())), len(branches) * _doubt(matched + depth)
            if self.options.tree == "chain" and branches:
                branches = dict([max(branches.items(), key=lambda branch: len(branch[1]))])
            for token, alike in branches.items():
                least = alike[0][3]  # the sequence's own endings come first
                probability = score * len(alike) / (count + least * doubt)
                if probability >= min_score:
                    heapq.heappush(queue, (-probability, len(tokens) * _MOST + len(queue), parent, token, alike))

        expand(-1, 1.0, 0, endings)
        while queue and len(tokens) < size:
            negative, _, parent, token, alike = heapq.heappop(queue)
            tokens.append(token)
            parents.append(parent)
            scores.append(-negative)
            depths.append(1 + (depths[parent] if parent >= 0 else 0))
            expand(len(tokens) - 1, -negative, depths[-1], alike)
        return Draft(tuple(tokens), tuple(parents), tuple(scores), (self.name,) * len(tokens)) if tokens else NO_DRAFT

    def _endings(self, sequence: Sequence) -> tuple[int, list[_Ending]]:
        """How much of the sequence's end was seen before, and what followed it then: in itself and in the store."""
        index = self._indexes.get(sequence.id)
        if index is None:
            index = self._indexes[sequence.id] = Occurrences(self._lengths)
            self._use(sequence.params.cache_salt)
        index.follow(sequence.token_ids)
        matched, places = self._longest(index, sequence.token_ids)
        store = self._stores.get(sequence.params.cache_salt)
        stored, stored_places = (0, []) if store is None else self._longest(store, sequence.token_ids)
        endings: list[_Ending] = []
        if matched and matched >= stored:
            endings += [(index.tokens, place, index.end - place, 1.0) for place in places]
        if store is not None and stored and stored >= matched:
            doubt = self.options.store_doubt
            endings += [(store.tokens, place - store.offset, len(store.tokens), doubt) for place in stored_places]
        return max(matched, stored), endings

    def _longest(self, index: Occurrences, tokens: list[int]) -> tuple[int, list[int]]:
        """The longest match with the end of the tokens, up to max_n, and the places behind it."""
        places = index.latest(tokens, self._lengths[0], _MOST + 1)
        if not places:
            return 0, []  # as for most positions of most sequences
        # Few occurrences are compared at once. Of many, those of longer n-grams are the ones to compare.
        for n in self._lengths[:1] if len(places) <= _MOST else reversed(self._lengths):
            lengths = {
                place: index.matched(place, tokens, self.options.max_n) for place in index.latest(tokens, n, _MOST)
            }
            longest = max(lengths.values(), default=0)
            if longest >= self.options.min_n:
                return longest, [place for place, length in lengths.items() if length == longest]
        return 0, []

    def _remember(self, salt: str, answer: list[int]) -> None:
        size = len(answer) + 1
        if size > self.options.store:
            return
        self._use(salt)
        store = self._stores.setdefault(salt, Occurrences(self._lengths))
        store.extend((*answer, _SEPARATOR))
        self._answers.append((salt, size))
        self._num_stored += size
        while len(self._stores) > _MOST_SALTS:
            self._forget_salt(next(iter(self._stores)))
        while self._num_stored > self.options.store:
            self._forget_oldest()

    def _use(self, salt: str) -> None:
        """Mark a salt as the one that was used last."""
        if salt in self._stores:
            self._stores[salt] = self._stores.pop(salt)

    def _forget_salt(self, salt: str) -> None:
        store = self._stores.pop(salt)
        self._num_stored -= store.end - store.start
        self._answers = deque(answer for answer in self._answers if answer[0] != salt)

    def _forget_oldest(self) -> None:
        salt, size = self._answers.popleft()
        store = self._stores[salt]
        store.forget(size)
        self._num_stored -= size
        if store.start == store.end:
            del self._stores[salt]


@cache
def _doubt(matched: int) -> float:
    """How many times something else must be taken to have followed a match, beside what was seen to follow it.

    Fitted to answers of small models: what followed its one earlier occurrence comes again in 47 % of cases after 2
    tokens alike, 68 % after 3, 74 % after 4, 81 % after 6, 93 % after 16, and in 43 % after a single one. An accepted
    draft token lengthens the match. Where several things have followed, each of them leaves as much doubt: of two that
    followed once after 2 tokens alike, 27 % come again, of three 18 %.
    """
    return min(1.5, float(2 * matched**-1.25))
