"""The tensors behind the block table, in layer groups: the target's layers and each proposer's own share one table."""

from __future__ import annotations

from collections.abc import Sequence as Items

import torch

from foredraft.backends.base import Backend, LayerKV
from foredraft.config import ModelConfig
from foredraft.types import Stop, Verdict, Work

TARGET_GROUP = "target"


class KVCache:
    """K and V of every layer group, one slot per token of every block. Memory is touched only where tokens are
    written."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.groups: dict[str, list[LayerKV]] = {}

    def add_group(self, name: str, config: ModelConfig, backend: Backend) -> list[LayerKV]:
        """Make the layers of a model part of the cache."""
        shape = (self.num_blocks * self.block_size, config.num_kv_heads, config.head_dim)

        def slots() -> torch.Tensor:
            return torch.empty(shape, dtype=backend.kv_dtype, device=backend.device)

        self.groups[name] = [LayerKV(slots(), slots()) for _ in range(config.num_layers)]
        return self.groups[name]

    def keep(self, works: Items[Work], verdicts: Items[Verdict], stops: Items[Stop]) -> None:
        """Move the accepted nodes' K and V to the slots of the committed tokens. Chains are there already.

        This concerns the target's layers: behind the committed tokens, every other group is its proposer's own scratch.
        """
        moves: list[tuple[int, int]] = []
        for work, verdict, stop in zip(works, verdicts, stops, strict=True):
            if not verdict.path:
                continue
            first = work.sequence.num_tokens
            for depth, node in enumerate(verdict.path[: stop.num_kept]):
                if node != depth:
                    moves.append((self._slot(work, first + node), self._slot(work, first + depth)))
        if not moves:
            return
        layers = self.groups[TARGET_GROUP]
        sources, targets = (torch.tensor(side, device=layers[0].k.device) for side in zip(*moves, strict=True))
        for layer in layers:
            layer.k[targets] = layer.k[sources]
            layer.v[targets] = layer.v[sources]

    def _slot(self, work: Work, offset: int) -> int:
        return work.sequence.block_table[offset // self.block_size] * self.block_size + offset % self.block_size
