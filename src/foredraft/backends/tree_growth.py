"""Draft trees that a backend grows in one call, with a head of the usual kind: on a CPU, where what the host does
between two levels takes as long as a level itself."""

from __future__ import annotations

from collections.abc import Sequence as Items
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from torch import Tensor

from foredraft.backends.layers import LayerKV, Linear, Stack, Taps
from foredraft.batch import PackedBatch
from foredraft.sampling.likely import Drawing


@dataclass(frozen=True, eq=False)
class TapsHead:
    """A head that reads taps of the target for tokens, and its own output for draft tokens."""

    taps: Tensor  # [slots, taps, target_hidden]
    parts: Tensor | None  # of the taps that it reads, int64; None: all
    fusion: Linear  # makes of them what the stack reads
    stack: Stack
    kv: list[LayerKV]
    outputs: Taps  # of its last layer
    output: Linear
    token_ids: Tensor  # [output.outputs] int64: what its columns stand for


@dataclass(frozen=True)
class Growth:
    """How trees grow; the rule is that of proposers/model/tree.Tree with a shape that prunes."""

    depth: int
    width: int
    min_score: float
    shares: tuple[float, ...] | None  # weights by rank alone; None: by probability


class GrownTree(NamedTuple):
    """The nodes of a draft, parents first."""

    tokens: list[int]
    parents: list[int]
    scores: list[float]


class TreeGrower(Protocol):
    """Runs a head until its trees are grown."""

    def __call__(
        self,
        first: PackedBatch,
        lengths: Items[int],
        budgets: Items[int],
        drawings: Items[Items[Drawing]],
        growth: Growth,
    ) -> list[GrownTree]:
        """The draft of every sequence of `first`, which has all rows up to their ends. Those have `lengths` tokens, and
        their drafts at most `budgets` nodes. `drawings` are what the target will draw at each depth."""
