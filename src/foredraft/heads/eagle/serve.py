"""An EAGLE head as it is served: one decoder layer over [embedding; feature].

The row of token s is made of its embedding and the feature of position s-1, and gives the logits of token s+1. Its K
and V lie at slot s, so that they are a function of the tokens up to there, as the target's are; the first token has
none. The feature comes from the target's taps, or for draft tokens from the head's own output one row earlier.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from foredraft.backends.base import Entry, LayerKV, Linear, Taps
from foredraft.batch import ForwardBatch
from foredraft.heads.weights import HeadWeights, TapReader, layer_shape


class EagleHead:
    def __init__(
        self, weights: HeadWeights, embedding: Linear, taps: TapReader, kv: list[LayerKV], max_positions: int
    ) -> None:
        """`embedding` is the target's."""
        self.backend = backend = weights.backend
        self.taps, self.kv = taps, kv
        layer = weights.layer("midlayer", replace(layer_shape(weights.config), first_key=1))
        entry = Entry(embedding, weights.vector("midlayer.hidden_norm.weight"))
        self.fc = weights.linear("fc.weight")
        self.stack = weights.stack((layer,), max_positions, entry)
        self.output = weights.linear("lm_head.weight", is_head=True)
        self.token_ids = weights.token_ids  # [draft_vocab]
        slots, hidden = len(kv[0].k), weights.config.hidden_size
        outputs = torch.empty((slots, hidden), dtype=backend.activation_dtype, device=backend.device)
        self.outputs = Taps((1,), outputs)  # of every row that was run, before its norm

    def advance(self, batch: ForwardBatch) -> Tensor:
        """Run committed tokens, whose features are in the taps: the logits of wanted rows over the draft vocabulary."""
        return self._logits(batch, self.run(batch, self.tapped(batch))[1])

    def extend(self, batch: ForwardBatch) -> Tensor:
        """Run draft tokens. The row before each has been run."""
        features = self.outputs.cache[:, None]  # as the rows behind read them: [slots, 1, hidden]
        return self._logits(batch, self.run(batch, self.backend.read_previous(features, None, batch))[1])

    def tapped(self, batch: ForwardBatch) -> Tensor:
        """What the rows of committed tokens read: [rows, hidden]."""
        return self.backend.linear(self.taps.previous(batch), self.fc)

    def run(self, batch: ForwardBatch, feature: Tensor) -> tuple[Tensor, Tensor]:
        """The output of rows, which the next ones read, and its norm. May overwrite `feature`."""
        return self.backend.run_layers(feature, self.stack, self.kv, batch, self.outputs)

    def _logits(self, batch: ForwardBatch, normed: Tensor) -> Tensor:
        wanted = normed if batch.logit_rows is None else normed[batch.logit_rows]
        return self.backend.logits(wanted, self.output)
