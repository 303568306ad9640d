"""EAGLE-3: one decoder layer over [embedding; feature], run once per drafted token with its own output fed back."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from foredraft.heads.base import HeadConfig
from foredraft.heads.module import Attention, HeadModule, KeysValues, Linear, Mlp, RMSNorm


class EagleModule(HeadModule):
    """A row at position t is made of the embedding of token t+1 and the feature h of position t. `midlayer` makes y out
    of them, and `norm` and `lm_head` make that the logits of token t+2. h is `fc` of the taps for committed positions,
    and the y of the row before for drafted ones."""

    mapped: Tensor

    def __init__(self, config: HeadConfig) -> None:
        super().__init__(config)
        self.fc = Linear(len(config.taps) * config.target_hidden_size, config.hidden_size)
        self.midlayer = EagleLayer(config)
        self.norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.lm_head = Linear(config.hidden_size, config.draft_vocab_size - config.mapped_vocab_size)
        if config.mapped_vocab_size:
            self.register_buffer("mapped", torch.zeros(config.draft_vocab_size, dtype=torch.bool))
            self.mapped[-config.mapped_vocab_size :] = True
            self.output_map = Linear(config.target_hidden_size, config.hidden_size)

    @property
    def own_ids(self) -> Tensor:
        return self.token_ids[~self.mapped] if self.config.mapped_vocab_size else self.token_ids

    def output(self, rows: Tensor) -> Tensor:
        """The weight of the output head [draft_vocab, hidden]; `rows` are those of the target's [draft_vocab,
        target_hidden]."""
        if not self.config.mapped_vocab_size:
            return self.lm_head.weight
        parts = torch.cat([self.lm_head.weight, self.output_map(rows[self.mapped]).to(self.lm_head.weight.dtype)])
        places = torch.cat([(~self.mapped).nonzero(), self.mapped.nonzero()])[:, 0]
        return parts[places.argsort()]


class EagleLayer(nn.Module):
    """q, k and v read both halves of the input; the residual is h before its norm."""

    __call__: Callable[..., tuple[Tensor, KeysValues]]

    def __init__(self, config: HeadConfig) -> None:
        super().__init__()
        hidden, eps = config.hidden_size, config.norm_eps
        self.input_layernorm = RMSNorm(hidden, eps)
        self.hidden_norm = RMSNorm(hidden, eps)
        self.post_attention_layernorm = RMSNorm(hidden, eps)
        self.self_attn = Attention(config, 2 * hidden, qk_norm=False)
        self.mlp = Mlp(config)

    def forward(
        self, embeddings: Tensor, h: Tensor, positions: Tensor, past: list[KeysValues], mask: Tensor | None
    ) -> tuple[Tensor, KeysValues]:
        """y [batch, length, hidden], before the norm, and the rows' own K and V. Rows see the keys of `past`, then
        their own, as far as `mask` [batch or 1, 1, length, keys] is true; None is causal, without a past."""
        x = torch.cat([self.input_layernorm(embeddings), self.hidden_norm(h)], dim=-1)
        own = self.self_attn.keys_values(x, positions)
        y = h + self.self_attn.attend(x, positions, [*past, own], mask)
        return y + self.mlp(self.post_attention_layernorm(y)), own
