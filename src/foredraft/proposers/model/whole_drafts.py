"""Drafts that are made without the host in between: on a device by run_ahead, in one call of a kernel by grow_ahead."""

from __future__ import annotations

from collections.abc import Sequence as Items
from typing import Protocol

from foredraft.batch import PackedBatch
from foredraft.proposers.model.tree import TreeShape
from foredraft.types import Draft, Work


class WholeDrafts(Protocol):
    """The drafts of a call, one for each of its works."""

    def chain(self, lane: int) -> list[int]:
        """The tokens of leading nodes that were run one behind the other, and whose K and V may be kept."""

    def draft(self, lane: int, budget: int, name: str) -> Draft:
        """The best nodes, at most `budget`."""


class Ahead(Protocol):
    """What makes whole drafts without the host."""

    stops_early: bool  # whether it goes on from nodes above `min_score` only; else how deep it drafts is chosen before

    def __call__(
        self, works: Items[Work], first: PackedBatch, shape: TreeShape, budgets: Items[int], min_score: float
    ) -> WholeDrafts | None:
        """The trees behind works, which all reach the end of their sequences. `first` has the rows that are run first.
        None: they are grown level by level instead."""

    def warm(self, shape: TreeShape, max_keys: int, max_sequences: int) -> None:
        """Make what drafts of this shape need."""
