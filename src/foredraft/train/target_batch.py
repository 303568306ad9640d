"""A batch as heads see it: its tokens, the target's features, and what the target would have written."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor
from torch.nn import functional

from foredraft.train.batches import Batch
from foredraft.train.features import Features, FrozenTarget
from foredraft.train.kept_features import KeptFeatures
from foredraft.train.losses import distributions


@dataclass(frozen=True)
class TargetBatch:
    """`label_rows` [batch, length] gives the row of `labels` for what follows each position, in the order of positions;
    -1 where the next token is not part of the answer. `head` has the rows of the target's output head for the tokens
    that labels are about [vocab, hidden]."""

    batch: Batch
    features: Features
    target: FrozenTarget
    head: Tensor
    label_rows: Tensor

    @cached_property
    def labels(self) -> Tensor:
        """The target's distributions over the tokens of `head`: [rows, vocab]."""
        normed = self.features.normed[self.label_rows >= 0]
        return distributions(normed, self.head, self.target.config.logits_divisor)

    def over_all_tokens(self, most: int, generator: torch.Generator) -> TargetBatch:
        """With labels over the target's whole vocabulary, at so many positions at most, chosen at random."""
        places = (self.label_rows >= 0).flatten().nonzero()[:, 0]
        order = torch.randperm(len(places), generator=generator, device=places.device)
        labelled = torch.zeros_like(self.label_rows, dtype=torch.bool)
        labelled.view(-1)[places[order[:most]]] = True
        return replace(self, head=self.target.head, label_rows=_numbered(labelled))

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

    def __init__(self, target: FrozenTarget, token_ids: Tensor, taps: frozenset[int], kept_rows: int) -> None:
        """`token_ids` [draft_vocab]: the draft vocabulary in the target's ids; `taps`: the streams that heads read;
        `kept_rows`: of how many tokens their features are kept."""
        self.target, self._features = target, KeptFeatures(target, taps, kept_rows)
        self._head = target.head[token_ids.to(target.device)]

    def show(self, batch: Batch) -> TargetBatch:
        features = self._features.run(batch)
        batch = batch.to(self.target.device)
        following = torch.arange(batch.tokens.shape[1], device=batch.tokens.device) + 1
        has_label = (following >= batch.prompt_lens[:, None]) & (following < batch.lengths[:, None])
        return TargetBatch(batch, features, self.target, self._head, _numbered(has_label))


def _numbered(chosen: Tensor) -> Tensor:
    """The number of every place that is chosen, -1 at the others."""
    return torch.where(chosen, chosen.flatten().cumsum(0).view_as(chosen) - 1, -1)
