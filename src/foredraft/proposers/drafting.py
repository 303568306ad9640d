"""How a draft model drafts: it continues all sequences at once, each with a chain or with a tree of the best branches.

Under the match rule it draws with the noise that the target will draw with, so that the two agree as often as they can.
Under the other rules it samples with noise of its own and states the distribution that it sampled from.
"""

from __future__ import annotations

import math
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
from foredraft.sampling.pipeline import adjust_after, distribution, floor
from foredraft.types import NO_DRAFT, Commit, Draft, Sequence, Work

_UP_TO_DATE = 16  # with so few tokens to run, about a tile, a sequence drafts at once
_CATCH_UP = 512  # the most catch-up tokens of a sequence in one call; with more to run there is no draft yet
_CATCH_UP_BESIDE = 32  # and of all sequences together, where up-to-date ones would wait for them: two tiles
_CONTENDERS = 256  # the most probable tokens, among which the noise decides


@dataclass(frozen=True)
class DrafterOptions:
    """The options of all draft models."""

    k: int = 4  # draft tokens, one after the other
    width: int = 1  # branches at every depth; 1 is a chain

    def __post_init__(self) -> None:
        if not (self.k >= 1 and self.width >= 1 and self.k * self.width <= 64):
            raise InvalidSpec(f"k={self.k}, width={self.width}: both must be at least 1, and k times width at most 64.")


@dataclass
class _Tree:
    """A draft under construction. Its node i lies at the i-th slot behind the sequence."""

    sequence: Sequence
    budget: int
    known: int  # leading tokens of the sequence that have been run
    catch_up: int = _UP_TO_DATE  # the most tokens of the sequence that this call may run
    tokens: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    scores: list[float] = field(default_factory=list)
    q: list[Tensor] = field(default_factory=list)
    num_run: int = 0  # leading nodes that have been run
    depth: int = 0

    @property
    def num_missing(self) -> int:
        return self.sequence.num_tokens - self.known

    @property
    def is_behind(self) -> bool:
        return self.num_missing > _UP_TO_DATE

    @property
    def is_sampled(self) -> bool:
        return self.sequence.params.acceptance != "match"

    def path(self, node: int) -> list[int]:
        """The tokens from the end of the sequence down to a node."""
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
    """Drafts with a model. `helper`, if there is one, drafts for the model as the model drafts for the target. The
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
        """Nothing to learn: a model catches up when it is queried."""
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
        _share_catch_up([tree for tree in trees if tree.budget])
        while growing := [tree for tree in trees if len(tree.tokens) < tree.budget and tree.depth < self.depth]:
            helped = self._helped(growing)
            works = [self._work(tree, below) for tree, below in zip(growing, helped, strict=True)]
            for tree, work, rows in zip(growing, works, self.model.logits(works), strict=True):
                tree.known += work.num_new_tokens
                if work.reaches_end:
                    self._grow(tree, work.draft, rows)
                else:
                    tree.budget = 0  # not there yet: the rest of the catch-up tokens run in later steps
                self._record(tree)
        return [self._draft(tree) for tree in trees]

    def _begun(self, sequence: Sequence, budget: int) -> _Tree:
        known = self.model.num_computed(sequence)
        readable = self.model.can_read(sequence.token_ids[known:])
        if sequence.params.prompt_logprobs is not None:  # the target owes them, not the draft model
            sequence = replace(sequence, params=replace(sequence.params, prompt_logprobs=None))
        return _Tree(sequence, min(budget, self.num_lookahead_tokens) if readable else 0, known)

    def _helped(self, growing: list[_Tree]) -> list[Draft]:
        """The helper's draft behind each chain; the model adds a token of its own behind that."""
        if self.helper is None:
            return [NO_DRAFT] * len(growing)
        extended = [replace(g.sequence, token_ids=[*g.sequence.token_ids, *g.tokens]) for g in growing]
        drafts = self.helper.propose(extended, [tree.budget - len(tree.tokens) - 1 for tree in growing])
        return [draft if self.model.can_read(draft.tokens) else NO_DRAFT for draft in drafts]

    def _work(self, tree: _Tree, below: Draft) -> Work:
        """The catch-up tokens, the nodes so far, and the helper's draft behind the last of them."""
        size = len(tree.tokens)
        sequence = replace(tree.sequence, num_computed_tokens=tree.known)
        if tree.num_missing > tree.catch_up:
            return Work(sequence, tree.catch_up)
        nodes = Draft(
            (*tree.tokens, *below.tokens),
            (*tree.parents, *(size + parent if parent >= 0 else size - 1 for parent in below.parents)),
            (*tree.scores, *below.scores),
            (self.name,) * (size + len(below)),
        )
        return Work(sequence, tree.num_missing, draft=nodes, num_computed_nodes=tree.num_run)

    def _grow(self, tree: _Tree, ran: Draft, rows: Tensor) -> None:
        """Add nodes by this run's logits. Its rows are the sequence's last token, new nodes, and the helper's nodes."""
        first = len(ran) - len(rows)  # the node of the first row; -1 is the sequence's last token
        tree.num_run = len(tree.tokens)
        leaves = (node for node in range(first, tree.num_run) if node not in tree.parents)
        reached = {node: node for node in leaves}  # node of the draft -> the node of the run that has its logits
        while reached and len(tree.tokens) < tree.budget and tree.depth < self.depth:
            size = len(tree.tokens)
            logits = [rows[node - first] for node in reached.values()]
            self._add_best(tree, list(reached), logits, min(self.width, tree.budget - size))
            tree.depth += 1
            if len(tree.tokens) == size:
                tree.budget = size  # there is no token to go on with
            added = {node: _child(ran, reached[tree.parents[node]], token) for node, token in tree.since(size)}
            reached = {node: helped for node, helped in added.items() if helped is not None}
            while reached.get(tree.num_run) == tree.num_run:  # the helper's node lies at the slot of this node
                tree.num_run += 1

    def _add_best(self, tree: _Tree, nodes: list[int], rows: list[Tensor], width: int) -> None:
        """Add the best `width` branches behind nodes with these logits. The first one continues the first node, so that
        a tree always contains the chain."""
        sequence = tree.sequence
        found: list[tuple[float, int, int]] = []  # probability, node, token
        for node, row in zip(nodes, rows, strict=True):
            path = tree.path(node)
            logits = adjust_after(row, sequence, path)
            if bool((logits == -math.inf).all()):
                continue  # the grammar allows nothing that this model has
            if tree.is_sampled:
                # The first draft tokens are siblings; each continues as a chain. All are kept: dropping a sampled token
                # after looking at it would bias the output.
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
        # Keyed by where the draft starts: block verification looks at tokens that it then rejects, and the next draft,
        # which may reach the same position, must not use their noise again.
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

    def _record(self, tree: _Tree) -> None:
        """Record the chain of tokens whose K and V may be reused, and the slots that were written beyond it."""
        chain = 0
        while chain < tree.num_run and tree.parents[chain] == chain - 1:
            chain += 1
        ran = [*tree.sequence.token_ids[: tree.known], *tree.tokens[:chain]]
        self.model.record(tree.sequence, ran, tree.sequence.num_tokens + self.num_lookahead_tokens)

    def _draft(self, tree: _Tree) -> Draft:
        if not tree.tokens:
            return NO_DRAFT
        q = None
        if tree.is_sampled:  # tokens that the model does not have have no probability
            q = torch.stack(tree.q).cpu()  # the rules that need it run on the host
            q = functional.pad(q, (0, self.model.vocab_size - q.shape[1]))  # [nodes, the target's vocab]
        origin = (self.name,) * len(tree.tokens)
        return Draft(tuple(tree.tokens), tuple(tree.parents), tuple(tree.scores), origin, q)


