"""The tensors behind the block table, in groups: the target's layers, its taps and each proposer's own layers share one
table."""

from __future__ import annotations

from collections.abc import Sequence as Items
from dataclasses import dataclass

import torch
from torch import Tensor

from foredraft.backends.base import Backend
from foredraft.backends.layers import LayerKV, Taps
from foredraft.config import ModelConfig
from foredraft.types import Stop, Verdict, Work

TARGET_GROUP = "target"
TAPS_GROUP = "taps"
_USUAL_MOVES = (1, 8, 16, 32, 64)


@dataclass(frozen=True)
class Group:
    """What one owner keeps of every token: [parts, slots, ...], in one piece, so that tokens are moved in all parts at
    once. A group that follows the target is moved with the target's accepted tokens. Any other is its proposer's own
    scratch behind the committed tokens."""

    memory: Tensor
    backend: Backend
    follows_target: bool


class KVCache:
    """All groups, one slot per token of every block. Memory is touched only where tokens are written."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.groups: dict[str, Group] = {}

    def add_group(self, name: str, config: ModelConfig, backend: Backend, scratch_blocks: int = 0) -> list[LayerKV]:
        """Make the layers of a model part of the cache. Its scratch blocks come behind the blocks of the pool; no
        sequence holds them."""
        slots = (self.num_blocks + scratch_blocks) * self.block_size
        shape = (2 * config.num_layers, slots, config.num_kv_heads, config.head_dim)
        memory = torch.empty(shape, dtype=backend.kv_dtype, device=backend.device)
        self.groups[name] = Group(memory, backend, follows_target=name == TARGET_GROUP)
        return [LayerKV(k, v) for k, v in zip(memory[0::2], memory[1::2], strict=True)]

    def add_taps(self, layers: tuple[int, ...], hidden_size: int, backend: Backend) -> Taps:
        """Make the residual streams after some of the target's layers part of the cache."""
        shape = (self.num_blocks * self.block_size, len(layers) * hidden_size)
        cache = torch.empty(shape, dtype=backend.kv_dtype, device=backend.device)
        self.groups[TAPS_GROUP] = Group(cache[None], backend, follows_target=True)
        return Taps(layers, cache)

    def keep(self, works: Items[Work], verdicts: Items[Verdict], stops: Items[Stop]) -> None:
        """Move what belongs to the accepted nodes to the slots of the committed tokens, in all groups that follow the
        target. Chains are there already."""
        moves: list[tuple[int, int]] = []
        for work, verdict, stop in zip(works, verdicts, stops, strict=True):
            if not verdict.path:
                continue
            slot, first = work.sequence.slot, work.sequence.num_tokens
            for depth, node in enumerate(verdict.path[: stop.num_kept]):
                if node != depth:
                    moves.append((slot(first + node, self.block_size), slot(first + depth, self.block_size)))
        if moves:
            self._move(moves)

    def warm(self) -> None:
        """Move a key onto itself, as often as is usual in a step: a device needs time for the first of each number."""
        for count in _USUAL_MOVES:
            self._move([(0, 0)] * count)

    def _move(self, moves: list[tuple[int, int]]) -> None:
        following = [group.memory for group in self.groups.values() if group.follows_target]
        self.groups[TARGET_GROUP].backend.move(following, moves)
