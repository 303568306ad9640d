"""The options of `suffix`, and the texts that it copies from, in Python: what serves where nothing is compiled, and
what the C code must equal."""

from __future__ import annotations

import heapq
from collections.abc import Sequence as Items
from dataclasses import dataclass
from functools import cache
from typing import ClassVar, Protocol, Self

from foredraft.errors import InvalidSpec
from foredraft.proposers.occurrences import Occurrences

SEPARATOR = -1  # behind every answer in a store: nothing follows across it
_MOST = 32  # occurrences that are looked at, the latest ones

Nodes = tuple[tuple[int, ...], tuple[int, ...], tuple[float, ...]]  # tokens, parents and scores, as a draft has them

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

    @property
    def lengths(self) -> tuple[int, ...]:
        """The n-grams that are looked up. Their lengths double: the longest that is found leaves few occurrences to
        compare."""
        return tuple(self.min_n << step for step in range(5) if self.min_n << step <= self.max_n)


class Text(Protocol):
    """A running sequence, or a store: finished answers with a separator behind each. Places are counted as
    `Occurrences` does."""

    @property
    def start(self) -> int: ...

    @property
    def end(self) -> int: ...

    def __len__(self) -> int:
        """How many n-grams are known."""

    def follow(self, text: list[int]) -> None:
        """Become this text: what was there before, but for some of its last tokens, and more. Not for stores."""

    def extend(self, tokens: Items[int]) -> None: ...

    def forget(self, count: int) -> None:
        """Forget the oldest tokens."""

    def draft(self, store: Self | None, size: int) -> Nodes:
        """What may follow this sequence, by itself and by a store: up to so many nodes, most likely ones first."""


class PlainText(Occurrences):
    """Where a suffix has occurred before, what followed is read off the tokens themselves: the occurrences that go on
    alike share a node of the draft, so a node's children are the ways in which its own occurrences part."""

    def __init__(self, options: SuffixOptions) -> None:
        super().__init__(options.lengths)
        self.options = options

    def draft(self, store: Self | None, size: int) -> Nodes:
        """Best-first: always the node that is most likely reached, until nodes run out or get too unlikely."""
        matched, endings = self._endings(store)
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
                if token != SEPARATOR:
                    branches.setdefault(token, []).append(ending)
            count, doubt = sum(map(len, branches.values())), len(branches) * doubt_of(matched + depth)
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
        return tuple(tokens), tuple(parents), tuple(scores)

    def _endings(self, store: Self | None) -> tuple[int, list[_Ending]]:
        """How much of the sequence's end was seen before, and what followed it then: in itself and in the store."""
        matched, places = self._longest(self.tokens)
        stored, stored_places = (0, []) if store is None else store._longest(self.tokens)
        endings: list[_Ending] = []
        if matched and matched >= stored:
            endings += [(self.tokens, place, self.end - place, 1.0) for place in places]
        if store is not None and stored and stored >= matched:
            doubt = self.options.store_doubt
            endings += [(store.tokens, place - store.offset, len(store.tokens), doubt) for place in stored_places]
        return max(matched, stored), endings

    def _longest(self, tokens: list[int]) -> tuple[int, list[int]]:
        """The longest match with the end of the tokens, up to max_n, and the places behind it."""
        places = self.places(tokens, self.lengths[0], _MOST + 1)
        if not places:
            return 0, []  # as for most positions of most sequences
        # Few occurrences are compared at once. Of many, those of longer n-grams are the ones to compare.
        for n in self.lengths[:1] if len(places) <= _MOST else reversed(self.lengths):
            lengths = {
                place: self.matched(place, tokens, self.options.max_n) for place in self.places(tokens, n, _MOST)
            }
            longest = max(lengths.values(), default=0)
            if longest >= self.options.min_n:
                return longest, [place for place, length in lengths.items() if length == longest]
        return 0, []


@cache
def doubt_of(matched: int) -> float:
    """How many times something else must be taken to have followed a match, beside what was seen to follow it.

    Fitted to answers of small models: what followed its one earlier occurrence comes again in 47 % of cases after 2
    tokens alike, 68 % after 3, 74 % after 4, 81 % after 6, 93 % after 16, and in 43 % after a single one. An accepted
    draft token lengthens the match. Where several things have followed, each of them leaves as much doubt: of two that
    followed once after 2 tokens alike, 27 % come again, of three 18 %.
    """
    return min(1.5, float(2 * matched**-1.25))
