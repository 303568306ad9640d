"""Guesses by what followed the longest known suffix, in this text and in earlier answers; a tree, frequent ones first.
Costs some dictionary look-ups per guessed token and per committed one, whatever the length of the text.
Shines where traffic repeats itself: agents, templates, edits, retries."""

from __future__ import annotations

import heapq
from collections import Counter, deque
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Items
from dataclasses import dataclass, field

from foredraft.errors import InvalidSpec
from foredraft.proposers.base import TargetModel
from foredraft.types import NO_DRAFT, Commit, Draft, Sequence

_MULTIPLIER = 0x9E3779B97F4A7C15
_MASK = (1 << 64) - 1


@dataclass(frozen=True)
class SuffixOptions:
    k: int = 16  # nodes of a draft
    max_n: int = 12  # longest suffix that is looked up
    min_n: int = 2
    depth: float = 3.0  # a match of n tokens is followed for at most depth * n
    min_score: float = 0.1  # a node that is reached less often than this is not guessed
    store: int = 100_000  # tokens of earlier answers that are remembered; 0: none

    def __post_init__(self) -> None:
        if not 1 <= self.k <= 64:
            raise InvalidSpec(f"suffix: k={self.k} must be from 1 to 64.")
        if not 1 <= self.min_n <= self.max_n <= 32:
            raise InvalidSpec(f"suffix: min_n={self.min_n}, max_n={self.max_n} must keep 1 ≤ min_n ≤ max_n ≤ 32.")
        if not 0 < self.min_score < 1 or not self.depth > 0 or self.store < 0:
            raise InvalidSpec("suffix: min_score must lie between 0 and 1, depth above 0, store at 0 or above.")


class Followers:
    """For every context of up to `max_n` tokens, what came after it and how often.

    A context is known by a 64-bit hash; a collision costs a bad guess, nothing else.
    """

    def __init__(self, max_n: int) -> None:
        self.max_n = max_n
        self._counts: dict[int, Counter[int]] = {}

    def __len__(self) -> int:
        return len(self._counts)

    def add(self, hashes: list[int], token: int) -> None:
        """`token` came after the contexts with these hashes."""
        for context in hashes:
            counts = self._counts.get(context)
            if counts is None:
                counts = self._counts[context] = Counter()
            counts[token] += 1

    def remove(self, hashes: list[int], token: int) -> None:
        for context in hashes:
            counts = self._counts[context]
            counts[token] -= 1
            if not counts[token]:
                del counts[token]
                if not counts:
                    del self._counts[context]

    def after(self, hashes: list[int]) -> tuple[int, Counter[int]]:
        """The longest of these contexts that is known: its length, and what followed it."""
        for length in range(len(hashes), 0, -1):
            counts = self._counts.get(hashes[length - 1])
            if counts is not None:
                return length, counts
        return 0, Counter()


def extend_hashes(hashes: list[int], token: int, max_n: int) -> list[int]:
    """The hashes of the suffixes of length 1, 2, … of a text that was just extended by a token."""
    return [_hash(shorter, token) for shorter in (0, *hashes[: max_n - 1])]


def _hash(shorter: int, token: int) -> int:
    mixed = (shorter ^ (token + 1)) * _MULTIPLIER & _MASK
    return mixed ^ (mixed >> 29)


@dataclass
class _Text:
    """A live text: what followed what in it, and the hashes of its suffixes."""

    followers: Followers
    hashes: list[int] = field(default_factory=list)
    num_entered: int = 0


class Suffix:
    """One table per live text, and one of finished answers that forgets the oldest when it is full."""

    name = "suffix"
    taps: frozenset[int] = frozenset()
    Options = SuffixOptions

    def __init__(self, options: SuffixOptions, target: TargetModel | None = None) -> None:
        self.options = options
        self.num_lookahead_tokens = options.k
        self._texts: dict[int, _Text] = {}
        self._store = Followers(options.max_n)
        self._stored: deque[list[int]] = deque()
        self._num_stored = 0

    def propose(self, sequences: Items[Sequence], budgets: Items[int]) -> list[Draft]:
        return [self._draft(sequence, budget) for sequence, budget in zip(sequences, budgets, strict=True)]

    def observe(self, commits: Items[Commit]) -> None:
        for commit in commits:
            if commit.finish_reason in ("stop", "length"):
                self._remember(commit.sequence.output_token_ids)

    def release(self, sequence_ids: Iterable[int]) -> None:
        for sequence_id in sequence_ids:
            self._texts.pop(sequence_id, None)

    def clear(self) -> None:
        """Forget all finished answers."""
        self._store = Followers(self.options.max_n)
        self._stored.clear()
        self._num_stored = 0

    def _draft(self, sequence: Sequence, budget: int) -> Draft:
        """Best-first: always expand the node that is most likely reached, until nodes run out or get too unlikely."""
        text = self._entered(sequence)
        size = min(budget, self.options.k)
        tokens: list[int] = []
        parents: list[int] = []
        scores: list[float] = []
        matched = max(table.after(text.hashes)[0] for table in (text.followers, self._store))
        max_depth = int(self.options.depth * matched)
        queue: list[tuple[float, int, int, int, list[int]]] = []  # -score, order, parent, depth, hashes

        def expand(parent: int, score: float, depth: int, hashes: list[int]) -> None:
            if depth >= max_depth:
                return
            for token, share in self._next(text, hashes):
                if score * share >= self.options.min_score:
                    heapq.heappush(queue, (-score * share, len(queue) + 64 * len(tokens), parent, token, hashes))

        expand(-1, 1.0, 0, text.hashes)
        depths: list[int] = []
        while queue and len(tokens) < size:
            negative, _, parent, token, hashes = heapq.heappop(queue)
            tokens.append(token)
            parents.append(parent)
            scores.append(-negative)
            depths.append(1 + (depths[parent] if parent >= 0 else 0))
            expand(len(tokens) - 1, -negative, depths[-1], extend_hashes(hashes, token, self.options.max_n))
        if not tokens:
            return NO_DRAFT
        return Draft(tuple(tokens), tuple(parents), tuple(scores), (self.name,) * len(tokens))

    def _next(self, text: _Text, hashes: list[int]) -> list[tuple[int, float]]:
        """What may follow, with its share; the table that knows the longer context is asked, the text itself first."""
        length, counts = text.followers.after(hashes)
        stored_length, stored = self._store.after(hashes)
        if stored_length > length:
            length, counts = stored_length, stored
        if length < self.options.min_n:
            return []
        total = sum(counts.values())
        return [(token, count / (total + 1 / length)) for token, count in counts.most_common(4)]

    def _entered(self, sequence: Sequence) -> _Text:
        """The text's table with all tokens that were committed since."""
        text = self._texts.get(sequence.id)
        if text is None:
            text = self._texts[sequence.id] = _Text(Followers(self.options.max_n))
        for token in sequence.token_ids[text.num_entered :]:
            text.followers.add(text.hashes, token)
            text.hashes = extend_hashes(text.hashes, token, self.options.max_n)
        text.num_entered = sequence.num_tokens
        return text

    def _remember(self, answer: list[int]) -> None:
        if not self.options.store:
            return
        self._enter(self._store.add, answer)
        self._stored.append(answer)
        self._num_stored += len(answer)
        while self._num_stored > self.options.store:
            oldest = self._stored.popleft()
            self._num_stored -= len(oldest)
            self._enter(self._store.remove, oldest)

    def _enter(self, change: Callable[[list[int], int], None], answer: list[int]) -> None:
        hashes: list[int] = []
        for token in answer:
            change(hashes, token)
            hashes = extend_hashes(hashes, token, self.options.max_n)
