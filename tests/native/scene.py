"""Texts of several lengths, scattered over the shuffled blocks of a cache that is NaN everywhere else."""

from __future__ import annotations

import torch
from torch import Tensor

from foredraft.backends.layers import AttentionShape, LayerKV
from foredraft.batch import ForwardBatch

BLOCK = 16


class Scene:
    """Sequences with their keys and values, a cache that holds them, and rows that look at them."""

    def __init__(self, shape: AttentionShape, lengths: list[int], kv_dtype: torch.dtype) -> None:
        self.shape, self.lengths = shape, lengths
        self.width = (max(lengths) + 40) // BLOCK + 1
        blocks = len(lengths) * self.width + 3
        self.tables = torch.randperm(blocks)[: len(lengths) * self.width].view(len(lengths), -1).int()
        self.cache = LayerKV(*(self._nothing(blocks, kv_dtype) for _ in range(2)))
        self.rows: list[tuple[int, int, list[int]]] = []  # sequence, prefix length, path offsets
        for sequence, length in enumerate(lengths):
            for side in (self.cache.k, self.cache.v):
                values = torch.randn(length, shape.num_kv_heads, shape.head_dim).to(kv_dtype)
                side[self.slots(sequence, torch.arange(length))] = values

    def _nothing(self, blocks: int, dtype: torch.dtype) -> Tensor:
        return torch.full((blocks * BLOCK, self.shape.num_kv_heads, self.shape.head_dim), float("nan"), dtype=dtype)

    def slots(self, sequence: int, offsets: Tensor) -> Tensor:
        return self.tables[sequence].long()[offsets // BLOCK] * BLOCK + offsets % BLOCK

    def batch(self, rows: list[int] | None = None) -> ForwardBatch:
        chosen = self.rows if rows is None else [self.rows[row] for row in rows]
        depth = max(len(path) for _, _, path in chosen)
        paths = torch.full((len(chosen), depth), -1, dtype=torch.int32)
        for row, (_, _, path) in enumerate(chosen):
            paths[row, : len(path)] = torch.tensor(path, dtype=torch.int32)
        positions = torch.tensor([prefix + len(path) - 1 for _, prefix, path in chosen])
        return ForwardBatch(
            token_ids=torch.zeros(len(chosen), dtype=torch.int64),
            positions=positions,
            slots=torch.zeros(len(chosen), dtype=torch.int64),
            sequences=torch.tensor([sequence for sequence, _, _ in chosen], dtype=torch.int32),
            block_tables=self.tables,
            prefix_lens=torch.tensor([prefix for _, prefix, _ in chosen], dtype=torch.int32),
            paths=paths,
            path_lens=torch.tensor([len(path) for _, _, path in chosen], dtype=torch.int32),
            logit_rows=torch.arange(len(chosen)),
            block_size=BLOCK,
            max_keys=int(positions.max()) + 1,
        )

    def reference(self, q: Tensor) -> Tensor:
        shape, out = self.shape, []
        for row, (sequence, prefix, path) in enumerate(self.rows):
            offsets = torch.tensor([*range(prefix), *path])
            offsets = offsets[max(shape.first_key, len(offsets) - (shape.window or len(offsets))) :]
            slots = self.slots(sequence, offsets)
            group = shape.num_heads // shape.num_kv_heads
            k, v = (side[slots].double().repeat_interleave(group, 1) for side in (self.cache.k, self.cache.v))
            query = q[row].double().view(shape.num_heads, shape.head_dim)
            weights = torch.softmax(torch.einsum("hd,khd->hk", query, k) * shape.scale, -1)
            out.append(torch.einsum("hk,khd->hd", weights, v).flatten())
        return torch.stack(out)


def attention_shape(
    group: int, head_dim: int, window: int = 0, rotary_dim: int = 0, first_key: int = 0
) -> AttentionShape:
    return AttentionShape(3 * group, 3, head_dim, rotary_dim, head_dim**-0.5, window, 1e-5, first_key)