def _share_catch_up(trees: list[_Tree]) -> None:
    """Decide how many tokens each sequence that is behind may run in this call. All sequences of a call wait for its
    longest run. If some are up to date, the others share a few tokens, first come first served, so that a new prompt
    does not hold up a running stream."""
    behind = [tree for tree in trees if tree.is_behind]
    shared = _CATCH_UP_BESIDE if len(behind) < len(trees) else _CATCH_UP * len(behind)
    for tree in behind:
        tree.catch_up = min(tree.num_missing, _CATCH_UP, shared)
        shared -= tree.catch_up
        if not tree.catch_up:
            tree.budget = 0  # its turn comes in a later step


def _child(draft: Draft, node: int, token: int) -> int | None:
    return next((child for child in draft.children(node) if draft.tokens[child] == token), None)


def _coupled(logits: Tensor, sequence: Sequence, position: int, count: int) -> list[tuple[int, float]]:
    """The tokens that the target will most probably draw at a position if its logits are like these, with their
    probabilities, best first. The target's noise is known, so only the difference of the logits is uncertain."""
    values, tokens = logits.topk(min(_CONTENDERS, len(logits)))
    values, tokens = values[values > -math.inf], tokens[values > -math.inf]
    temperature = sequence.params.temperature or 0.0
    if temperature > 0:
        allowed = values >= floor(logits, sequence.params)
        values, tokens = values[allowed], tokens[allowed]
        values = values + temperature * gumbel(uniform(stream_key(sequence.noise_seed, position), tokens)).float()
    probability, best = values.softmax(-1).topk(min(count, len(values)))
    return list(zip(tokens[best].tolist(), probability.tolist(), strict=True))
