"""Which blocks the layers with a sliding window keep. They have fewer blocks of their own, window blocks: a sequence
needs one only for a block that a window of its next row, or of a later one, reaches back to.

A window block is that of one block, and is held by every sequence whose windows reach it. Once nobody's windows do, it
is kept as long as the block may be found again by its name and no other block needs it, least recently used first. A
prefix is found only up to where a row behind it would find all that its window reaches.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Mapping, MutableSequence
from collections.abc import Sequence as Items

NONE = -1  # the window block of a block that has none


class WindowBlocks:
    """Hands out window blocks. `of_block` [blocks] says which one a block has; runs of the model read it."""

    def __init__(self, window: int, block_size: int, num_window_blocks: int, of_block: MutableSequence[int]) -> None:
        assert 0 < num_window_blocks < len(of_block) and all(each == NONE for each in of_block)
        self.num_window_blocks = num_window_blocks
        self.of_block = of_block
        self._window, self._block_size = window, block_size
        self._holders = [0] * len(of_block)  # sequences whose windows reach a block
        self._spare = list(range(num_window_blocks))[::-1]  # window blocks of no block, the next one last
        self._unheld: OrderedDict[int, None] = OrderedDict()  # kept blocks without a holder, least recently used first
        self._first: dict[int, int] = {}  # by sequence id: the index of the first block that it holds; left out: 0

    @property
    def num_available(self) -> int:
        """How many further window blocks could be held now."""
        return len(self._spare) + len(self._unheld)

    def keeps(self, block: int) -> bool:
        return self.of_block[block] != NONE

    def num_found(self, blocks: Items[int]) -> int:
        """How many leading ones of a prefix's blocks can serve a row behind them."""
        found = kept_from = 0
        for count, block in enumerate(blocks, 1):
            if not self.keeps(block):
                kept_from = count
            if kept_from <= self._first_seen(count * self._block_size):
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
        """Hold a window block for a block that one sequence has just got: the one that it still has, a spare one, or
        that of another block."""
        if self.keeps(block):
            del self._unheld[block]
        elif self._spare:
            self.of_block[block] = self._spare.pop()
        else:
            other, _none = self._unheld.popitem(last=False)
            self.of_block[block], self.of_block[other] = self.of_block[other], NONE
        self._holders[block] = 1

    def slide(self, sequence_id: int, table: Items[int], num_computed_tokens: int) -> list[int]:
        """Let go of the blocks that no row behind the computed tokens sees; returns those that nobody holds now."""
        before, first = self._first.get(sequence_id, 0), self._first_seen(num_computed_tokens)
        if first == before:
            return []
        self._first[sequence_id] = first
        return [block for block in table[before:first] if self._let_go(block)]

    def leave(self, sequence_id: int, index: int, block: int) -> None:
        """A sequence gives the block at `index` of its table back, the last one."""
        if index >= self._first.get(sequence_id, 0):
            self._let_go(block)
        if not index:
            self._first.pop(sequence_id, None)

    def forget(self, block: int) -> None:
        """A block will not be found again: keep it no longer, unless it is held."""
        if block in self._unheld:
            del self._unheld[block]
            self._spare.append(self.of_block[block])
            self.of_block[block] = NONE

    def check_integrity(self, tables: Mapping[int, Items[int]], named: Collection[int]) -> None:
        """Raise AssertionError unless what is kept is held by exactly these sequences, by id, or may be found again."""
        holders = [0] * len(self.of_block)
        for sequence_id, table in tables.items():
            for block in table[self._first.get(sequence_id, 0) :]:
                holders[block] += 1
        assert holders == self._holders, "holders of window blocks are miscounted"
        kept = {block for block in range(len(self.of_block)) if self.keeps(block)}
        assert kept >= {block for block, count in enumerate(holders) if count}, "a block that is held is not kept"
        assert set(self._unheld) == {block for block in kept if not holders[block]}, "a block may never be let go"
        assert set(self._unheld) <= set(named), "a block is kept that will not be found"
        used = sorted([*self._spare, *(self.of_block[block] for block in kept)])
        assert used == list(range(self.num_window_blocks)), "a window block is leaked or given twice"
        assert set(self._first) <= {each for each, table in tables.items() if table}, "a sequence is gone"

    def _let_go(self, block: int) -> bool:
        """One holder less; whether none is left."""
        self._holders[block] -= 1
        if self._holders[block]:
            return False
        self._unheld[block] = None
        return True

    def _first_seen(self, num_computed_tokens: int) -> int:
        """The index of the block with the oldest key that the next row sees: itself, and `window` - 1 before it."""
        return max(0, num_computed_tokens + 1 - self._window) // self._block_size
