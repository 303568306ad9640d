"""Whole drafts that a backend grows in one call (see backends/tree_growth). Unlike those of run_ahead, they end where
no further level is worth its time, as trees do that grow level by level."""

from __future__ import annotations

from collections.abc import Sequence as Items

from foredraft.backends.tree_growth import GrownTree, Growth, TreeGrower
from foredraft.batch import PackedBatch
from foredraft.proposers.model.candidates import drawing_at
from foredraft.proposers.model.tree import TreeShape, static_shares
from foredraft.types import Draft, Work


class GrownTrees:
    """The trees of a call; see WholeDrafts."""

    def __init__(self, trees: list[GrownTree]) -> None:
        self._trees = trees

    def chain(self, lane: int) -> list[int]:
        """Heads compute the K and V of accepted nodes again: none is kept."""
        return []

    def draft(self, lane: int, budget: int, name: str) -> Draft:
        tokens, parents, scores = self._trees[lane]
        return Draft(tuple(tokens), tuple(parents), tuple(scores), (name,) * len(tokens))


class GrowAhead:
    """See Ahead."""

    stops_early = True

    def __init__(self, grow: TreeGrower) -> None:
        self._grow = grow

    def __call__(
        self, works: Items[Work], first: PackedBatch, shape: TreeShape, budgets: Items[int], min_score: float
    ) -> GrownTrees:
        shares = tuple(static_shares(shape.width)) if shape.static else None
        lengths = [work.sequence.num_tokens for work in works]
        drawings = [[drawing_at(work.sequence, depth) for depth in range(shape.depth)] for work in works]
        growth = Growth(shape.depth, shape.width, 0.0 if shape.static else min_score, shares)
        return GrownTrees(self._grow(first, lengths, budgets, drawings, growth))

    def warm(self, shape: TreeShape, max_keys: int, max_sequences: int) -> None:
        """Nothing needs to be made before."""
