"""A model with its KV layers: `forward` turns a packed batch into logits and taps. Target and draft model are two
of these."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from foredraft.backends.base import Backend, LayerKV
from foredraft.batch import ForwardBatch
from foredraft.models.decoder import Decoder


@dataclass(frozen=True)
class ForwardOutput:
    logits: Tensor  # [wanted rows, vocab] float32
    taps: dict[int, Tensor]  # layer -> [rows, hidden]


class Runner:
    """Weights, their place in the KV cache, and the layers that somebody wants to see."""

    def __init__(
        self, decoder: Decoder, backend: Backend, kv: list[LayerKV], taps: frozenset[int] = frozenset()
    ) -> None:
        self.decoder = decoder
        self.backend = backend
        self.kv = kv
        self.taps = taps

    @torch.inference_mode()
    def forward(self, batch: ForwardBatch) -> ForwardOutput:
        hidden = self.decoder.run(batch, self.kv, self.backend, self.taps)
        all_wanted = len(batch.logit_rows) == batch.num_rows  # as in plain decoding, where an index would take 0.1 ms
        wanted = hidden.normed if all_wanted else hidden.normed[batch.logit_rows]
        return ForwardOutput(self.decoder.logits(wanted, self.backend), hidden.taps)
