"""A Medusa head as it is served: a block of residual layers per offset on the target's last hidden state.

The state of position t, which is the residual stream after the last layer, gives the logits of tokens t+2, t+3 and so
on, all at once and each without knowing the others."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from foredraft.backends.base import Backend, Linear
from foredraft.heads.weights import HeadWeights, TapReader


@dataclass(frozen=True, eq=False)
class MedusaHead:
    backend: Backend
    norm: Tensor
    norm_eps: float
    offsets: int
    first: Linear  # layer of all offsets, side by side: they read the same state
    further: list[list[Linear]]  # layers by offset
    output: Linear
    token_ids: Tensor  # [draft_vocab]
    taps: TapReader

    def logits(self, slots: Tensor) -> Tensor:
        """[slots × offsets, draft_vocab] from the states at some slots."""
        state = self.backend.rms_norm(self.taps.rows(slots), self.norm, self.norm_eps)
        mixed = self.backend.linear(state, self.first).view(len(slots), self.offsets, -1).transpose(0, 1)
        rows = state + self.backend.silu(mixed.contiguous())  # [offsets, slots, hidden]
        for layer in self.further:
            mixed = torch.stack([self.backend.linear(x, offset) for x, offset in zip(rows, layer, strict=True)])
            rows = rows + self.backend.silu(mixed)
        return self.backend.logits(rows.transpose(0, 1).flatten(0, 1), self.output)


def load_medusa(weights: HeadWeights, taps: TapReader) -> MedusaHead:
    def layer(index: int, offsets: range) -> Linear:
        names = [f"blocks.{offset}.layers.{index}" for offset in offsets]
        biases = torch.cat([weights.vector(f"{name}.bias") for name in names])
        return weights.linear(*(f"{name}.weight" for name in names), bias=biases)

    offsets = range(weights.config.block)
    return MedusaHead(
        backend=weights.backend,
        norm=weights.vector("norm.weight"),
        norm_eps=weights.config.norm_eps,
        offsets=weights.config.block,
        first=layer(0, offsets),
        further=[
            [layer(index, range(offset, offset + 1)) for offset in offsets]
            for index in range(1, weights.config.num_layers)
        ],
        output=weights.linear("lm_head.weight", is_head=True),
        token_ids=weights.token_ids,
        taps=taps,
    )
