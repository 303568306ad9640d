"""An EAGLE head as it is served: one decoder layer over [embedding; feature].

The row of token s is made of its embedding and the feature of position s-1, and gives the logits of token s+1. Its K
and V lie at slot s, so that they are a function of the tokens up to there, as the target's are; the first token has
none. The feature comes from the target's taps, or for draft tokens from the head's own output one row earlier.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from foredraft.backends.base import Backend, LayerKV, Linear, Stack
from foredraft.batch import ForwardBatch
from foredraft.models.heads.weights import HeadWeights, TapReader, layer_shape, previous_slots


@dataclass(frozen=True, eq=False)
class EagleHead:
    """A loaded head with its part of the cache."""

    backend: Backend
    embedding: Linear  # the target's
    fc: Linear
    input_norm: Tensor
    hidden_norm: Tensor
    stack: Stack
    output: Linear
    token_ids: Tensor  # [draft_vocab]
    taps: TapReader
    kv: list[LayerKV]
    features: Tensor  # [slots, hidden]: the output of every row that was run, before its norm

    def advance(self, batch: ForwardBatch) -> Tensor:
        """Run committed tokens, whose features are in the taps: the logits of wanted rows over the draft vocabulary."""
        return self._logits(batch, self.run(batch, self.tapped(batch))[1])

    def extend(self, batch: ForwardBatch) -> Tensor:
        """Run draft tokens. The row before each has been run."""
        return self._logits(batch, self.run(batch, self.features[previous_slots(batch)])[1])

    def tapped(self, batch: ForwardBatch) -> Tensor:
        """What the rows of committed tokens read: [rows, hidden]."""
        return self.backend.linear(self.taps.rows(previous_slots(batch)), self.fc)

    def run(self, batch: ForwardBatch, feature: Tensor) -> tuple[Tensor, Tensor]:
        """The output of rows, which the next ones read, and its norm. May overwrite `feature`."""
        backend, eps = self.backend, self.stack.norm_eps
        embedded = backend.rms_norm(backend.embed(batch.token_ids, self.embedding), self.input_norm, eps)
        entry = torch.cat([embedded, backend.rms_norm(feature, self.hidden_norm, eps)], dim=1)
        y, normed = backend.run_layers(feature, self.stack, self.kv, batch, entry=entry)
        backend.store(y, self.features, 0, batch.slots)
        return y, normed

    def _logits(self, batch: ForwardBatch, normed: Tensor) -> Tensor:
        wanted = normed if batch.logit_rows is None else normed[batch.logit_rows]
        return self.backend.logits(wanted, self.output)


def load_eagle(
    weights: HeadWeights, embedding: Linear, taps: TapReader, kv: list[LayerKV], max_positions: int, backend: Backend
) -> EagleHead:
    shape = replace(layer_shape(weights.config), first_key=1)
    layer = weights.layer("midlayer", shape)
    return EagleHead(
        backend=backend,
        embedding=embedding,
        fc=weights.linear("fc.weight"),
        input_norm=layer.input_norm,
        hidden_norm=weights.vector("midlayer.hidden_norm.weight"),
        stack=weights.stack((layer,), max_positions),
        output=weights.linear("lm_head.weight", is_head=True),
        token_ids=weights.token_ids,
        taps=taps,
        kv=kv,
        features=torch.empty(
            (len(kv[0].k), weights.config.hidden_size), dtype=backend.activation_dtype, device=backend.device
        ),
    )
