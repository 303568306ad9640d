"""One forward run's input: rows of many sequences packed side by side, prompts, single tokens and draft trees alike."""

from __future__ import annotations

from collections.abc import Sequence as Items
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from foredraft.types import Work


@dataclass(frozen=True)
class ForwardBatch:
    """Every row is one token. A row sees the first `prefix_lens` keys of its sequence in order, and then the keys at
    its `paths` offsets (its draft ancestors and itself), so `prefix_lens + path_lens == positions + 1`.
    That is the tree mask, written so that a draft token reads its keys in the order in which plain decoding would.
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
        return len(self.token_ids)

    @property
    def num_logits(self) -> int:
        return self.num_rows if self.logit_rows is None else len(self.logit_rows)

    def to(self, device: torch.device) -> ForwardBatch:
        """The same batch on another device."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        moved: dict[str, Any] = {name: value.to(device) for name, value in values.items() if isinstance(value, Tensor)}
        return replace(self, **moved)

    @cached_property
    def key_slots(self) -> Tensor:
        """The slot of every key that a row sees, in sequence order: [rows, max_keys] int64. Beyond its last key a row
        repeats its own first key, so that whoever masks those never touches another sequence's memory."""
        order = torch.arange(self.max_keys, device=self.positions.device)[None, :]
        order = torch.where(order <= self.positions[:, None], order, 0)
        beyond = (order - self.prefix_lens[:, None]).clamp(min=0)
        drafted = self.paths.gather(1, beyond) if self.paths.shape[1] else order
        offsets = torch.where(order < self.prefix_lens[:, None], order, drafted)
        blocks = self.block_tables[self.sequences[:, None], offsets // self.block_size]
        return blocks.long() * self.block_size + offsets % self.block_size


def pack(works: Items[Work], block_size: int) -> ForwardBatch:
    """Lay the works out row by row, in order. Each work's logits are its last `num_logits` rows, also in order."""
    token_ids: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    sequences: list[int] = []
    prefix_lens: list[int] = []
    paths: list[tuple[int, ...]] = []
    logit_rows: list[int] = []
    for index, work in enumerate(works):
        seq, start = work.sequence, work.sequence.num_computed_tokens
        end = start + work.num_new_tokens
        table = seq.block_table
        token_ids += seq.token_ids[start:end]
        positions += range(start, end)
        prefix_lens += range(start + 1, end + 1)
        paths += [()] * work.num_new_tokens
        node_paths: list[tuple[int, ...]] = []
        for node, (token, parent) in enumerate(zip(work.draft.tokens, work.draft.parents, strict=True)):
            path = (*(node_paths[parent] if parent >= 0 else ()), end + node)
            node_paths.append(path)
            if node < work.num_computed_nodes:
                continue
            token_ids.append(token)
            positions.append(end - 1 + len(path))
            prefix_lens.append(end)
        paths += node_paths[work.num_computed_nodes :]
        offsets = (*range(start, end), *range(end + work.num_computed_nodes, end + len(work.draft)))
        slots += [table[offset // block_size] * block_size + offset % block_size for offset in offsets]
        sequences += [index] * work.num_rows
        logit_rows += range(len(token_ids) - work.num_logits, len(token_ids))

    tables = np.zeros((len(works), max(len(work.sequence.block_table) for work in works)), np.int32)
    for index, work in enumerate(works):
        tables[index, : len(work.sequence.block_table)] = work.sequence.block_table
    path_array = np.zeros((len(paths), max(map(len, paths))), np.int32)
    for row, path in enumerate(paths):
        path_array[row, : len(path)] = path

    def tensor(values: Items[int] | np.ndarray, dtype: type[np.integer]) -> Tensor:
        return torch.from_numpy(np.asarray(values, dtype))

    return ForwardBatch(
        token_ids=tensor(token_ids, np.int64),
        positions=tensor(positions, np.int64),
        slots=tensor(slots, np.int64),
        sequences=tensor(sequences, np.int32),
        block_tables=tensor(tables, np.int32),
        prefix_lens=tensor(prefix_lens, np.int32),
        paths=tensor(path_array, np.int32),
        path_lens=tensor([len(path) for path in paths], np.int32),
        logit_rows=None if len(logit_rows) == len(token_ids) else tensor(logit_rows, np.int64),
        block_size=block_size,
        max_keys=max(positions) + 1,
    )
