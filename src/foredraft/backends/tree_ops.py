"""How draft trees grow on a device, level by level, without the host waiting for it in between.

A level has as many nodes for every sequence, and each node has the candidates that its logits name. The best of them by
weight are the nodes of the next level: the rule of proposers/model/tree.Tree, in the same arithmetic.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from foredraft.batch import ForwardBatch

LEAST_PROBABILITY = 2.0**-20  # of a candidate: no node weighs nothing. Exact in every float type


@dataclass(frozen=True)
class Candidates:
    """What the logits of nodes name, best first: [rows, count] each."""

    tokens: Tensor  # int64
    probabilities: Tensor  # float32


@dataclass(frozen=True)
class Nodes:
    """Nodes of one depth, as many for every sequence, side by side."""

    token_ids: Tensor  # [rows] int64
    parents: Tensor  # [rows] int64: rows of the level before
    places: Tensor  # [rows] int64: which candidate of the level before the node is, counted within its sequence
    weights: Tensor  # [rows] float64
    paths: Tensor  # [rows, most depth] int32: offsets in the sequence's own KV, down to the node itself
    offsets: Tensor  # [rows] int32: where the node's own K and V lie


@dataclass(frozen=True)
class Choice:
    """By what the next nodes are chosen among the candidates of a level."""

    shares: Tensor | None  # [count] float64: weights by rank alone; None: by probability
    keeps_first: bool  # whether the first candidate of the first node is always taken, and first


@dataclass(frozen=True)
class Noise:
    """How the target will draw, by sequence: [sequences] each."""

    keys: Tensor  # int64: of the noise
    temperatures: Tensor  # float64: what scales it, 0 for none
    top_ps: Tensor  # float64
    min_p_logs: Tensor  # float64: logarithms of min-p, -infinity for none
    top_ks: Tensor  # int64, 0 for all


@dataclass(frozen=True)
class Places:
    """Where the nodes of all levels stand: [levels, sequences × width] each."""

    positions: Tensor  # int64: in the text
    slots: Tensor  # int64: of K and V; -1 for a node without one, whose K and V are stored nowhere
    offsets: Tensor  # int32: the same, counted within the sequence
    prefix_lens: Tensor  # int32: the length of the sequence


class TreeOps(Protocol):
    """All of these only start work on the device."""

    def batch(self, plan: ForwardBatch, rows: ForwardBatch, each: int) -> ForwardBatch:
        """`rows`, whose tensors are on the device, as a batch that the backend can run through the layers that `plan`
        was made for; `each` rows for every sequence, with the plan's block tables."""

    def place(self, tables: Tensor, block_size: int, lengths: Tensor, num_slots: Tensor, into: Places) -> None:
        """Node i of a sequence, counted over the levels, has the i-th slot behind its tokens, as far as its slots go.
        `tables` are the block tables, `lengths` and `num_slots` [sequences] int64. What `into` has is written."""

    def likely(self, logits: Tensor, token_ids: Tensor | None, noise: Noise, into: Candidates) -> None:
        """The most probable tokens of rows of logits [rows, columns], with the noise added to those that reach the
        floor: as many rows for every sequence. What cannot be drawn has the probability 0. `token_ids` names the
        columns: [columns], [rows, columns], or None for their own numbers."""

    def grow(
        self, found: Candidates, before: Nodes | None, depth: int, sequences: int, choice: Choice, into: Nodes
    ) -> None:
        """Choose the nodes at `depth`, from 1 on, among the candidates of those before; None: of the sequences' last
        tokens. `into.offsets` is given, the rest is written."""
