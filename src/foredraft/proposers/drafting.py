"""How a model guesses: it writes on from the text, for all sequences at once: a chain, or a tree of the likeliest ways.

Under the match rule it draws with the very noise that the target will draw with, so that the two agree as often as
they can; under the other rules it samples with noise of its own and tells what it sampled from.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Items
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor
from torch.nn import functional

from foredraft.errors import InvalidSpec
from foredraft.proposers.base import Proposer
from foredraft.proposers.draft_runner import DraftRunner
from foredraft.sampling.noise import DRAFT_STREAM, gumbel, stream_key, uniform
from foredraft.sampling.pipeline import adjust, distribution, floor
from foredraft.types import NO_DRAFT, Commit, Draft, Sequence, Work

_CATCH_UP = 512  # tokens that a model runs of a text in one step; one that lags further behind does not guess yet
_CONTENDERS = 256  # the likeliest tokens, among which the noise decides


@dataclass(frozen=True)
class DrafterOptions:
    """What all drafting models can be told."""

    k: int = 4  # tokens guessed, one after the other
    width: int = 1  # ways on that are followed at every depth; 1 is a chain

    def __post_init__(self) -> None:
        if not (self.k >= 1 and self.width >= 1 and self.k * self.width <= 64):
            raise InvalidSpec(f"k={self.k}, width={self.width}: both must be at least 1, and k times width at most 64.")


@dataclass
class _Tree:
    """A draft in the making. Node i of it lies at the i-th slot behind the text."""

    sequence: Sequence
    budget: int
    known: int  # leading tokens of the text that have been run
    tokens: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    scores: list[float] = field(default_factory=list)
    q: list[Tensor] = field(default_factory=list)
    num_run: int = 0  # leading nodes that have been run
    depth: int = 0

    @property
    def is_sampled(self) -> bool:
        return self.sequence.params.acceptance != "match"

    def path(self, node: int) -> list[int]:
        """The tokens from the text down to a node."""
        tokens: list[int] = []
        while node >= 0:
            tokens.append(self.tokens[node])
            node = self.parents[node]
        return tokens[::-1]

    def since(self, size: int) -> list[tuple[int, int]]:
        """Nodes beyond the first `size`, with their tokens."""
        return list(enumerate(self.tokens[size:], size))

    def add(self, parent: int, token: int, score: float) -> None:
        self.tokens.append(token)
        self.parents.append(parent)
        self.scores.append(min(max(score, 1e-6), 1.0) * (self.scores[parent] if parent >= 0 else 1.0))


class ModelDrafter:
    """Drafts by a model. `helper`, if there is one, guesses for the model as the model guesses for the target; the
    draft is the same without it."""

    taps: frozenset[int] = frozenset()
    free = False
    wants_target_argmax = False

    def __init__(self, name: str, model: DraftRunner, options: DrafterOptions, helper: Proposer | None = None) -> None:
        self.name = name
        self.model = model
        self.helper = helper
        self.depth, self.width = options.k, options.width
        self.num_lookahead_tokens = options.k * options.width

    def observe(self, commits: Items[Commit]) -> None:
        """Nothing to learn: a model brings itself up to date when it is asked."""
        if self.helper is not None:
            self.helper.observe(commits)

    def release(self, sequence_ids: Iterable[int]) -> None:
        ids = list(sequence_ids)
        if self.model.computed is not None:
            self.model.computed.release(ids)
        if self.helper is not None:
            self.helper.release(ids)

    def close(self) -> None:
        self.model.close()
        if self.helper is not None:
            self.helper.close()

    def clear(self) -> None:
        """Nothing is learnt from a sequence."""
        if self.helper is not None:
            self.helper.clear()

    @torch.inference_mode()
    def propose(self, sequences: Items[Sequence], budgets: Items[int]) -> list[Draft]:
        trees = [self._begun(sequence, budget) for sequence, budget in zip(sequences, budgets, strict=True)]
        while growing := [tree for tree in trees if len(tree.tokens) < tree.budget and tree.depth < self.depth]:
            helped = self._helped(growing)
            works = [self._work(tree, below) for tree, below in zip(growing, helped, strict=True)]
            for tree, work, rows in zip(growing, works, self.model.logits(works), strict=True):
                tree.known += work.num_new_tokens
                if work.reaches_end:
                    self._grow(tree, work.draft, rows)
                else:
                    tree.budget = 0  # not there yet: the rest of the text comes in later steps
                self._account(tree)
        return [self._draft(tree) for tree in trees]

    def _begun(self, sequence: Sequence, budget: int) -> _Tree:
        known = self.model.num_computed(sequence)
        readable = self.model.can_read(sequence.token_ids[known:])
        return _Tree(sequence, min(budget, self.num_lookahead_tokens) if readable else 0, known)

    def _helped(self, growing: list[_Tree]) -> list[Draft]:
        """What the helper guesses behind each chain; the model adds a token of its own behind that."""
        if self.helper is None:
            return [NO_DRAFT] * len(growing)
        texts = [replace(g.sequence, token_ids=[*g.sequence.token_ids, *g.tokens]) for g in growing]
        drafts = self.helper.propose(texts, [tree.budget - len(tree.tokens) - 1 for tree in growing])
        return [draft if self.model.can_read(draft.tokens) else NO_DRAFT for draft in drafts]

    def _work(self, tree: _Tree, below: Draft) -> Work:
        """The tokens that are still to be run, the nodes so far, and the helper's guesses behind the last of them."""
        size, missing = len(tree.tokens), tree.sequence.num_tokens - tree.known
        text = replace(
            tree.sequence, num_computed_tokens=tree.known, params=replace(tree.sequence.params, prompt_logprobs=None)
        )
        if missing > _CATCH_UP:
            return Work(text, _CATCH_UP)
        nodes = Draft(
            (*tree.tokens, *below.tokens),
            (*tree.parents, *(size + parent if parent >= 0 else size - 1 for parent in below.parents)),
            (*tree.scores, *below.scores),
            (self.name,) * (size + len(below)),
        )
        return Work(text, missing, draft=nodes, num_computed_nodes=tree.num_run)

    def _grow(self, tree: _Tree, ran: Draft, rows: Tensor) -> None:
        """Add the nodes that this run's logits lead to; its rows are the text's last token, new nodes, the helper's."""
        first = len(ran) - len(rows)  # the node of the first row; -1 is the text's last token
        tree.num_run = len(tree.tokens)
        leaves = (node for node in range(first, tree.num_run) if node not in tree.parents)
        reached = {node: node for node in leaves}  # node of the guess -> the node of the run that has its logits
        while reached and len(tree.tokens) < tree.budget and tree.depth < self.depth:
            size = len(tree.tokens)
            logits = [rows[node - first] for node in reached.values()]
            self._add_best(tree, list(reached), logits, min(self.width, tree.budget - size))
            tree.depth += 1
            added = {node: _child(ran, reached[tree.parents[node]], token) for node, token in tree.since(size)}
            reached = {node: helped for node, helped in added.items() if helped is not None}
            while reached.get(tree.num_run) == tree.num_run:  # the helper's node lies where the guess's own belongs
                tree.num_run += 1

    def _add_best(self, tree: _Tree, nodes: list[int], rows: list[Tensor], width: int) -> None:
        """Add the best `width` ways on from nodes whose logits these are. The first is the best way on from the first
        node, so that a tree always has the chain in it."""
        sequence = tree.sequence
        found: list[tuple[float, int, int]] = []  # reached how likely, node, token
        for node, row in zip(nodes, rows, strict=True):
            path = tree.path(node)
            logits = adjust(
                row,
                sequence.params,
                sequence.token_ids[: sequence.num_prompt_tokens],
                [*sequence.output_token_ids, *path],
            )
            if tree.is_sampled:
                # The text's first guesses are siblings; below them every way goes on alone. All are kept: to drop a
                # sampled token after looking at it would bias the text.
                self._sample(tree, node, logits, width if node < 0 else 1)
                continue
            above = tree.scores[node] if node >= 0 else 1.0
            for token, probability in _coupled(logits, sequence, sequence.num_tokens + len(path), width):
                found.append((above * probability, node, token))
        for score, node, token in [*found[:1], *sorted(found[1:], key=lambda branch: -branch[0])][:width]:
            tree.add(node, token, score / (tree.scores[node] if node >= 0 else 1.0))

    def _sample(self, tree: _Tree, node: int, logits: Tensor, count: int) -> None:
        """Draw different tokens, one after the other, each from what the ones before have left."""
        sequence = tree.sequence
        q = distribution(logits, sequence.params)
        candidates = q.nonzero().flatten()
        # Keyed by where the draft starts: block verification looks at tokens that it then refuses, and the next draft,
        # which may come to the same position, must not meet their noise again.
        key = stream_key(sequence.noise_seed, sequence.num_tokens, DRAFT_STREAM)
        noise = gumbel(uniform(key, candidates + (node + 1) * self.model.vocab_size))
        order = (q[candidates].log() + noise).topk(min(count, len(candidates))).indices
        for drawn, token in enumerate(candidates[order].tolist()):
            if len(tree.tokens) == tree.budget:
                return
            if drawn:
                q = q.clone()
                q[tree.tokens[-1]] = 0
                q /= q.sum()
            tree.add(node, token, float(q[token]))
            tree.q.append(q)

    def _account(self, tree: _Tree) -> None:
        """Tell what has been run where a chain of it may be read again, and what has been touched beyond that."""
        chain = 0
        while chain < tree.num_run and tree.parents[chain] == chain - 1:
            chain += 1
        ran = [*tree.sequence.token_ids[: tree.known], *tree.tokens[:chain]]
        self.model.record(tree.sequence, ran, tree.sequence.num_tokens + self.num_lookahead_tokens)

    def _draft(self, tree: _Tree) -> Draft:
        if not tree.tokens:
            return NO_DRAFT
        q = None
        if tree.is_sampled:  # what the model has no token for, it never guesses
            q = torch.stack(tree.q)
            q = functional.pad(q, (0, self.model.vocab_size - q.shape[1]))  # [nodes, the target's vocab]
        origin = (self.name,) * len(tree.tokens)
        return Draft(tuple(tree.tokens), tuple(tree.parents), tuple(tree.scores), origin, q)


def _child(draft: Draft, node: int, token: int) -> int | None:
    return next((child for child in draft.children(node) if draft.tokens[child] == token), None)


def _coupled(logits: Tensor, sequence: Sequence, position: int, count: int) -> list[tuple[int, float]]:
    """The tokens that the target is likeliest to draw at a position if its logits are like these, and how likely: best
    first. Its noise is known, so all that is uncertain is how its logits differ."""
    values, tokens = logits.topk(min(_CONTENDERS, len(logits)))
    temperature = sequence.params.temperature or 0.0
    if temperature > 0:
        allowed = values >= floor(logits, sequence.params)
        values, tokens = values[allowed], tokens[allowed]
        values = values + temperature * gumbel(uniform(stream_key(sequence.noise_seed, position), tokens)).float()
    probability, best = values.softmax(-1).topk(min(count, len(values)))
    return list(zip(tokens[best].tolist(), probability.tolist(), strict=True))
