"""A Medusa head as it is served: one residual block per offset on the target's last hidden state.

The state of position t, which is the residual stream after the last layer, gives the logits of tokens t+2, t+3 and so
on, all at once and each without knowing the others."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from foredraft.backends.base import Backend, Linear
from foredraft.models.heads.weights import HeadWeights, TapReader


@dataclass(frozen=True, eq=False)
class MedusaHead:
    """A loaded head."""

    backend: Backend
    norm: Tensor
    norm_eps: float
    offsets: int
    blocks: Linear  # of all offsets, side by side
    output: Linear
    token_ids: Tensor  # [draft_vocab]
    taps: TapReader

    def logits(self, slots: Tensor) -> Tensor:
        """[slots × offsets, draft_vocab] from the states at some slots."""
        state = self.backend.rms_norm(self.taps.rows(slots), self.norm, self.norm_eps)
        mixed = self.backend.linear(state, self.blocks).view(len(slots), self.offsets, -1)
        rows = state[:, None] + functional.silu(mixed)
        return self.backend.logits(rows.flatten(0, 1), self.output)


def load_medusa(weights: HeadWeights, taps: TapReader, backend: Backend) -> MedusaHead:
    names = [f"blocks.{offset}.layers.0" for offset in range(weights.config.block)]
    return MedusaHead(
        backend=backend,
        norm=weights.vector("norm.weight"),
        norm_eps=weights.config.norm_eps,
        offsets=weights.config.block,
        blocks=weights.linear(
            *(f"{name}.weight" for name in names), bias=torch.cat([weights.vector(f"{name}.bias") for name in names])
        ),
        output=weights.linear("lm_head.weight", is_head=True),
        token_ids=weights.token_ids,
        taps=taps,
    )
