"""How models and heads draft: they continue all sequences at once, level by level, each with a chain or with a tree of
the best branches."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Items
from dataclasses import replace
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from foredraft.backends.base import Backend
from foredraft.proposers.base import Proposer
from foredraft.proposers.model.candidates import Candidates, Node, NodeLogits, coupled, sampled
from foredraft.proposers.model.depths import Depths
from foredraft.proposers.model.tree import Tree, TreeShape, computed_up_to
from foredraft.proposers.model.whole_drafts import WholeDrafts
from foredraft.types import NO_DRAFT, Draft, Sequence, Work

UP_TO_DATE = 16  # with so few tokens to run, about a tile, a sequence drafts at once
CATCH_UP = 512  # the most catch-up tokens of a sequence in one call; with more to run there is no draft yet


class DraftingModel(Protocol):
    """What drafts: a model or a head, with K and V of its own. Proposers that differ in their options share one."""

    backend: Backend
    vocab_size: int  # of the target
    catch_up_beside: int  # the most catch-up tokens of all sequences, where up-to-date ones would wait for them

    @property
    def runs_ahead(self) -> bool:
        """Whether whole drafts can run without the host."""

    def can_draft(self, sequence: Sequence, known: int) -> bool:
        """Whether everything is there that the tokens from `known` on need to be run."""

    def num_computed(self, sequence: Sequence) -> int:
        """How many leading tokens of a sequence need not be run again; at least one is left."""

    def logits(self, works: Items[Work]) -> NodeLogits:
        """Run the works: new tokens of sequences and new nodes of their drafts. All rows that have logits, in order."""

    def ahead(self, works: Items[Work], shape: TreeShape, budgets: Items[int], min_score: float) -> WholeDrafts | None:
        """Run the works and all levels of the trees behind them; None: it is asked level by level instead."""

    def record(self, sequence: Sequence, known: int, drafted: Items[int], num_slots: int) -> None:
        """The first `known` tokens of the sequence, and `drafted` ones behind them, have been run at its slots; further
        slots up to `num_slots` may hold anything."""

    def release(self, sequence_ids: Iterable[int]) -> None:
        """Forget sequences that have ended."""

    def close(self) -> None:
        """End one use of it."""


class TreeDrafter(Proposer):
    """Drafts with a model or a head."""

    free = False

    def __init__(self, name: str, model: DraftingModel, shape: TreeShape, shallower: Items[TreeShape] = ()) -> None:
        """`shallower` are further shapes that whole drafts may have on the device, deepest first."""
        self.name = name
        self.model: DraftingModel = model
        self.shape = shape
        self._depths = Depths(shape, shallower)
        self.num_lookahead_tokens = shape.most_nodes

    def num_missing(self, sequence: Sequence) -> int:
        missing = sequence.num_tokens - self.model.num_computed(sequence)
        return missing if missing > UP_TO_DATE else 0

    def release(self, sequence_ids: Iterable[int]) -> None:
        ids = list(sequence_ids)
        self.model.release(ids)
        self._depths.release(ids)

    def close(self) -> None:
        self.model.close()

    @torch.inference_mode()
    def propose(self, sequences: Items[Sequence], budgets: Items[int], min_score: float) -> list[Draft]:
        trees = [self._begun(sequence, budget, min_score) for sequence, budget in zip(sequences, budgets, strict=True)]
        share_catch_up([tree for tree in trees if tree.budget], self.model.catch_up_beside)
        if self.model.runs_ahead and (ready := [tree for tree in trees if self._can_run_ahead(tree)]):
            self._run_ahead(ready, min_score)
        while growing := [tree for tree in trees if tree.grows]:
            works = self._works(growing)
            logits = self.model.logits(works)
            candidates = self._candidates(growing, works, logits)
            row = 0
            for tree, work in zip(growing, works, strict=True):
                tree.known += work.num_new_tokens
                if work.reaches_end:
                    rows = slice(row, row + work.num_logits)
                    self._grow(tree, work.draft, logits[rows], candidates[rows])
                else:
                    tree.budget = 0  # not there yet: the rest of the catch-up tokens run in later steps
                row += work.num_logits
                self._record(tree, tree.chain)
        return [self._draft(tree) for tree in trees]

    def _can_run_ahead(self, tree: Tree) -> bool:
        """Whether nothing but the model's logits and the noise decides what is drafted."""
        plain = not tree.is_sampled and not tree.sequence.adjusts_logits
        return tree.grows and plain and tree.num_missing <= tree.catch_up

    def _run_ahead(self, trees: list[Tree], min_score: float) -> None:
        """Let the device run the levels of these trees, if it can, and take the drafts from what it found."""
        works, shape = self._works(trees), self._depths.choose([tree.sequence.id for tree in trees], min_score)
        drafts = self.model.ahead(works, shape, [tree.budget for tree in trees], min_score)
        if drafts is None:
            return
        for lane, (tree, work) in enumerate(zip(trees, works, strict=True)):
            tree.known += work.num_new_tokens
            tree.made, tree.ended = drafts.draft(lane, tree.budget, self.name), True
            self._record(tree, drafts.chain(lane))
            if self._depths.is_chosen(len(trees), min_score):
                self._depths.learn(tree.sequence.id, tree.made, shape)

    def _begun(self, sequence: Sequence, budget: int, min_score: float) -> Tree:
        known = self.model.num_computed(sequence)
        allowed = min(budget, self.num_lookahead_tokens) if self.model.can_draft(sequence, known) else 0
        if sequence.params.prompt_logprobs is not None:  # the target owes them, not the draft model
            sequence = replace(sequence, params=replace(sequence.params, prompt_logprobs=None))
        return Tree(sequence, self.shape, allowed, known, UP_TO_DATE, 0.0 if self.shape.static else min_score)

    def _works(self, growing: list[Tree]) -> list[Work]:
        return [self._work(tree) for tree in growing]

    def _work(self, tree: Tree, below: Draft = NO_DRAFT) -> Work:
        """The catch-up tokens, the nodes so far, and the draft of somebody else behind the last of them."""
        size = len(tree.tokens)
        sequence = computed_up_to(tree.sequence, tree.known)
        if tree.num_missing > tree.catch_up:
            return Work(sequence, tree.catch_up)
        if not size and not below:
            return Work(sequence, tree.num_missing)
        nodes = Draft(
            (*tree.tokens, *below.tokens),
            (*tree.parents, *(size + parent if parent >= 0 else size - 1 for parent in below.parents)),
            (*tree.scores, *below.scores),
            (self.name,) * (size + len(below)),
        )
        return Work(sequence, tree.num_missing, draft=nodes, num_computed_nodes=tree.num_run)

    def _candidates(self, growing: list[Tree], works: list[Work], logits: NodeLogits) -> list[Candidates]:
        """Candidates behind every row of the works, under the match rule; empty ones where tokens are sampled."""
        nodes: list[Node] = []
        rows: list[int] = []
        row = 0
        for tree, work in zip(growing, works, strict=True):
            if not tree.is_sampled:
                first = len(work.draft) - work.num_logits
                for node in range(first, len(work.draft)):
                    nodes.append(Node(tree.sequence, work.draft.path_tokens(node)))
                rows += range(row, row + work.num_logits)
            row += work.num_logits
        found: list[Candidates] = [[] for _ in range(row)]
        if rows:
            chosen = logits if len(rows) == row else logits[rows]
            model = self.model
            best = coupled(chosen, nodes, self.shape.width, model.vocab_size, model.backend)
            for place, candidates in zip(rows, best, strict=True):
                found[place] = candidates
        return found

    def _grow(self, tree: Tree, ran: Draft, logits: NodeLogits, candidates: list[Candidates]) -> None:
        """Add nodes by this run's logits. Its rows are the sequence's last token, new nodes, and nodes of somebody
        else's draft."""
        first = len(ran) - len(candidates)  # the node of the first row; -1 is the sequence's last token
        tree.num_run = len(tree.tokens)
        leaves = (node for node in range(first, tree.num_run) if node not in tree.parents)
        reached = {node: node for node in leaves}  # node of the draft -> the node of the run that has its logits
        while reached and tree.room > 0 and tree.depth < self.shape.depth:
            size = len(tree.tokens)
            if tree.is_sampled:
                for node, place in reached.items():
                    self._sample(tree, node, logits.of_target(place - first, self.model.vocab_size))
            else:
                tree.add_best(
                    [
                        (node, rank, token, probability)
                        for node, place in reached.items()
                        for rank, (token, probability) in enumerate(candidates[place - first])
                    ]
                )
            tree.depth += 1
            tree.ended = len(tree.tokens) == size
            new = range(size, len(tree.tokens))
            added = {node: ran.child(reached[tree.parents[node]], tree.tokens[node]) for node in new}
            reached = {node: helped for node, helped in added.items() if helped >= 0}
            while reached.get(tree.num_run) == tree.num_run:  # the other draft's node lies at the slot of this node
                tree.num_run += 1

    def _sample(self, tree: Tree, node: int, logits: Tensor) -> None:
        """The first draft tokens are siblings; each continues as a chain. All are kept: dropping a sampled token after
        looking at it would bias the output."""
        count = tree.width if node < 0 else 1
        place = Node(tree.sequence, tree.path(node))
        for token, q in sampled(logits, place, node, min(count, tree.room), self.model.vocab_size):
            tree.add(node, token, float(q[token]))
            tree.q.append(q)

    def _record(self, tree: Tree, chain: list[int]) -> None:
        """Record the chain of draft tokens whose K and V may be reused, and the slots that were written beyond it."""
        self.model.record(tree.sequence, tree.known, chain, tree.sequence.num_tokens + self.num_lookahead_tokens)

    def _draft(self, tree: Tree) -> Draft:
        if tree.made is not None:
            return tree.made
        if not tree.tokens and not tree.leaves:
            return NO_DRAFT
        if not tree.is_sampled:
            return tree.draft(self.name, None)
        q = torch.stack(tree.q).cpu()  # the rules that need it run on the host
        q = functional.pad(q, (0, self.model.vocab_size - q.shape[1]))  # [nodes, the target's vocab]
        return tree.draft(self.name, q)


def share_catch_up(trees: list[Tree], beside: int) -> None:
    """Decide how many tokens each sequence that is behind may run in this call. All sequences of a call wait for its
    longest run. If some are up to date, the others share `beside` tokens, first come first served, so that a new prompt
    does not hold up a running stream."""
    behind = [tree for tree in trees if tree.num_missing > UP_TO_DATE]
    shared = beside if len(behind) < len(trees) else CATCH_UP * len(behind)
    for tree in behind:
        tree.catch_up = min(tree.num_missing, CATCH_UP, shared)
        shared -= tree.catch_up
        if not tree.catch_up:
            tree.budget = 0  # its turn comes in a later step
