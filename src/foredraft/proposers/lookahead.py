"""Drafts with the target itself, which fills several future positions at once: Jacobi iterations in spare rows.
Costs window * (ngram - 1) rows in every run, and about as many again for the n-grams that they find.
Shines where rows are free, nothing can be copied and there is no second model."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from collections.abc import Sequence as Items
from dataclasses import dataclass, field

from foredraft.errors import InvalidSpec
from foredraft.proposers.base import Proposer
from foredraft.proposers.target import TargetModel
from foredraft.types import Commit, Draft, Sequence

_POOL_SCORE, _WINDOW_SCORE = 0.3, 0.02  # of a draft token out of the pool, and of one in the window

_ABSENT = -2  # no node of a draft


@dataclass(frozen=True)
class LookaheadOptions:
    window: int = 4  # future positions that are iterated on
    ngram: int = 3  # length of the n-grams that come out
    candidates: int = 3  # n-grams of the pool that are tried at once
    pool: int = 10_000  # n-grams that are remembered for a sequence

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
    """The target's predictions so far for the positions behind a sequence.

    A branch begins with a draft token for its position. Every step adds one token to it: the target argmax behind the
    branch, given the first tokens of the branches at earlier positions. A branch of `ngram` tokens goes to the pool.
    Without its first token it becomes a branch of the next position.
    """

    branches: dict[int, list[int]] = field(default_factory=dict)  # by the position of their first token
    pool: OrderedDict[int, OrderedDict[tuple[int, ...], None]] = field(default_factory=OrderedDict)  # by first token
    size: int = 0


class Lookahead(Proposer):
    """One window and one pool per sequence."""

    name = "lookahead"
    wants_target_argmax = True
    Options = LookaheadOptions

    def __init__(self, options: LookaheadOptions, target: TargetModel | None = None) -> None:
        self.options = options
        self.num_lookahead_tokens = (options.window + options.candidates) * (options.ngram - 1)
        self._windows: dict[int, _Window] = {}

    def draft(self, sequence: Sequence, budget: int) -> Draft:
        window = self._windows.setdefault(sequence.id, _Window())
        branches = self._filled(window, sequence.token_ids)
        tree = _Tree(min(budget, self.num_lookahead_tokens))
        for ngram in list(reversed(window.pool.get(sequence.token_ids[-1], ())))[: self.options.candidates]:
            tree.add(-1, ngram, _POOL_SCORE)
        place = -1
        for branch in branches:
            place = tree.add(place, branch[:1], _WINDOW_SCORE)
            tree.add(place, branch[1:], _WINDOW_SCORE)
        return tree.draft(self.name)

    def observe(self, commits: Items[Commit]) -> None:
        for commit in commits:
            if commit.target_argmax and commit.tokens and commit.sequence.id in self._windows:
                self._advance(self._windows[commit.sequence.id], commit)

    def release(self, sequence_ids: Iterable[int]) -> None:
        for sequence_id in sequence_ids:
            self._windows.pop(sequence_id, None)

    def _filled(self, window: _Window, tokens: list[int]) -> list[list[int]]:
        """The branches of the next positions. A position without one starts with an earlier token of the sequence."""
        ahead = range(self.options.window)
        return [window.branches.get(len(tokens) + place) or [tokens[-1 - place % len(tokens)]] for place in ahead]

    def _advance(self, window: _Window, commit: Commit) -> None:
        """Add the target argmax behind every branch. Branches at positions that are committed now are dropped."""
        draft, target_argmax, tokens = commit.draft, commit.target_argmax, commit.sequence.token_ids
        before = tokens[: len(tokens) - len(commit.tokens)]
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
        window.branches = {place: branch for place, branch in branches.items() if place >= len(tokens)}

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
    """A draft under construction. Equal tokens share a node, and what finds no room is left out."""

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
