"""One forward run's input: rows of many sequences packed side by side, prompts, single tokens and draft trees alike."""

from __future__ import annotations

from array import array
from collections.abc import Sequence as Items
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from foredraft.types import Work


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

    def to(self, device: torch.device) -> ForwardBatch:
        """The same batch on another device."""
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
        order = torch.where(order < self.key_counts[:, None], order, 0)
        beyond = (order - self.prefix_lens[:, None]).clamp(min=0)
        drafted = self.paths.gather(1, beyond) if self.paths.shape[1] else order
        offsets = torch.where(order < self.prefix_lens[:, None], order, drafted)
        blocks = self.block_tables[self.sequences[:, None], offsets // self.block_size]
        return blocks.long() * self.block_size + offsets % self.block_size

    @property
    def previous_slots(self) -> Tensor:
        """The slot of the key before a row's own, in sequence order: [rows] int64. Rows without one, such as those that
        only fill a plan up, get the first slot of their sequence: their paths may be those of an earlier batch."""
        order = (self.key_counts - 2).clamp(min=0)
        offsets = order
        if self.paths.shape[1]:
            beyond = (order - self.prefix_lens).clamp(min=0).long()
            drafted = self.paths.gather(1, beyond[:, None])[:, 0]
            offsets = torch.where((order < self.prefix_lens) | (self.key_counts < 2), order, drafted)
        blocks = self.block_tables[self.sequences, offsets // self.block_size]
        return blocks.long() * self.block_size + offsets % self.block_size


def pack(works: Items[Work], block_size: int) -> ForwardBatch:
    """Lay the works out row by row, in order. Each work's logits are its last `num_logits` rows, also in order."""
    token_ids: list[int] = []
    offsets: list[int] = []  # of every row's K and V among those of its sequence
    counts: list[int] = []  # rows of each work
    logit_rows: list[int] = []
    nodes = _NodeRows()
    for work in works:
        sequence, count = work.sequence, work.num_new_tokens
        start, first = sequence.num_computed_tokens, len(token_ids)
        if count == 1:
            token_ids.append(sequence.token_ids[start])
            offsets.append(start)
        else:
            token_ids += sequence.token_ids[start : start + count]
            offsets += range(start, start + count)
        if work.draft.tokens:
            nodes.add(work, len(token_ids))
            token_ids += work.draft.tokens[work.num_computed_nodes :]
            offsets += range(start + count + work.num_computed_nodes, start + count + len(work.draft))
        rows = len(token_ids)
        counts.append(rows - first)
        logit_rows += range(rows - work.num_logits, rows)

    tables = _block_tables(works)
    sequences = np.arange(len(works), dtype=np.int32)
    if len(token_ids) > len(works):
        sequences = sequences.repeat(counts)
    at = np.array(offsets, np.int64)
    block, place = np.divmod(at, block_size)
    positions, prefix_lens, paths, path_lens = nodes.keys(at)
    return ForwardBatch(
        token_ids=torch.from_numpy(np.array(token_ids, np.int64)),
        positions=torch.from_numpy(positions),
        slots=torch.from_numpy(tables[sequences, block] * np.int64(block_size) + place),
        sequences=torch.from_numpy(sequences),
        block_tables=torch.from_numpy(tables),
        prefix_lens=torch.from_numpy(prefix_lens),
        paths=torch.from_numpy(paths),
        path_lens=torch.from_numpy(path_lens),
        logit_rows=torch.from_numpy(np.array(logit_rows, np.int64)) if len(logit_rows) < len(token_ids) else None,
        block_size=block_size,
        max_keys=max(positions.tolist() if paths.size else offsets) + 1,
    )


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


class _NodeRows:
    """The rows of draft nodes: what sets them apart from rows of known tokens."""

    def __init__(self) -> None:
        self._rows: list[int] = []
        self._prefix_lens: list[int] = []
        self._paths: list[tuple[int, ...]] = []

    def add(self, work: Work, row: int) -> None:
        """The nodes of one draft that are still to be run, from `row` on."""
        end = work.sequence.num_computed_tokens + work.num_new_tokens
        paths: list[tuple[int, ...]] = []
        for node, parent in enumerate(work.draft.parents):
            paths.append((*(paths[parent] if parent >= 0 else ()), end + node))
        paths = paths[work.num_computed_nodes :]
        self._rows += range(row, row + len(paths))
        self._prefix_lens += [end] * len(paths)
        self._paths += paths

    def keys(
        self, at: NDArray[np.int64]
    ) -> tuple[NDArray[np.int64], NDArray[np.int32], NDArray[np.int32], NDArray[np.int32]]:
        """Positions, prefix lengths, paths and path lengths of all rows, whose own keys have these offsets."""
        lens = [len(path) for path in self._paths]
        depth, count = max(lens, default=0), len(at)
        prefix_lens, path_lens = (at + 1).astype(np.int32), np.zeros(count, np.int32)
        paths = np.zeros((count, depth), np.int32)
        if not lens:
            return at, prefix_lens, paths, path_lens
        rows = np.array(self._rows)
        prefix_lens[rows], path_lens[rows] = self._prefix_lens, lens
        paths[rows] = [path + (0,) * (depth - len(path)) for path in self._paths]
        return (prefix_lens + path_lens - 1).astype(np.int64), prefix_lens, paths, path_lens
