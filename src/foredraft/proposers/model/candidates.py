"""Which tokens the logits of a drafting model propose, and how probable each is to be accepted.

Under the match rule the target's noise is known, so a drafting model draws with it too: the two agree as often as they
can. Under the other rules tokens are sampled with noise of their own, from a distribution that the draft states.
"""

from __future__ import annotations

from collections.abc import Sequence as Items
from dataclasses import dataclass

import torch
from torch import Tensor

from foredraft.backends.base import Backend
from foredraft.sampling.likely import Drawing
from foredraft.sampling.noise import DRAFT_STREAM, gumbel, stream_key, uniform
from foredraft.sampling.pipeline import adjust_after, distribution
from foredraft.types import Sequence

Candidates = list[tuple[int, float]]  # tokens and their probabilities, best first


@dataclass(frozen=True)
class NodeLogits:
    """Float32 logits [rows, columns]. A column stands for the token of its own number, or for that of `token_ids`,
    which has one entry per column, or one per row and column."""

    values: Tensor
    token_ids: Tensor | None = None
    confidence: Tensor | None = None  # [rows]: that a token of the row is accepted, which scales their probabilities

    def __getitem__(self, rows: slice | list[int]) -> NodeLogits:
        ids = self.token_ids
        confidence = None if self.confidence is None else self.confidence[rows]
        return NodeLogits(self.values[rows], ids[rows] if ids is not None and ids.dim() == 2 else ids, confidence)

    def tokens(self, columns: Tensor) -> Tensor:
        """The tokens of columns [rows, n]."""
        if self.token_ids is None:
            return columns
        return self.token_ids[columns] if self.token_ids.dim() == 1 else self.token_ids.gather(1, columns)

    def of_target(self, row: int, vocab_size: int) -> Tensor:
        """The logits of one row by the target's ids. Tokens that the model does not have cannot be drafted."""
        if self.token_ids is None:
            return self.values[row]
        ids = self.token_ids if self.token_ids.dim() == 1 else self.token_ids[row]
        return self.values.new_full((vocab_size,), -torch.inf).index_copy_(0, ids, self.values[row])


@dataclass(frozen=True)
class Node:
    """Where a row of logits stands: behind these draft tokens of a sequence."""

    sequence: Sequence
    path: Items[int]


def drawing_at(sequence: Sequence, depth: int) -> Drawing:
    """How the target draws the token behind `depth` draft tokens."""
    params = sequence.params
    return Drawing(params, stream_key(sequence.noise_seed, sequence.num_tokens + depth) if params.temperature else 0)


def coupled(logits: NodeLogits, nodes: Items[Node], count: int, vocab_size: int, backend: Backend) -> list[Candidates]:
    """Candidates behind each node under the match rule: the tokens that the target will most probably draw."""
    found: list[Candidates] = [[] for _ in nodes]
    adjusted = [row for row, node in enumerate(nodes) if node.sequence.adjusts_logits]
    others = [row for row in range(len(nodes)) if row not in adjusted]
    if others:
        some = logits if not adjusted else logits[others]
        for row, candidates in zip(others, _likely(some, [nodes[row] for row in others], count, backend), strict=True):
            found[row] = candidates
    for row in adjusted:
        node, own = nodes[row], logits[[row]]
        values = adjust_after(logits.of_target(row, vocab_size), node.sequence, node.path)
        (found[row],) = _likely(NodeLogits(values[None], None, own.confidence), [node], count, backend)
    return found


def _likely(logits: NodeLogits, nodes: Items[Node], count: int, backend: Backend) -> list[Candidates]:
    drawings = [drawing_at(node.sequence, len(node.path)) for node in nodes]
    shares, columns = backend.likely(logits.values, drawings, count, logits.token_ids)
    if logits.confidence is not None:
        shares = shares * logits.confidence[:, None]
    return [
        [(token, share) for token, share in zip(*of_row, strict=True) if share > 0]
        for of_row in zip(logits.tokens(columns).tolist(), shares.tolist(), strict=True)
    ]


def sampled(logits: Tensor, node: Node, index: int, count: int, vocab_size: int) -> list[tuple[int, Tensor]]:
    """Different tokens, drawn one after the other, each with what it was drawn from: what the ones before have left.
    `index` numbers the nodes of a draft, -1 is its root."""
    sequence = node.sequence
    adjusted = adjust_after(logits, sequence, node.path)
    if bool((adjusted == -torch.inf).all()):
        return []  # the grammar allows nothing that this model has
    q = distribution(adjusted, sequence.params)
    candidates = q.nonzero().flatten()
    # Keyed by where the draft starts: block verification looks at tokens that it then rejects, and the next draft,
    # which may reach the same position, must not use their noise again.
    key = stream_key(sequence.noise_seed, sequence.num_tokens, DRAFT_STREAM)
    noise = gumbel(uniform(key, candidates + (index + 1) * vocab_size))
    order = (q[candidates].log() + noise).topk(min(count, len(candidates))).indices
    drawn: list[tuple[int, Tensor]] = []
    for token in candidates[order].tolist():
        if drawn:
            q = q.clone()
            q[drawn[-1][0]] = 0
            q /= q.sum()
        drawn.append((token, q))
    return drawn
