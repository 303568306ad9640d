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
from foredraft.sampling.noise import DRAFT_STREAM, gumbel, stream_key, uniform
from foredraft.sampling.pipeline import adjust_after, distribution, floor
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


def coupled(
    logits: NodeLogits, nodes: Items[Node], count: int, contenders: int, vocab_size: int, backend: Backend
) -> list[Candidates]:
    """For every row, the tokens that the target will most probably draw if its logits are like these. At temperature 0
    there is no noise; else it decides among the most probable `contenders`, and only the difference of the logits is
    uncertain."""
    found: list[Candidates] = [[] for _ in nodes]
    sequences = enumerate(node.sequence for node in nodes)
    greedy = [row for row, each in sequences if not each.params.temperature and not each.adjusts_logits]
    if greedy:
        some = logits if len(greedy) == len(nodes) else logits[greedy]
        shares, columns = backend.likely(some.values, count)
        if some.confidence is not None:
            shares = shares * some.confidence[:, None]
        for row, tokens, probabilities in zip(greedy, some.tokens(columns).tolist(), shares.tolist(), strict=True):
            found[row] = list(zip(tokens, probabilities, strict=True))
    for row, node in enumerate(nodes):
        if not found[row]:
            found[row] = _drawn(logits, row, node, count, contenders, vocab_size, backend)
    return found


def _drawn(
    logits: NodeLogits, row: int, node: Node, count: int, contenders: int, vocab_size: int, backend: Backend
) -> Candidates:
    sequence = node.sequence
    confidence = 1.0 if logits.confidence is None else float(logits.confidence[row])
    if sequence.adjusts_logits:
        logits, row = NodeLogits(adjust_after(logits.of_target(row, vocab_size), sequence, node.path)[None]), 0
    own = logits[row : row + 1]
    values, columns = backend.top(own.values, contenders)
    possible = values[0] > -torch.inf  # the grammar may allow few tokens, or none that this model has
    kept, tokens = values[0][possible], own.tokens(columns)[0][possible]
    temperature = sequence.params.temperature or 0.0
    if temperature > 0:
        allowed = kept >= floor(own.values[0], sequence.params)
        kept, tokens = kept[allowed], tokens[allowed]
        key = stream_key(sequence.noise_seed, sequence.num_tokens + len(node.path))
        kept = kept + temperature * gumbel(uniform(key, tokens)).float()
    probability, best = (kept.softmax(-1) * confidence).topk(min(count, len(kept)))
    return list(zip(tokens[best].tolist(), probability.tolist(), strict=True))


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
