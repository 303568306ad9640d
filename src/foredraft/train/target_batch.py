"""A batch as heads see it: its tokens, the target's features, and what the target would have written."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from foredraft.train.batches import Batch
from foredraft.train.features import Features, FrozenTarget
from foredraft.train.losses import distributions


@dataclass(frozen=True)
class TargetBatch:
    """`labels` are the target's distributions over the draft vocabulary [rows, draft_vocab]; `label_rows` [batch,
    length] gives the row for what follows each position, -1 where the next token is not part of the answer."""

    batch: Batch
    features: Features
    target: FrozenTarget
    labels: Tensor
    label_rows: Tensor

    def rows_ahead(self, count: int) -> Tensor:
        """`label_rows` of `count` positions later, -1 beyond the end: [batch, length]."""
        shifted = self.label_rows[:, count:]
        return functional.pad(shifted, (0, self.label_rows.shape[1] - shifted.shape[1]), value=-1)

    @property
    def positions(self) -> Tensor:
        """[1, length]."""
        return torch.arange(self.batch.tokens.shape[1], device=self.batch.tokens.device)[None]


class Teacher:
    """Makes target batches for one draft vocabulary."""

    def __init__(self, target: FrozenTarget, token_ids: Tensor, taps: frozenset[int]) -> None:
        """`token_ids` [draft_vocab]: the draft vocabulary in the target's ids; `taps`: the streams that heads read."""
        self.target, self._taps = target, taps
        self._head = target.head[token_ids.to(target.device)]

    def show(self, batch: Batch) -> TargetBatch:
        batch = batch.to(self.target.device)
        features = self.target.run(batch.tokens, self._taps)
        following = torch.arange(batch.tokens.shape[1], device=batch.tokens.device) + 1
        has_label = (following >= batch.prompt_lens[:, None]) & (following < batch.lengths[:, None])
        normed = features.normed[has_label]
        rows = torch.where(has_label, has_label.flatten().cumsum(0).view_as(batch.tokens) - 1, -1)
        wanted = distributions(normed, self._head, self.target.config.logits_divisor)
        return TargetBatch(batch, features, self.target, wanted, rows)
