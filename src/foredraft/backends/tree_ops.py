"""How draft trees grow on a device, level by level, without the host waiting for it in between.

A level has as many nodes for every sequence, and each node has the candidates that its logits name. The best of them by
weight are the nodes of the next level: the rule of proposers/draft_trees.Tree, in the same arithmetic.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from foredraft.batch import ForwardBatch
from foredraft.sampling.noise import gumbel, uniform

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
    """Of rows: the key of the noise that the target will draw with, and the temperature that scales it, 0 for none."""

    keys: Tensor  # [rows] int64
    temperatures: Tensor  # [rows] float64


class TreeOps(Protocol):
    """All of these only start work on the device."""

    def batch(self, plan: ForwardBatch, rows: ForwardBatch, each: int) -> ForwardBatch:
        """`rows`, whose tensors are on the device, as a batch that the backend can run through the layers that `plan`
        was made for; `each` rows for every sequence, with the plan's block tables."""

    def likely(self, logits: Tensor, token_ids: Tensor | None, noise: Noise, into: Candidates) -> None:
        """The most probable tokens of rows of logits [rows, columns], with the noise added. `token_ids` names the
        columns: [columns], [rows, columns], or None for their own numbers."""

    def grow(
        self, found: Candidates, before: Nodes | None, depth: int, sequences: int, choice: Choice, into: Nodes
    ) -> None:
        """Choose the nodes at `depth`, from 1 on, among the candidates of those before; None: of the sequences' last
        tokens. `into.offsets` is given, the rest is written."""


class TorchTreeOps:
    """In plain torch: the reference."""

    def batch(self, plan: ForwardBatch, rows: ForwardBatch, each: int) -> ForwardBatch:
        return replace(rows, block_tables=plan.block_tables)

    def likely(self, logits: Tensor, token_ids: Tensor | None, noise: Noise, into: Candidates) -> None:
        columns = torch.arange(logits.shape[1], device=logits.device) if token_ids is None else token_ids
        columns = columns.expand(logits.shape)
        drawn = gumbel(uniform(noise.keys[:, None], columns))
        values = (logits.double() + noise.temperatures[:, None] * drawn).float()
        best, places = values.topk(into.tokens.shape[1])
        into.tokens.copy_(columns.gather(1, places))
        into.probabilities.copy_((best - values.logsumexp(-1, keepdim=True)).exp())

    def grow(
        self, found: Candidates, before: Nodes | None, depth: int, sequences: int, choice: Choice, into: Nodes
    ) -> None:
        rows, count = found.tokens.shape
        nodes, each = rows // sequences, len(into.token_ids) // sequences
        shares = choice.shares
        if shares is None:  # what only fills a program up may be no number
            shares = found.probabilities.nan_to_num(0.0).double().clamp(LEAST_PROBABILITY, 1.0)
        weighed = (shares if before is None else before.weights[:, None] * shares).expand(rows, count)
        weighed = weighed.reshape(sequences, -1)
        ranked = weighed.clone()
        if choice.keeps_first:
            ranked[:, 0] = torch.inf
        chosen = ranked.sort(dim=1, descending=True, stable=True).indices[:, :each]
        first_rows = torch.arange(sequences, device=chosen.device)[:, None] * nodes
        into.token_ids.copy_(found.tokens.view(sequences, -1).gather(1, chosen).flatten())
        into.parents.copy_((first_rows + chosen // count).flatten())
        into.places.copy_(chosen.flatten())
        into.weights.copy_(weighed.gather(1, chosen).flatten())
        if before is not None:
            into.paths.copy_(before.paths[into.parents])
        into.paths[:, depth - 1] = into.offsets
