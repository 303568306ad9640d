"""Drafts with a Medusa head: one small block per offset on the target's last hidden state, all offsets at once.
Costs one product per offset and no cache, less than any other head.
Shines where rows are cheap to verify: each offset is predicted without the ones before it, so trees are wide."""

from __future__ import annotations

from collections.abc import Sequence as Items

import torch
from torch import Tensor

from foredraft.heads.medusa.serve import MedusaHead
from foredraft.heads.propose import HeadDrafter, HeadRunner, new_nodes
from foredraft.proposers.model.candidates import NodeLogits
from foredraft.types import Work


class MedusaRunner(HeadRunner):
    """A Medusa head. The first run of a call gives the logits of all offsets; further ones look them up."""

    _logits: Tensor  # [sequences × offsets, draft_vocab] of this call

    def _load(self) -> None:
        self._head = MedusaHead(self._weights, self._target.runner.decoder, self._taps)

    def logits(self, works: Items[Work]) -> NodeLogits:
        head = self._head
        if works[0].num_new_tokens:
            self._lanes = {work.sequence.id: lane for lane, work in enumerate(works)}
            slots = [work.sequence.slot(work.sequence.num_tokens - 2, self.block_size) for work in works]
            self._logits = head.logits(torch.tensor(slots, device=self.backend.device))
        rows = [self._lanes[node.sequence_id] * head.offsets + node.depth for node in new_nodes(works)]
        return NodeLogits(self._logits[rows], head.token_ids)


class Medusa(HeadDrafter):
    kind = "medusa"
    runner = MedusaRunner


PROPOSER = Medusa
