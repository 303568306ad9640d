"""Which blocks have a place in the layers with a sliding window. There are fewer places than blocks: a sequence needs
one only for the blocks that a window of its next row, or of a later one, reaches back to.

A place belongs to one block. It is held by every sequence whose windows reach it; a block that nobody's windows reach
keeps its place, if it has a name under which it may be found again, until the place is needed, least recently used
first. A block without a place is no use to layers with a window: a prefix is found only as far as the last of its
blocks, all that a window reaches, have theirs.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Mapping, MutableSequence
from collections.abc import Sequence as Items

NOWHERE = -1  # the place of a block that has none


class WindowBlocks:
    """Hands out `num_places` places. `places` [blocks] is the map of blocks to places, which runs of the model read."""

    def __init__(self, window: int, block_size: int, num_places: int, places: MutableSequence[int]) -> None:
        assert 0 < num_places < len(places) and all(place == NOWHERE for place in places)
        self.num_places = num_places
        self.places = places
        self._window, self._block_size = window, block_size
        self._holders = [0] * len(places)  # sequences whose windows reach a block
        self._spare = list(range(num_places))[::-1]  # places of no block, the next one last
        self._unheld: OrderedDict[int, None] = OrderedDict()  # blocks with a place and no holder, oldest first
        self._first: dict[int, int] = {}  # by sequence id: the index of the first block whose place it holds

    @property
    def num_available(self) -> int:
        """How many further places could be held now."""
        return len(self._spare) + len(self._unheld)

    def has_place(self, block: int) -> bool:
        return self.places[block] != NOWHERE

    def num_found(self, blocks: Items[int]) -> int:
        """How many leading ones of a prefix's blocks can serve a row behind them: those that its window reaches must
        have places."""
        found = placed_from = 0
        for count, block in enumerate(blocks, 1):
            if not self.has_place(block):
                placed_from = count
            if placed_from <= self._first_seen(count * self._block_size):
                found = count
        return found

    def enter(self, sequence_id: int, table: Items[int]) -> None:
        """Hold what the windows of a sequence reach whose tokens are computed in all blocks of its table."""
        first = self._first_seen(len(table) * self._block_size)
        if first:
            self._first[sequence_id] = first
        for block in table[first:]:
            if not self._holders[block]:
                del self._unheld[block]
            self._holders[block] += 1

    def add(self, block: int) -> None:
        """Give a block that a sequence has just got, and nobody else has, a place: its old one, a spare one, or that of
        another block."""
        if self.has_place(block):
            del self._unheld[block]
        elif self._spare:
            self.places[block] = self._spare.pop()
        else:
            other, _none = self._unheld.popitem(last=False)
            self.places[block], self.places[other] = self.places[other], NOWHERE
        self._holders[block] = 1

    def slide(self, sequence_id: int, table: Items[int], num_computed_tokens: int) -> list[int]:
        """Let go of the blocks that no row behind the computed tokens sees; returns those that nobody holds now."""
        before, first = self._first.get(sequence_id, 0), self._first_seen(num_computed_tokens)
        if first == before:
            return []
        self._first[sequence_id] = first
        return [block for block in table[before:first] if self._let_go(block)]

    def leave(self, sequence_id: int, index: int, block: int) -> None:
        """A sequence gives the block at `index` of its table back: let go of its place, if that is held for it."""
        if index >= self._first.get(sequence_id, 0):
            self._let_go(block)
        if not index:
            self._first.pop(sequence_id, None)

    def forget(self, block: int) -> None:
        """Take the place of a block that will not be found again, unless it is held."""
        if block in self._unheld:
            del self._unheld[block]
            self._spare.append(self.places[block])
            self.places[block] = NOWHERE

    def check_integrity(self, tables: Mapping[int, Items[int]], named: Collection[int]) -> None:
        """Raise AssertionError unless every place is held by exactly these sequences, by id, or may be found again."""
        holders = [0] * len(self.places)
        for sequence_id, table in tables.items():
            for block in table[self._first.get(sequence_id, 0) :]:
                holders[block] += 1
        assert holders == self._holders, "holders of places are miscounted"
        placed = {block for block, place in enumerate(self.places) if place != NOWHERE}
        assert set(self._unheld) == {block for block in placed if not holders[block]}, "a place is lost or given twice"
        assert placed >= {block for block, count in enumerate(holders) if count}, "a held block has no place"
        used = sorted([*self._spare, *(self.places[block] for block in placed)])
        assert used == list(range(self.num_places)), "a place is lost or given twice"
        assert set(self._unheld) <= set(named), "a place is kept for a block that will not be found"
        assert set(self._first) <= {each for each, table in tables.items() if table}, "a sequence is gone"

    def _let_go(self, block: int) -> bool:
        """One sequence less; whether none is left."""
        self._holders[block] -= 1
        if self._holders[block]:
            return False
        self._unheld[block] = None
        return True

    def _first_seen(self, num_computed_tokens: int) -> int:
        """The index of the block with the oldest key that the next row sees: itself, and `window` - 1 before it."""
        return max(0, num_computed_tokens + 1 - self._window) // self._block_size
