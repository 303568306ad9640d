"""The tensors behind the block table, in groups: the target's layers (those with a window apart, where they keep fewer
blocks), its taps and each proposer's own layers share one table."""

from __future__ import annotations

from array import array
from collections.abc import Sequence as Items
from dataclasses import dataclass

import torch
from torch import Tensor

from foredraft.backends.base import Backend
from foredraft.backends.layers import LayerKV, Taps, WindowMap
from foredraft.config import ModelConfig
from foredraft.types import Stop, Verdict, Work

TARGET_GROUP = "target"
WINDOWS_GROUP = "windows"
TAPS_GROUP = "taps"
_USUAL_MOVES = (1, 8, 16, 32, 64)
_Move = tuple[int, int]  # from slot to slot


@dataclass(frozen=True)
class Group:
    """What one owner keeps of every token: [parts, slots, ...], in one piece, so that tokens are moved in all parts at
    once. A group that follows the target is moved with the target's accepted tokens. Any other is its proposer's own
    scratch behind the committed tokens."""

    memory: Tensor
    backend: Backend
    follows_target: bool
    in_windows: bool = False  # whether its slots are those of window blocks


class KVCache:
    """All groups, one slot per token of every block. Memory is touched only where tokens are written.

    With `num_window_blocks`, the target's layers with a window have so many blocks only: a block has a window block
    while a window may reach it (engine/window_blocks.py). `window_blocks` is the map, which the block pool writes.
    """

    def __init__(self, num_blocks: int, block_size: int, num_window_blocks: int = 0) -> None:
        assert num_window_blocks < num_blocks
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.num_window_blocks = num_window_blocks
        self.window_blocks = array("i", [-1]) * num_blocks
        self.groups: dict[str, Group] = {}

    def add_group(self, name: str, config: ModelConfig, backend: Backend, scratch_blocks: int = 0) -> list[LayerKV]:
        """Make the layers of a model part of the cache. Its scratch blocks come behind the blocks of the pool; no
        sequence holds them."""
        is_target = name == TARGET_GROUP
        windowed = [is_target and self.num_window_blocks > 0 and window > 0 for window in config.windows]

        def memory(num_layers: int, num_blocks: int) -> Tensor:
            shape = (2 * num_layers, num_blocks * self.block_size, config.num_kv_heads, config.head_dim)
            return torch.empty(shape, dtype=backend.kv_dtype, device=backend.device)

        own = memory(windowed.count(False), self.num_blocks + scratch_blocks)
        self.groups[name] = Group(own, backend, follows_target=is_target)
        whole = zip(own[0::2], own[1::2], strict=True)
        if not any(windowed):
            return [LayerKV(k, v) for k, v in whole]
        of_windows = memory(windowed.count(True), self.num_window_blocks)
        self.groups[WINDOWS_GROUP] = Group(of_windows, backend, follows_target=True, in_windows=True)
        window_map = WindowMap(self.window_blocks, backend.device)
        in_windows = zip(of_windows[0::2], of_windows[1::2], strict=True)
        return [LayerKV(*next(in_windows), window_map) if each else LayerKV(*next(whole)) for each in windowed]

    def add_taps(self, layers: tuple[int, ...], hidden_size: int, backend: Backend) -> Taps:
        """Make the residual streams after some of the target's layers part of the cache."""
        shape = (self.num_blocks * self.block_size, len(layers) * hidden_size)
        cache = torch.empty(shape, dtype=backend.kv_dtype, device=backend.device)
        self.groups[TAPS_GROUP] = Group(cache[None], backend, follows_target=True)
        return Taps(layers, cache)

    def keep(self, works: Items[Work], verdicts: Items[Verdict], stops: Items[Stop]) -> None:
        """Move what belongs to the accepted nodes to the slots of the committed tokens, in all groups that follow the
        target. Chains are there already."""
        moves: list[_Move] = []
        for work, verdict, stop in zip(works, verdicts, stops, strict=True):
            if not verdict.path:
                continue
            slot, first = work.sequence.slot, work.sequence.num_tokens
            for depth, node in enumerate(verdict.path[: stop.num_kept]):
                if node != depth:
                    moves.append((slot(first + node, self.block_size), slot(first + depth, self.block_size)))
        if moves:
            self._move(moves, [(self._window_slot(source), self._window_slot(target)) for source, target in moves])

    def warm(self) -> None:
        """Move a key onto itself, as often as is usual in a step: a device needs time for the first of each number."""
        for count in _USUAL_MOVES:
            self._move([(0, 0)] * count, [(0, 0)] * count)

    def _window_slot(self, slot: int) -> int:
        """Where what lies at a slot of a block lies in layers with a window."""
        return self.window_blocks[slot // self.block_size] * self.block_size + slot % self.block_size

    def _move(self, moves: list[_Move], in_windows: list[_Move]) -> None:
        following = [group for group in self.groups.values() if group.follows_target]
        for its_moves, is_in_windows in ((moves, False), (in_windows, True)):
            if caches := [group.memory for group in following if group.in_windows == is_in_windows]:
                self.groups[TARGET_GROUP].backend.move(caches, its_moves)
