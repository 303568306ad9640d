"""A Medusa head as it is served: a block of residual layers per offset on the target's last hidden state.

The state of position t, which is the residual stream after the last layer, gives the logits of tokens t+2, t+3 and so
on, all at once and each without knowing the others."""

from __future__ import annotations

import torch
from torch import Tensor

from foredraft.backends.layers import Linear
from foredraft.heads.weights import HeadWeights, TapReader
from foredraft.models.decoder import Decoder


class MedusaHead:
    def __init__(self, weights: HeadWeights, target: Decoder, taps: TapReader) -> None:
        def layer(index: int, offsets: range) -> Linear:
            return weights.linear(*(f"blocks.{offset}.layers.{index}.weight" for offset in offsets))

        config, self.backend, self.taps = weights.config, weights.backend, taps
        self.norm, self.norm_eps, self.offsets = weights.vector("norm.weight"), config.norm_eps, config.block
        self.first = layer(0, range(self.offsets))  # of all offsets, side by side: they read the same state
        self.further = [  # by offset
            [layer(index, range(offset, offset + 1)) for offset in range(self.offsets)]
            for index in range(1, config.num_layers)
        ]
        # One for all offsets, or one for each.
        names = [f"lm_heads.{offset}.weight" for offset in range(self.offsets if config.output_per_offset else 0)]
        self.outputs = [weights.linear(name, is_head=True) for name in names] or [weights.output(target)]
        self.token_ids = weights.token_ids  # [draft_vocab]

    def logits(self, slots: Tensor) -> Tensor:
        """[slots × offsets, draft_vocab] from the states at some slots."""
        state = self.backend.rms_norm(self.taps.rows(slots), self.norm, self.norm_eps)
        mixed = self.backend.linear(state, self.first).view(len(slots), self.offsets, -1).transpose(0, 1)
        rows = state + self.backend.silu(mixed.contiguous())  # [offsets, slots, hidden]
        for layer in self.further:
            mixed = torch.stack([self.backend.linear(x, offset) for x, offset in zip(rows, layer, strict=True)])
            rows = rows + self.backend.silu(mixed)
        if len(self.outputs) == 1:
            return self.backend.logits(rows.transpose(0, 1).flatten(0, 1), self.outputs[0])
        logits = [self.backend.logits(x, output) for x, output in zip(rows, self.outputs, strict=True)]
        return torch.stack(logits, dim=1).flatten(0, 1)
