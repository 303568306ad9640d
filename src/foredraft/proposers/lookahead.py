"""Guesses by letting the target itself write several tokens at once, wrongly at first: Jacobi iterations in spare rows.
Costs window * (ngram - 1) rows in every run, and as many again for the guesses that they turn up.
Shines where rows are free, nothing can be copied and there is no second model."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from collections.abc import Sequence as Items
from dataclasses import dataclass, field

from foredraft.errors import InvalidSpec
from foredraft.proposers.base import TargetModel
from foredraft.types import Commit, Draft, Sequence

_TRUSTED, _HOPED = 0.3, 0.02  # scores of a guess out of the pool, and of one in the window

_ABSENT = -2  # no node of a draft


@dataclass(frozen=True)
class LookaheadOptions:
    window: int = 4  # places ahead that are iterated on
    ngram: int = 3  # length of the n-grams that come out
    candidates: int = 3  # n-grams of the pool that are tried at once
    pool: int = 10_000  # n-grams that are remembered for a text

    def __post_init__(self) -> None:
        if not (
            1 <= self.window <= 16 and 2 <= self.ngram <= 8 and 0 <= self.candidates <= 16 and 1 <= self.pool <= 10**6
        ):
            raise InvalidSpec(
                f"lookahead: window={self.window} must be from 1 to 16, ngram={self.ngram} from 2 to 8, "
                f"candidates={self.candidates} from 0 to 16, pool={self.pool} from 1 to 1000000."
            )


@dataclass
class _Window:
    """What the target has said so far about the places ahead of a text.

    A branch begins with a guess for its place and goes on with what was said after it, one token a step: the target
    reads it behind the guesses for the places before, and adds a token. A branch of `ngram` tokens goes to the pool;
    without its first token it is a branch of the next place.
    """

    branches: dict[int, list[int]] = field(default_factory=dict)  # by the place of their first token in the text
    pool: OrderedDict[int, OrderedDict[tuple[int, ...], None]] = field(default_factory=OrderedDict)  # by first token
    size: int = 0


class Lookahead:
    """One window and one pool per text."""

    name = "lookahead"
    taps: frozenset[int] = frozenset()
    free = True
    wants_target_argmax = True
    Options = LookaheadOptions

    def __init__(self, options: LookaheadOptions, target: TargetModel | None = None) -> None:
        self.options = options
        self.num_lookahead_tokens = (options.window + options.candidates) * (options.ngram - 1)
        self._windows: dict[int, _Window] = {}

    def propose(self, sequences: Items[Sequence], budgets: Items[int]) -> list[Draft]:
        return [self._draft(sequence, budget) for sequence, budget in zip(sequences, budgets, strict=True)]

    def observe(self, commits: Items[Commit]) -> None:
        for commit in commits:
            if commit.target_argmax and commit.tokens and commit.sequence.id in self._windows:
                self._advance(self._windows[commit.sequence.id], commit)

    def release(self, sequence_ids: Iterable[int]) -> None:
        for sequence_id in sequence_ids:
            self._windows.pop(sequence_id, None)

    def close(self) -> None:
        """It holds nothing of the target."""

    def clear(self) -> None:
        """Nothing outlives its text."""

    def _draft(self, sequence: Sequence, budget: int) -> Draft:
        window = self._windows.setdefault(sequence.id, _Window())
        branches = self._filled(window, sequence.token_ids)
        tree = _Tree(min(budget, self.num_lookahead_tokens))
        for ngram in list(reversed(window.pool.get(sequence.token_ids[-1], ())))[: self.options.candidates]:
            tree.add(-1, ngram, _TRUSTED)
        place = -1
        for branch in branches:
            place = tree.add(place, branch[:1], _HOPED)
            tree.add(place, branch[1:], _HOPED)
        return tree.draft(self.name)

    def _filled(self, window: _Window, text: list[int]) -> list[list[int]]:
        """The branches of the next places, with earlier tokens of the text where nothing was said yet."""
        ahead = range(self.options.window)
        return [window.branches.get(len(text) + place) or [text[-1 - place % len(text)]] for place in ahead]

    def _advance(self, window: _Window, commit: Commit) -> None:
        """Take in what the target said behind every branch; what lies behind the text's new end is of no more use."""
        draft, target_argmax, text = commit.draft, commit.target_argmax, commit.sequence.token_ids
        before = text[: len(text) - len(commit.tokens)]
        node_of = {edge: node for node, edge in enumerate(zip(draft.parents, draft.tokens, strict=True))}
        branches: dict[int, list[int]] = {}
        above = -1
        for place, branch in enumerate(self._filled(window, before), len(before)):
            above = node = node_of.get((above, branch[0]), _ABSENT)
            for token in branch[1:]:
                node = node_of.get((node, token), _ABSENT)
            if node == _ABSENT:
                continue  # there was no room for it
            longer = [*branch, target_argmax[1 + node]]
            if len(longer) == self.options.ngram:
                self._pool(window, tuple(longer))
                branches[place + 1] = longer[1:]
            else:
                branches.setdefault(place, longer)
        window.branches = {place: branch for place, branch in branches.items() if place >= len(text)}

    def _pool(self, window: _Window, ngram: tuple[int, ...]) -> None:
        first, rest = ngram[0], ngram[1:]
        known = window.pool.setdefault(first, OrderedDict())
        window.size += rest not in known
        known[rest] = None
        known.move_to_end(rest)
        window.pool.move_to_end(first)
        if window.size > self.options.pool:
            oldest = next(iter(window.pool))
            window.pool[oldest].popitem(last=False)
            window.size -= 1
            if not window.pool[oldest]:
                del window.pool[oldest]


class _Tree:
    """A draft in the making: equal guesses share a node, and what finds no room is left out."""

    def __init__(self, room: int) -> None:
        self._room = room
        self._tokens: list[int] = []
        self._parents: list[int] = []
        self._scores: list[float] = []
        self._node_of: dict[tuple[int, int], int] = {}

    def add(self, parent: int, tokens: Items[int], confidence: float) -> int:
        """Hang a chain below a node; returns its last node. A score falls with every token, and never rises."""
        for token in tokens:
            node = self._node_of.get((parent, token))
            if node is None:
                if len(self._tokens) == self._room:
                    return parent
                node = self._node_of[parent, token] = len(self._tokens)
                self._tokens.append(token)
                self._parents.append(parent)
                self._scores.append(confidence * (self._scores[parent] if parent >= 0 else 1.0))
            parent = node
        return parent

    def draft(self, origin: str) -> Draft:
        return Draft(tuple(self._tokens), tuple(self._parents), tuple(self._scores), (origin,) * len(self._tokens))
