"""DFlash: a block of rows in one pass. The target's features are extra K and V in every layer, rows of a block see each
other in both directions, and a correction along the block tells each row the token before it."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from foredraft.heads.base import HeadConfig
from foredraft.heads.module import DecoderLayer, HeadModule, KeysValues, Linear, Module, RMSNorm, Table


class DFlashModule(HeadModule):
    """With n committed tokens, row k of a block predicts token n+k and stands at position n-1+k. The anchor is token
    n-1, whose taps are not known yet; the last feature is that of position n-2."""

    def __init__(self, config: HeadConfig) -> None:
        super().__init__(config)
        hidden, target, eps = config.hidden_size, config.target_hidden_size, config.norm_eps
        self.fc = Linear(len(config.taps) * target, hidden)
        self.hidden_norm = RMSNorm(hidden, eps)
        if config.block_input == "masked":
            self.mask_embedding = Table(1, hidden, scale=1.0)
            self.mask_embedding.weight.requires_grad_(False)
        else:
            self.tap_norms = nn.ModuleList(RMSNorm(target, eps) for _ in config.taps)
            self.anchor_proj = Linear(target, hidden)
            self.feature_proj = Linear(hidden, hidden)
            self.mask_embedding = Table(config.block, hidden, scale=1.0)
        self.layers = nn.ModuleList(DecoderLayer(config, qk_norm=True) for _ in range(config.num_layers))
        self.norm = RMSNorm(hidden, eps)
        self.lm_head = Linear(hidden, config.draft_vocab_size)
        if config.correction == "markov":
            self.markov_head = MarkovModule(config)
        if config.correction == "refiner":
            self.refiner = RefinerModule(config)

    def features(self, taps: Tensor) -> Tensor:
        """[batch, length, taps × target_hidden] → f [batch, length, hidden]: fused and normed, injected ones from taps
        that are normed too."""
        if self.config.block_input == "injected":
            parts = taps.split(self.config.target_hidden_size, dim=-1)
            taps = torch.cat([norm(part) for norm, part in zip(self.tap_norms, parts, strict=True)], dim=-1)
        return self.hidden_norm(self.fc(taps))

    def context(self, features: Tensor, positions: Tensor) -> list[KeysValues]:
        """K and V of committed positions, layer by layer."""
        return [layer.self_attn.keys_values(features, positions) for layer in self._layers()]

    def rows(self, anchors: Tensor, features: Tensor) -> Tensor:
        """The input of blocks: embeddings of their anchors [batch, blocks, target_hidden] and last features [batch,
        blocks, hidden] → [batch, blocks × block, hidden]."""
        if self.config.block_input == "masked":
            masks = self.mask_embedding.weight.to(anchors.dtype).expand(*anchors.shape[:2], self.config.block - 1, -1)
            return torch.cat([anchors[:, :, None], masks], dim=2).flatten(1, 2)
        x = self.anchor_proj(anchors) + self.feature_proj(features)
        return (x[:, :, None] + self.mask_embedding.weight.to(x.dtype)).flatten(1, 2)

    def blocks(self, x: Tensor, positions: Tensor, context: list[KeysValues], mask: Tensor | None) -> Tensor:
        """`rows` through all layers → y [batch, rows, hidden], after the norm. Rows see the keys of the context, then
        all rows, as far as `mask` [batch or 1, 1, rows, keys] is true."""
        for layer, keys in zip(self._layers(), context, strict=True):
            x = layer(x, positions, [keys], mask)
        return self.norm(x)

    def _layers(self) -> list[DecoderLayer]:
        return [layer for layer in self.layers if isinstance(layer, DecoderLayer)]

    def output(self, y: Tensor, previous: Tensor) -> tuple[Tensor, Tensor]:
        """What the logits are the product of: rows [..., width] and weight [draft_vocab, width]. `previous` is the
        token before each row's own [...]; the size of the target's vocabulary stands for an unknown one."""
        if self.config.correction == "refiner":
            return self.refiner(y, previous), self.lm_head.weight
        if self.config.correction == "markov":
            factors, weight = self.markov_head(previous)
            return torch.cat([y, factors.to(y.dtype)], dim=-1), torch.cat([self.lm_head.weight, weight], dim=1)
        return y, self.lm_head.weight


class MarkovModule(nn.Module):
    """logits += W2 · W1[previous token]; nothing where it is unknown."""

    def __init__(self, config: HeadConfig) -> None:
        super().__init__()
        self.markov_w1 = nn.Parameter(torch.randn(config.target_vocab_size, config.rank) * config.rank**-0.5)
        self.markov_w2 = nn.Parameter(torch.zeros(config.draft_vocab_size, config.rank))

    def forward(self, previous: Tensor) -> tuple[Tensor, Tensor]:
        known = previous < len(self.markov_w1)
        factors = functional.embedding(torch.where(known, previous, 0), self.markov_w1)
        return factors * known[..., None], self.markov_w2


class RefinerModule(Module):
    """y + Wo · silu(Wa · y + T[previous token]); the last row of T stands for an unknown one."""

    def __init__(self, config: HeadConfig) -> None:
        super().__init__()
        self.in_proj = Linear(config.hidden_size, config.rank)
        self.table = Table(config.target_vocab_size + 1, config.rank, scale=0.5)
        self.out_proj = Linear(config.rank, config.hidden_size, scale=0.0)

    def forward(self, y: Tensor, previous: Tensor) -> Tensor:
        inner = functional.silu(self.in_proj(y) + self.table(previous).to(y.dtype))
        return y + self.out_proj(inner)
