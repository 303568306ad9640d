"""How deep a device drafts. It does not wait to see whether one more level is worth its time: the last drafts tell."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Items

from foredraft.proposers.model.tree import TreeShape
from foredraft.types import Draft

FEW = 4  # sequences, whose drafts may be shallow; of more, one nearly always wants all levels
_KEPT = 0.8  # of what earlier drafts tell, after one more


class Depths:
    """Chooses among a shape and shallower ones for the sequences of a proposer."""

    def __init__(self, shape: TreeShape, shallower: Items[TreeShape]) -> None:
        """`shallower` come deepest first."""
        self.shape, self._shallower = shape, shallower
        self._chances: dict[int, list[float]] = {}  # by sequence and depth: that a draft is right so far

    def choose(self, sequence_ids: Items[int], min_score: float) -> TreeShape:
        """The shallowest shape with all levels that pay: it goes on from a level that is right with a probability above
        `min_score`. 0 wants whole drafts."""
        if not min_score or len(sequence_ids) > FEW:
            return self.shape
        depth = max([self._first_unsure(each, min_score) for each in sequence_ids], default=0)
        return next((shape for shape in reversed(self._shallower) if shape.depth >= depth), self.shape)

    def _first_unsure(self, sequence_id: int, min_score: float) -> int:
        """The first depth that is not worth going on from. Behind a draft that was worth it to its end nothing is
        known, so the next one is deeper."""
        chances = self._chances.get(sequence_id)
        if chances is None:
            return self.shape.depth
        return next((depth for depth, chance in enumerate(chances, 1) if chance <= min_score), len(chances) + 1)

    def learn(self, sequence_id: int, draft: Draft, shape: TreeShape) -> None:
        """A draft of this shape was made."""
        if not self._shallower:
            return
        seen = [0.0] * shape.depth
        for score, depth in zip(draft.scores, draft.depths, strict=True):
            seen[depth - 1] += score
        known = self._chances.setdefault(sequence_id, [])
        for place, chance in enumerate(seen):
            if place < len(known):
                known[place] = _KEPT * known[place] + (1 - _KEPT) * chance
            else:
                known.append(chance)

    def release(self, sequence_ids: Iterable[int]) -> None:
        """Forget sequences that have ended."""
        for each in sequence_ids:
            self._chances.pop(each, None)
