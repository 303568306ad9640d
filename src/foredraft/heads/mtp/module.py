"""MTP: a whole decoder layer over one row of embedding and state, run once per drafted token with its own output fed
back."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from foredraft.heads.base import HeadConfig
from foredraft.heads.module import DecoderLayer, HeadModule, KeysValues, Linear, RMSNorm


class MtpModule(HeadModule):
    """A row at position t is made of the embedding of token t+1 and the state of position t: the target's own after its
    final norm for committed positions, and the output of the row before for drafted ones. The target's output head
    makes the logits of token t+2 out of it."""

    __call__: Callable[..., tuple[Tensor, KeysValues]]

    def __init__(self, config: HeadConfig) -> None:
        super().__init__(config)
        hidden, eps = config.hidden_size, config.norm_eps
        self.enorm, self.hnorm, self.norm = (RMSNorm(hidden, eps) for _ in range(3))
        self.fc = Linear(2 * hidden, hidden)
        self.midlayer = DecoderLayer(config, config.qk_norm)

    def forward(
        self, embeddings: Tensor, state: Tensor, positions: Tensor, past: list[KeysValues], mask: Tensor | None
    ) -> tuple[Tensor, KeysValues]:
        """The output [batch, length, hidden], after the norm, and the rows' own K and V. Rows see the keys of `past`,
        then their own, as far as `mask` [batch or 1, 1, length, keys] is true; None is causal, without a past."""
        x = self.fc(torch.cat([self.enorm(embeddings), self.hnorm(state)], dim=-1))
        y, own = self.midlayer.step(x, positions, past, mask)
        return self.norm(y), own
