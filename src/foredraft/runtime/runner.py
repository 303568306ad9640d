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
        """The batch through the model. A backend may run more rows than there are, and compute all their logits: what
        was not wanted is cut off here."""
        plan = self.backend.prepare(batch, self.decoder.layers[0].shape)
        output = self.backend.replay(self, plan, self._compute)
        if plan.num_rows == batch.num_rows and plan.num_logits == batch.num_logits:
            return output
        wanted = slice(batch.num_rows) if batch.logit_rows is None else batch.logit_rows.to(plan.positions.device)
        return ForwardOutput(output.logits[wanted], {tap: rows[: batch.num_rows] for tap, rows in output.taps.items()})

    def _compute(self, plan: ForwardBatch) -> ForwardOutput:
        hidden = self.decoder.run(plan, self.kv, self.backend, self.taps)
        wanted = hidden.normed if plan.logit_rows is None else hidden.normed[plan.logit_rows]
        return ForwardOutput(self.decoder.logits(wanted, self.backend), hidden.taps)
