"""One forward run's input: rows of many sequences packed side by side, prompts, single tokens and draft trees alike."""

from __future__ import annotations

from array import array
from collections.abc import MutableSequence
from collections.abc import Sequence as Items
from dataclasses import dataclass, fields, replace
from functools import cached_property
from itertools import accumulate, zip_longest
from typing import Any, NamedTuple, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from foredraft.types import Work

_Path = tuple[int, ...]  # offsets in the sequence's own KV


@dataclass(frozen=True)
class ForwardBatch:
    """Every row is one token. A row sees the first `prefix_lens` keys of its sequence in order, and then the keys at
    its `paths` offsets (its draft ancestors and itself). That is the tree mask, written so that a draft token reads its
    keys in the order in which plain decoding would. `positions` are for rotations only: the rows of a block drafter
    also see keys behind their own position.
    """

    token_ids: Tensor  # [rows] int64
    positions: Tensor  # [rows] int64, place in the sequence
    slots: Tensor  # [rows] int64, where the row's K and V go: block * block_size + offset in block
    sequences: Tensor  # [rows] int32, row of block_tables
    block_tables: Tensor  # [sequences, blocks] int32
    prefix_lens: Tensor  # [rows] int32
    paths: Tensor  # [rows, depth] int32 offsets in the sequence's own KV
    path_lens: Tensor  # [rows] int32
    logit_rows: Tensor | None  # [wanted] int64, rows whose logits are needed, ascending; None: all
    block_size: int
    max_keys: int  # the most keys that any row sees

    @property
    def num_rows(self) -> int:
        return self.token_ids.shape[0]  # `len` of a tensor takes five times as long

    @property
    def num_logits(self) -> int:
        return self.num_rows if self.logit_rows is None else self.logit_rows.shape[0]

    @property
    def replayed_rows(self) -> int:
        """How many rows the captured run has that this plan is for; its next replay leaves its logits in the same
        place. 0: the run is not captured."""
        return 0

    def to(self, device: torch.device) -> ForwardBatch:
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        moved: dict[str, Any] = {name: value.to(device) for name, value in values.items() if isinstance(value, Tensor)}
        return replace(self, **moved)

    @property
    def key_counts(self) -> Tensor:
        """How many keys a row sees: [rows] int32."""
        return self.prefix_lens + self.path_lens

    @cached_property
    def key_slots(self) -> Tensor:
        """The slot of every key that a row sees, in sequence order: [rows, max_keys] int64. Beyond its last key a row
        repeats its own first key, so that whoever masks those never touches another sequence's memory."""
        order = torch.arange(self.max_keys, device=self.positions.device)[None, :]
        return self._slots_of(torch.where(order < self.key_counts[:, None], order, 0), self.prefix_lens[:, None])

    @property
    def previous_slots(self) -> Tensor:
        """The slot of the key before a row's own, in sequence order: [rows] int64. Rows without one, such as those that
        only fill a plan up, get the first slot of their sequence: their paths may be those of an earlier batch."""
        order = (self.key_counts - 2).clamp(min=0)[:, None].long()
        return self._slots_of(order, self.prefix_lens.masked_fill(self.key_counts < 2, 1)[:, None])[:, 0]

    def in_window_blocks(self, window_map: Tensor) -> Self:
        """The same rows for layers with a window that keep some blocks only: window_map [blocks] int32. No row sees a
        block there that has no window block."""
        size, tables = self.block_size, self.block_tables
        # A row that only fills a plan up has the slot -1, and behind the blocks of a sequence may be any number.
        blocks = window_map.index_select(0, self.slots.clamp(min=0) // size).long()
        slots = torch.where(self.slots < 0, self.slots, blocks * size + self.slots % size)
        windowed = window_map.index_select(0, tables.flatten().clamp(max=len(window_map) - 1))
        return replace(self, slots=slots, block_tables=windowed.view(tables.shape))

    def _slots_of(self, order: Tensor, prefix_lens: Tensor) -> Tensor:
        """The slots of some keys of every row, [rows, keys] int64. Keys are counted in sequence order; behind the
        first `prefix_lens` [rows, 1] of them come those on the row's path."""
        offsets = order
        if self.paths.shape[1]:
            drafted = self.paths.gather(1, (order - prefix_lens).clamp(min=0))
            offsets = torch.where(order < prefix_lens, order, drafted)
        blocks = self.block_tables[self.sequences[:, None], offsets // self.block_size]
        return blocks.long() * self.block_size + offsets % self.block_size


class PackedBatch(NamedTuple):
    """A batch on the host, as `Backend.prepare` gets it: what ForwardBatch has, in few arrays. Any operation on a small
    array takes longer than what it computes, and one on a small tensor even longer."""

    wide: NDArray[np.int64]  # [3, rows]: token ids, positions, slots
    narrow: NDArray[np.int32]  # [3, rows]: sequences, prefix lengths, path lengths
    block_tables: NDArray[np.int32]  # [sequences, blocks]
    paths: NDArray[np.int32]  # [rows, depth]
    row_counts: list[int]  # of each sequence
    logit_rows: list[int] | None
    block_size: int
    max_keys: int
    reach: int  # every key that a row sees or stores is among the first `reach` of its sequence

    @property
    def num_rows(self) -> int:
        count: int = self.wide.shape[1]
        return count

    @property
    def num_logits(self) -> int:
        return self.num_rows if self.logit_rows is None else len(self.logit_rows)

    @property
    def borders(self) -> list[int]:
        """Where the rows of each sequence begin, and where the last ones end."""
        return [0, *accumulate(self.row_counts)]

    def tensors(self) -> ForwardBatch:
        token_ids, positions, slots = map(torch.from_numpy, self.wide)
        sequences, prefix_lens, path_lens = map(torch.from_numpy, self.narrow)
        return ForwardBatch(
            token_ids,
            positions,
            slots,
            sequences,
            torch.from_numpy(self.block_tables),
            prefix_lens,
            torch.from_numpy(self.paths),
            path_lens,
            None if self.logit_rows is None else torch.from_numpy(np.array(self.logit_rows, np.int64)),
            self.block_size,
            self.max_keys,
        )


def pack(works: Items[Work], block_size: int) -> PackedBatch:
    """Lay the works out row by row, in order. Each work's logits are its last `num_logits` rows, also in order."""
    token_ids: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    paths: dict[int, _Path] = {}  # of the rows of drafts
    row_counts: list[int] = []
    logit_counts: list[int] = []
    reach = 0
    for work in works:
        sequence, count, _, draft, computed = work
        start, first, table = sequence.num_computed_tokens, len(token_ids), sequence.block_table
        end = start + count
        if count == 1:  # as for most works of large batches
            token_ids.append(sequence.token_ids[start])
            positions.append(start)
            slots.append(table[start // block_size] * block_size + start % block_size)
        else:
            token_ids += sequence.token_ids[start:end]
            positions += range(start, end)
            _add_slots(slots, table, start, end, block_size)
        if draft.tokens:
            token_ids += draft.tokens[computed:]
            _add_slots(slots, table, end + computed, end + len(draft.tokens), block_size)
            node_positions, node_paths = _node_keys(draft.parents, end)
            paths.update(enumerate(node_paths[computed:], len(positions)))
            positions += node_positions[computed:]
            reach = max(reach, end + len(draft.tokens))
        row_counts.append(len(token_ids) - first)
        logit_counts.append(work.num_logits)
    rows, max_keys = len(token_ids), max(positions) + 1
    wide = np.array([token_ids, positions, slots], np.int64)
    narrow = np.zeros((3, rows), np.int32)
    if len(works) > 1:
        narrow[0] = np.arange(rows) if rows == len(works) else np.arange(len(works)).repeat(row_counts)
    narrow[1] = wide[1] + 1
    dense = np.zeros((rows, 0), np.int32)
    if any(paths.values()):
        of_rows = [paths.get(row, ()) for row in range(rows)]
        lengths = [len(path) for path in of_rows]
        columns = np.array([lengths, *zip_longest(*of_rows, fillvalue=0)], np.int32)
        dense = np.ascontiguousarray(columns[1:].T)
        narrow[1] -= columns[0]  # what a row sees is its prefix and its path
        narrow[2] = columns[0]
    return PackedBatch(
        wide=wide,
        narrow=narrow,
        block_tables=_block_tables(works),
        paths=dense,
        row_counts=row_counts,
        logit_rows=None if sum(logit_counts) == rows else _last_rows(row_counts, logit_counts),
        block_size=block_size,
        max_keys=max_keys,
        reach=max(reach, max_keys),
    )


def _last_rows(row_counts: list[int], counts: list[int]) -> list[int]:
    """The last `counts` rows of each work."""
    ends = zip(accumulate(row_counts), counts, strict=True)
    return [row for end, count in ends for row in range(end - count, end)]


def _add_slots(slots: list[int], table: MutableSequence[int], offset: int, end: int, block_size: int) -> None:
    """Add the slots of a sequence's keys from `offset` up to `end`, block by block."""
    while offset < end:
        block, place = divmod(offset, block_size)
        count = min(end - offset, block_size - place)
        slot = table[block] * block_size + place
        slots += range(slot, slot + count)
        offset += count


def _node_keys(parents: Items[int], end: int) -> tuple[list[int], list[_Path]]:
    """Of all nodes of a draft behind `end` tokens: positions and paths. A path that goes straight on behind the prefix
    is part of it: the leading nodes that are one chain have none."""
    paths: list[_Path] = []  # with all ancestors
    straight = 0  # leading nodes that are one chain
    for node, parent in enumerate(parents):
        paths.append((*paths[parent], end + node) if parent >= 0 else (end + node,))
        if straight == node == parent + 1:
            straight += 1
    positions = [end + len(path) - 1 for path in paths]
    paths[:straight] = [()] * straight
    return positions, paths


def _block_tables(works: Items[Work]) -> NDArray[np.int32]:
    """[works, blocks], with zeros behind the last block of each: all blocks in one copy, not table by table."""
    blocks, lengths = array("i"), []
    for work in works:
        table = work.sequence.block_table
        blocks.extend(table)
        lengths.append(len(table))
    widest = max(lengths)
    known = np.frombuffer(blocks, np.int32)
    if len(known) == widest * len(works):
        return known.reshape(len(works), widest)
    tables = np.zeros((len(works), widest), np.int32)
    tables[np.arange(widest) < np.array(lengths)[:, None]] = known
    return tables
