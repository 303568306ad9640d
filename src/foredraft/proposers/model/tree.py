"""A draft under construction: the nodes that a drafting model runs, and further candidates behind them that it does not
run. Where there are more than may be verified, the best ones by path make the draft."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from heapq import nlargest
from typing import NamedTuple

from torch import Tensor

from foredraft.backends.tree_ops import LEAST_PROBABILITY
from foredraft.types import Draft, Sequence, path_tokens

_SURE = 0.6  # static trees: how often the best token of a node is accepted, about
_DECAY = 1.8  # and how fast this falls with the rank of the token


def static_shares(count: int) -> list[float]:
    """What the tokens of a node weigh by their rank, in static trees."""
    return [_SURE / (rank + 1) ** _DECAY for rank in range(count)]


@dataclass(frozen=True)
class TreeShape:
    """How a drafter grows its trees: at every depth it runs the best `width` nodes."""

    depth: int
    width: int
    prunes: bool = False  # whether what is not run may be drafted too, the best `nodes` of all; else what is run is all
    nodes: int = 0
    static: bool = False  # whether the tree has one shape, by the ranks of tokens, whatever their probabilities

    @property
    def most_nodes(self) -> int:
        return self.nodes if self.prunes else self.depth * self.width

    @property
    def shallower(self) -> list[TreeShape]:
        """The same with half of the depth, with a quarter, and so on: deepest first."""
        depths = [self.depth]
        while depths[-1] > 1:
            depths.append((depths[-1] + 1) // 2)
        return [replace(self, depth=depth) for depth in depths[1:]]


class _Leaf(NamedTuple):
    token: int
    parent: int
    score: float
    weight: float


@dataclass(eq=False)
class Tree:
    """The draft of one sequence. Node i lies at the i-th slot behind the sequence."""

    sequence: Sequence
    shape: TreeShape
    budget: int  # nodes; 0: there is no draft
    known: int  # leading tokens of the sequence that have been run
    catch_up: int  # the most tokens of the sequence that this call may run
    min_score: float = 0.0  # it goes on from a node that weighs more
    tokens: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    scores: list[float] = field(default_factory=list)  # probability that the node is reached and accepted
    weights: list[float] = field(default_factory=list)  # what decides which nodes are kept
    q: list[Tensor] = field(default_factory=list)
    leaves: list[_Leaf] = field(default_factory=list)
    num_run: int = 0  # leading nodes that have been run
    depth: int = 0
    ended: bool = False  # whether there is no token to go on with
    made: Draft | None = None  # the draft itself, where the device has grown it

    @property
    def num_missing(self) -> int:
        return self.sequence.num_tokens - self.known

    @property
    def is_sampled(self) -> bool:
        return self.sequence.params.acceptance != "match"

    @property
    def room(self) -> int:
        """How many nodes may still be run."""
        prunes = self.shape.prunes and not self.is_sampled
        return (self.shape.depth * self.shape.width if prunes else self.budget) - len(self.tokens)

    @property
    def width(self) -> int:
        """Branches at a depth. Sampled tokens are all kept, so there are as many paths as can go down to the end."""
        if self.is_sampled and self.shape.prunes:
            return max(1, min(self.shape.width, self.budget // self.shape.depth))
        return self.shape.width

    @property
    def grows(self) -> bool:
        if not self.budget or self.ended or self.depth >= self.shape.depth or self.room < 1:
            return False
        if self.is_sampled or not self.depth:
            return True
        least = self._least([]) if self.shape.prunes else self.min_score
        return any(weight > least for weight in self.weights[self.num_run :])

    @property
    def chain(self) -> list[int]:
        """The tokens of leading nodes that have been run one behind the other."""
        end = 0
        while end < self.num_run and self.parents[end] == end - 1:
            end += 1
        return self.tokens[:end]

    def path(self, node: int) -> list[int]:
        """The tokens from the end of the sequence down to a node."""
        return path_tokens(self.tokens, self.parents, node)

    def add(self, parent: int, token: int, probability: float, weight: float = 1.0) -> None:
        self.tokens.append(token)
        self.parents.append(parent)
        self.scores.append(self._score(parent, probability))
        self.weights.append(weight)

    def add_best(self, branches: list[tuple[int, int, int, float]]) -> None:
        """Add the best of the branches (node, rank of the token, token, probability) as nodes. If the shape prunes,
        the others become leaves, and so do those whose children could not be in the draft. Else the first branch is
        always added, so that the tree contains the chain."""
        weighed = [(self._weight(*branch), *branch) for branch in branches]
        first = [] if self.shape.prunes else weighed[:1]
        best = [*first, *sorted(weighed[len(first) :], key=lambda branch: -branch[0])]
        count = min(self.width, self.room)
        if self.shape.prunes and not self.is_sampled:
            least = self._least([branch[0] for branch in best])
            count = min(count, sum(branch[0] > least for branch in best))
        for weight, node, _, token, probability in best[:count]:
            self.add(node, token, probability, weight)
        if self.shape.prunes:
            for weight, node, _, token, probability in best[count:]:
                self.leaves.append(_Leaf(token, node, self._score(node, probability), weight))

    def _least(self, branches: list[float]) -> float:
        """The least weight in the draft, with branches of these weights, or what is worth going on from. A child weighs
        no more than its parent, so to run a node that weighs no more than this adds nothing."""
        weights = [*self.weights, *(leaf.weight for leaf in self.leaves), *branches]
        return max(self.min_score, nlargest(self.budget, weights)[-1] if len(weights) >= self.budget else 0.0)

    def _score(self, parent: int, probability: float) -> float:
        return min(max(probability, LEAST_PROBABILITY), 1.0) * (self.scores[parent] if parent >= 0 else 1.0)

    def _weight(self, parent: int, rank: int, token: int, probability: float) -> float:
        if not self.shape.static:
            return self._score(parent, probability)
        return static_shares(rank + 1)[rank] * (self.weights[parent] if parent >= 0 else 1.0)

    def draft(self, name: str, q: Tensor | None) -> Draft:
        """The nodes that are kept. A node weighs no more than its parent, so the best ones are a tree."""
        size = len(self.tokens)
        nodes = [*zip(self.tokens, self.parents, self.scores, self.weights, strict=True), *self.leaves]
        tokens, parents, scores, weights = zip(*nodes, strict=True)
        draft = Draft(tokens, parents, scores, (name,) * len(nodes), q)
        if len(nodes) <= self.budget or self.is_sampled:
            return draft
        best = sorted(range(len(nodes)), key=weights.__getitem__, reverse=True)[: self.budget]
        return draft.only([*sorted(node for node in best if node < size), *(leaf for leaf in best if leaf >= size)])


def computed_up_to(sequence: Sequence, num_computed_tokens: int) -> Sequence:
    """A copy for a model that has run so many tokens. What `replace` does, in half of its time: this is done for every
    sequence and draft."""
    copied = object.__new__(Sequence)
    for name in Sequence.__slots__:
        setattr(copied, name, getattr(sequence, name))
    copied.num_computed_tokens = num_computed_tokens
    return copied
