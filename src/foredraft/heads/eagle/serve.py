"""An EAGLE head as it is served: one decoder layer over [embedding; feature], and maybe further ones behind it.

The row of token s is made of its embedding and the feature of position s-1, and gives the logits of token s+1. Its K
and V lie at slot s, so that they are a function of the tokens up to there, as the target's are; the first token has
none. The feature comes from the target's taps, or for draft tokens from the head's own output one row earlier.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from foredraft.backends.layers import Entry, LayerKV, Stack, Taps
from foredraft.backends.tree_growth import TapsHead
from foredraft.batch import ForwardBatch
from foredraft.heads.dflash.serve import BlockShape, feature_slots
from foredraft.heads.eagle.config import layer_names
from foredraft.heads.weights import HeadWeights, TapReader, layer_shape, norm_each
from foredraft.models.decoder import Decoder


class EagleHead:
    def __init__(
        self, weights: HeadWeights, target: Decoder, taps: TapReader, kv: list[LayerKV], max_positions: int
    ) -> None:
        config = self.config = weights.config
        self.backend = backend = weights.backend
        self.taps, self.kv = taps, kv
        self.layers = tuple(
            weights.layer(name, replace(layer_shape(config, index), first_key=1))
            for index, name in enumerate(layer_names(config))
        )
        self.embedding, self.fc, self.output = (
            weights.embedding(target),
            weights.linear("fc.weight"),
            weights.output(target),
        )
        self.stack = self._stack(weights, target, max_positions)
        self.token_ids = weights.token_ids  # [draft_vocab]
        outputs = torch.empty((len(kv[0].k), config.hidden_size), dtype=backend.activation_dtype, device=backend.device)
        self.outputs = Taps((config.num_layers,), outputs)  # what the rows behind read of every row that was run

    @property
    def as_taps_head(self) -> TapsHead | None:
        """What a backend can grow trees with; None for a head with norms that those do not have."""
        if self.input_norm is not None or self.fc_norms or self.config.norm_before_residual or self.config.norm_output:
            return None
        taps = self.taps
        return TapsHead(
            taps.cache, taps.places, self.fc, self.stack, self.kv, self.outputs, self.output, self.token_ids
        )

    def _stack(self, weights: HeadWeights, target: Decoder, max_positions: int) -> Stack:
        config = self.config
        self.input_norm = weights.optional("input_norm.weight")  # over all taps
        fc_norms = range(len(config.taps) if config.fc_norm else 0)
        self.fc_norms = [weights.vector(f"fc_norm.{index}.weight") for index in fc_norms]
        self.hidden_norm = weights.vector("midlayer.hidden_norm.weight")
        entry_norm = None if config.norm_before_residual else self.hidden_norm
        return weights.stack(self.layers, max_positions, Entry(self.embedding, entry_norm))

    def advance(self, batch: ForwardBatch) -> Tensor:
        """Run committed tokens, whose features are in the taps: the logits of wanted rows over the draft vocabulary."""
        return self._logits(batch, self.run(batch, self.tapped(batch))[1])

    def extend(self, batch: ForwardBatch) -> Tensor:
        """Run draft tokens. The row before each has been run."""
        features = self.outputs.cache[:, None]  # as the rows behind read them: [slots, 1, hidden]
        return self._logits(batch, self.run(batch, self.backend.read_previous(features, None, batch))[1])

    def tapped(self, batch: ForwardBatch) -> Tensor:
        """What the rows of committed tokens read: [rows, hidden]."""
        return self.fused(self.taps.previous(batch))

    def fused(self, taps: Tensor) -> Tensor:
        """Features [rows, hidden] of taps [rows, taps × target_hidden]."""
        backend, eps = self.backend, self.config.norm_eps
        if self.input_norm is not None:
            taps = backend.rms_norm(taps, self.input_norm, eps)
        return backend.linear(norm_each(taps, self.fc_norms, eps, backend), self.fc)

    def run(self, batch: ForwardBatch, feature: Tensor) -> tuple[Tensor, Tensor]:
        """What the next rows read of these, and what the output head reads. May overwrite `feature`."""
        backend = self.backend
        if self.config.norm_before_residual:
            feature = backend.rms_norm(feature, self.hidden_norm, self.config.norm_eps)
        if not self.config.norm_output:
            return backend.run_layers(feature, self.stack, self.kv, batch, self.outputs)
        return self._run_normed(batch, feature)

    def _run_normed(self, batch: ForwardBatch, rows: Tensor) -> tuple[Tensor, Tensor]:
        """The output is fed back after the final norm."""
        backend = self.backend
        normed = backend.run_layers(rows, self.stack, self.kv, batch)[1].to(backend.activation_dtype)
        backend.store(normed, self.outputs.cache, 0, batch.slots)
        return normed, normed

    def _logits(self, batch: ForwardBatch, normed: Tensor) -> Tensor:
        wanted = normed if batch.logit_rows is None else normed[batch.logit_rows]
        return self.backend.logits(wanted, self.output)


class FusedEagleHead(EagleHead):
    """EAGLE-1: rows are made of the embedding and the feature by fc, and the output head reads what the layers leave.
    The feature of committed tokens is what the target's own output head reads."""

    as_taps_head = None

    def _stack(self, weights: HeadWeights, target: Decoder, max_positions: int) -> Stack:
        self.final_norm, self.final_eps = target.norm, target.config.rms_norm_eps
        return weights.stack(self.layers, max_positions)

    def tapped(self, batch: ForwardBatch) -> Tensor:
        return self.backend.rms_norm(self.taps.previous(batch), self.final_norm, self.final_eps)

    def run(self, batch: ForwardBatch, feature: Tensor) -> tuple[Tensor, Tensor]:
        backend = self.backend
        rows = torch.cat([backend.embed(batch.token_ids, self.embedding), feature], dim=1)
        y, _ = backend.run_layers(backend.linear(rows, self.fc), self.stack, self.kv, batch, self.outputs)
        return y, y


class ParallelEagleHead(EagleHead):
    """P-EAGLE: a block in one run. The anchor's row is that of any other head. Each row behind it has the token of
    masks in place of its own, and the feature of `mask_hidden`; rows see those before them."""

    def __init__(
        self, weights: HeadWeights, target: Decoder, taps: TapReader, kv: list[LayerKV], max_positions: int
    ) -> None:
        super().__init__(weights, target, taps, kv, max_positions)
        self.shape = BlockShape(self.config.block, causal=True)
        mask = weights.vector("mask_hidden").to(self.backend.activation_dtype)
        self.masked = self.fused(mask[None])  # [1, hidden]

    def context(self, batch: ForwardBatch) -> Tensor:
        return self.run(batch, self.tapped(batch))[1]

    def blocks(self, batch: ForwardBatch) -> Tensor:
        is_anchor = batch.positions == batch.prefix_lens
        feature = torch.where(is_anchor[:, None], self.fused(self.taps.rows(feature_slots(batch))), self.masked)
        token_ids = torch.where(is_anchor, batch.token_ids, self.config.mask_token_id)
        return self.run(replace(batch, token_ids=token_ids), feature)[1]

    def drafting(self, y: Tensor) -> Tensor:
        return y.view(-1, self.shape.rows, y.shape[1])
