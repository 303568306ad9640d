"""An MTP layer as it is served: rows and their places are those of an EAGLE head.

The state of a committed token is what the target's own output head reads, after the final norm. That of a draft token
is what the layer itself has put out one row earlier, after its last norm.
"""

from __future__ import annotations

import torch
from torch import Tensor

from foredraft.backends.layers import Stack
from foredraft.batch import ForwardBatch
from foredraft.heads.eagle.serve import FusedEagleHead
from foredraft.heads.weights import HeadWeights
from foredraft.models.decoder import Decoder


class MtpHead(FusedEagleHead):
    def _stack(self, weights: HeadWeights, target: Decoder, max_positions: int) -> Stack:
        self.enorm, self.hnorm = (weights.vector(f"{name}.weight") for name in ("enorm", "hnorm"))
        return super()._stack(weights, target, max_positions)

    def run(self, batch: ForwardBatch, feature: Tensor) -> tuple[Tensor, Tensor]:
        backend, eps = self.backend, self.config.norm_eps
        embedded = backend.rms_norm(backend.embed(batch.token_ids, self.embedding), self.enorm, eps)
        rows = torch.cat([embedded, backend.rms_norm(feature, self.hnorm, eps)], dim=1)
        return self._run_normed(batch, backend.linear(rows, self.fc))
