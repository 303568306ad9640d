"""Draft trees without a model: levels as a host adds them, and the operations of a device in plain torch."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from foredraft.backends.tree_ops import LEAST_PROBABILITY, Candidates, Choice, Nodes, Noise, Places
from foredraft.batch import ForwardBatch
from foredraft.params import SamplingParams
from foredraft.proposers.model.tree import Tree
from foredraft.sampling.noise import gumbel, uniform
from foredraft.sampling.pipeline import floor


def add_level(tree: Tree, first: int, candidates: list[list[tuple[int, float]]]) -> None:
    """Add the best candidates (token, probability) of consecutive nodes from `first` on; -1 is the sequence's last
    token."""
    size = len(tree.tokens)
    tree.add_best(
        [
            (first + place, rank, token, probability)
            for place, of_node in enumerate(candidates)
            for rank, (token, probability) in enumerate(of_node)
        ]
    )
    tree.depth += 1
    tree.ended = len(tree.tokens) == size


class TorchTreeOps:
    """In plain torch: the reference."""

    def batch(self, plan: ForwardBatch, rows: ForwardBatch, each: int) -> ForwardBatch:
        return replace(rows, block_tables=plan.block_tables)

    def place(self, tables: Tensor, block_size: int, lengths: Tensor, num_slots: Tensor, into: Places) -> None:
        levels, rows = into.slots.shape
        width = rows // len(lengths)
        sequences = torch.arange(len(lengths), device=lengths.device).repeat_interleave(width)
        nodes = torch.arange(levels * width, device=lengths.device).view(levels, 1, width)
        offsets = (lengths[:, None] + nodes).flatten(1)
        blocks = tables[sequences, (offsets // block_size).clamp(max=tables.shape[1] - 1)]
        slots = blocks.long() * block_size + offsets % block_size
        into.slots.copy_(torch.where(offsets < num_slots[sequences], slots, -1))
        into.offsets.copy_(offsets)
        into.prefix_lens.copy_(lengths[sequences].expand_as(offsets))
        into.positions.copy_(lengths[sequences] + torch.arange(levels, device=lengths.device)[:, None])

    def likely(self, logits: Tensor, token_ids: Tensor | None, noise: Noise, into: Candidates) -> None:
        columns = torch.arange(logits.shape[1], device=logits.device) if token_ids is None else token_ids
        columns = columns.expand(logits.shape)
        each = len(logits) // len(noise.keys)
        drawn = gumbel(uniform(noise.keys.repeat_interleave(each)[:, None], columns))
        values = (logits.double() + noise.temperatures.repeat_interleave(each)[:, None] * drawn).float()
        for row, logits_of_row in enumerate(logits):
            of = row // each
            if temperature := float(noise.temperatures[of]):
                limits = {"top_p": float(noise.top_ps[of]), "min_p": float(noise.min_p_logs[of].exp())}
                params = SamplingParams(temperature=temperature, top_k=int(noise.top_ks[of]), **limits)
                values[row][logits_of_row < floor(logits_of_row, params)] = -torch.inf
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
