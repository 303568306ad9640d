"""What the training loop knows of a drafter, whatever its kind."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from foredraft.train.losses import best, soft_cross_entropy
from foredraft.train.target_batch import TargetBatch

Facts = dict[str, str | int | float]


class Drafter(ABC):
    """A module in training. Randomness comes from the generator it is given, so that a step can be repeated."""

    name: str  # of its folder
    depth: int  # draft tokens of a chain in evaluations
    taps: frozenset[int]  # residual streams that it reads
    module: nn.Module

    @abstractmethod
    def loss(self, seen: TargetBatch, generator: torch.Generator) -> Tensor:
        """The mean loss of a batch."""

    @abstractmethod
    def drafts(self, seen: TargetBatch) -> Tensor:
        """Greedy chains behind every position i, while the text is what they draft: int64 [depth, batch, length]. Draft
        token j behind i is for position i + 1 + j, and has seen the true tokens before that."""

    @abstractmethod
    def save(self, folder: Path, acceptance: Sequence[float], provenance: Facts) -> None:
        """Writes what the engine loads."""

    @abstractmethod
    def load(self, folder: Path) -> None:
        """Takes the weights that `save` wrote."""

    def trunk(self) -> list[str]:
        """The names of the matrices between layers; tables, output heads, norms and biases are not among them."""
        own = {name for name, each in self.module.named_parameters() if each.dim() == 2 and each.requires_grad}
        outer = (
            "lm_head.weight",
            "embed_tokens.weight",
            "table.weight",
            "mask_embedding.weight",
            "markov_w1",
            "markov_w2",
        )
        return sorted(name for name in own if not name.endswith(outer))


def masked_loss(rows: Tensor, weight: Tensor, labels: Tensor, index: Tensor, scale: Tensor | None = None) -> Tensor:
    """The mean cross-entropy of those rows [..., width] whose `index` [...] into the labels is not negative, weighed by
    `scale` [...]."""
    valid = index >= 0
    chosen = valid.sum() if scale is None else scale[valid].sum()
    weights = torch.ones_like(index[valid], dtype=torch.float32) if scale is None else scale[valid]
    weights = weights / chosen.clamp(min=1e-6)
    return soft_cross_entropy(rows[valid], weight, labels, index[valid], weights)


def best_tokens(rows: Tensor, weight: Tensor, token_ids: Tensor) -> Tensor:
    """The target's ids of the likeliest tokens of rows [..., width]: int64 [...]."""
    found = best(rows.flatten(0, -2), weight)
    return token_ids[found].view(rows.shape[:-1])
