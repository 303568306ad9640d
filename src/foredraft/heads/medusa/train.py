"""Training of Medusa heads: every offset against the target, on the states of the target itself."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional

from foredraft.heads.base import MAX_BLOCK
from foredraft.heads.medusa.module import MedusaModule
from foredraft.heads.train import HeadStudent
from foredraft.models.fields import MAX_LAYERS
from foredraft.train.losses import best_tokens, masked_loss
from foredraft.train.student import Start, whole
from foredraft.train.target_batch import TargetBatch

_OFFSET_WEIGHT = 0.8  # of each offset, in units of the one before
_SHARE = 0.5  # of the positions that a step looks at: offsets are many and their trunk is small


@dataclass(frozen=True)
class Options:
    offsets: int = whole(4, MAX_BLOCK)
    layers: int = whole(1, MAX_LAYERS)  # of each offset


class MedusaStudent(HeadStudent[MedusaModule]):
    def loss(self, seen: TargetBatch, generator: torch.Generator) -> Tensor:
        state = self._state(seen)
        looked_at = torch.rand(state.shape[:2], generator=generator, device=state.device) < _SHARE
        losses = []
        for offset in range(self.module.config.block):
            index = torch.where(looked_at, seen.rows_ahead(1 + offset), -1)
            chosen = index >= 0
            rows = self.module.blocks[offset](state[chosen])
            losses.append(
                _OFFSET_WEIGHT**offset * masked_loss(rows, self.module.lm_head.weight, seen.labels, index[chosen])
            )
        return torch.stack(losses).sum() / sum(_OFFSET_WEIGHT**offset for offset in range(len(losses)))

    @torch.no_grad()
    def drafts(self, seen: TargetBatch) -> Tensor:
        state, weight, token_ids = self._state(seen), self.module.lm_head.weight, self.module.token_ids
        found = [best_tokens(block(state), weight, token_ids) for block in self.module.blocks[: self.depth]]
        return torch.stack([functional.pad(tokens[:, :-1], (1, 0)) for tokens in found])

    def _state(self, seen: TargetBatch) -> Tensor:
        return self.module.norm(seen.features.streams[self.module.config.taps[0]])


def build(options: Options, start: Start) -> MedusaStudent:
    shape, last = start.shape, start.shape.target_num_layers
    config = replace(shape, kind="medusa", taps=(last,), block=options.offsets, num_layers=options.layers)
    return MedusaStudent(start.name, MedusaModule(config), start.target, start.token_ids, options.offsets)
