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
class _Guess:
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
    wants_said = False

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
        if self.model.accounts is not None:
            self.model.accounts.release(ids)
        if self.helper is not None:
            self.helper.release(ids)

    def clear(self) -> None:
        """Nothing is learnt from a text."""
        if self.helper is not None:
            self.helper.clear()

    @torch.inference_mode()
    def propose(self, sequences: Items[Sequence], budgets: Items[int]) -> list[Draft]:
        guesses = [self._begun(sequence, budget) for sequence, budget in zip(sequences, budgets, strict=True)]
        while growing := [guess for guess in guesses if len(guess.tokens) < guess.budget and guess.depth < self.depth]:
            helped = self._helped(growing)
            works = [self._work(guess, below) for guess, below in zip(growing, helped, strict=True)]
            for guess, work, rows in zip(growing, works, self.model.logits(works), strict=True):
                guess.known += work.num_new_tokens
                if work.reaches_end:
                    self._grow(guess, work.draft, rows)
                else:
                    guess.budget = 0  # not there yet: the rest of the text comes in later steps
                self._account(guess)
        return [self._draft(guess) for guess in guesses]

    def _begun(self, sequence: Sequence, budget: int) -> _Guess:
        known = self.model.known_tokens(sequence)
        readable = self.model.can_read(sequence.token_ids[known:])
        return _Guess(sequence, min(budget, self.num_lookahead_tokens) if readable else 0, known)

    def _helped(self, growing: list[_Guess]) -> list[Draft]:
        """What the helper guesses behind each chain; the model adds a token of its own behind that."""
        if self.helper is None:
            return [NO_DRAFT] * len(growing)
        texts = [replace(g.sequence, token_ids=[*g.sequence.token_ids, *g.tokens]) for g in growing]
        drafts = self.helper.propose(texts, [guess.budget - len(guess.tokens) - 1 for guess in growing])
        return [draft if self.model.can_read(draft.tokens) else NO_DRAFT for draft in drafts]

    def _work(self, guess: _Guess, below: Draft) -> Work:
        """The tokens that are still to be run, the nodes so far, and the helper's guesses behind the last of them."""
        size, missing = len(guess.tokens), guess.sequence.num_tokens - guess.known
        text = replace(
            guess.sequence, num_computed_tokens=guess.known, params=replace(guess.sequence.params, prompt_logprobs=None)
        )
        if missing > _CATCH_UP:
            return Work(text, _CATCH_UP)
        nodes = Draft(
            (*guess.tokens, *below.tokens),
            (*guess.parents, *(size + parent if parent >= 0 else size - 1 for parent in below.parents)),
            (*guess.scores, *below.scores),
            (self.name,) * (size + len(below)),
        )
        return Work(text, missing, draft=nodes, num_computed_nodes=guess.num_run)

    def _grow(self, guess: _Guess, ran: Draft, rows: Tensor) -> None:
        """Add the nodes that this run's logits lead to; its rows are the text's last token, new nodes, the helper's."""
        first = len(ran) - len(rows)  # the node of the first row; -1 is the text's last token
        guess.num_run = len(guess.tokens)
        leaves = (node for node in range(first, guess.num_run) if node not in guess.parents)
        reached = {node: node for node in leaves}  # node of the guess -> the node of the run that has its logits
        while reached and len(guess.tokens) < guess.budget and guess.depth < self.depth:
            size = len(guess.tokens)
            logits = [rows[node - first] for node in reached.values()]
            self._add_best(guess, list(reached), logits, min(self.width, guess.budget - size))
            guess.depth += 1
            added = {node: _child(ran, reached[guess.parents[node]], token) for node, token in guess.since(size)}
            reached = {node: helped for node, helped in added.items() if helped is not None}
            while reached.get(guess.num_run) == guess.num_run:  # the helper's node lies where the guess's own belongs
                guess.num_run += 1

    def _add_best(self, guess: _Guess, nodes: list[int], rows: list[Tensor], width: int) -> None:
        """Add the best `width` ways on from nodes whose logits these are. The first is the best way on from the first
        node, so that a tree always has the chain in it."""
        sequence = guess.sequence
        found: list[tuple[float, int, int]] = []  # reached how likely, node, token
        for node, row in zip(nodes, rows, strict=True):
            path = guess.path(node)
            logits = adjust(
                row,
                sequence.params,
                sequence.token_ids[: sequence.num_prompt_tokens],
                [*sequence.output_token_ids, *path],
            )
            if guess.is_sampled:
                # The text's first guesses are siblings; below them every way goes on alone. All are kept: to drop a
                # sampled token after looking at it would bias the text.
                self._sample(guess, node, logits, width if node < 0 else 1)
                continue
            above = guess.scores[node] if node >= 0 else 1.0
            for token, likely in _coupled(logits, sequence, sequence.num_tokens + len(path), width):
                found.append((above * likely, node, token))
        for score, node, token in [*found[:1], *sorted(found[1:], key=lambda way: -way[0])][:width]:
            guess.add(node, token, score / (guess.scores[node] if node >= 0 else 1.0))

    def _sample(self, guess: _Guess, node: int, logits: Tensor, count: int) -> None:
        """Draw different tokens, one after the other, each from what the ones before have left."""
        sequence = guess.sequence
        q = distribution(logits, sequence.params)
        candidates = q.nonzero().flatten()
        # Keyed by where the draft starts: block verification looks at tokens that it then refuses, and the next draft,
        # which may come to the same position, must not meet their noise again.
        key = stream_key(sequence.seed, sequence.num_tokens, DRAFT_STREAM)
        noise = gumbel(uniform(key, candidates + (node + 1) * self.model.vocab_size))
        order = (q[candidates].log() + noise).topk(min(count, len(candidates))).indices
        for drawn, token in enumerate(candidates[order].tolist()):
            if len(guess.tokens) == guess.budget:
                return
            if drawn:
                q = q.clone()
                q[guess.tokens[-1]] = 0
                q /= q.sum()
            guess.add(node, token, float(q[token]))
            guess.q.append(q)

    def _account(self, guess: _Guess) -> None:
        """Tell what has been run where a chain of it may be read again, and what has been touched beyond that."""
        chain = 0
        while chain < guess.num_run and guess.parents[chain] == chain - 1:
            chain += 1
        ran = [*guess.sequence.token_ids[: guess.known], *guess.tokens[:chain]]
        self.model.wrote(guess.sequence, ran, guess.sequence.num_tokens + self.num_lookahead_tokens)

    def _draft(self, guess: _Guess) -> Draft:
        if not guess.tokens:
            return NO_DRAFT
        q = None
        if guess.is_sampled:  # what the model has no token for, it never guesses
            q = torch.stack(guess.q)
            q = functional.pad(q, (0, self.model.vocab_size - q.shape[1]))  # [nodes, the target's vocab]
        origin = (self.name,) * len(guess.tokens)
        return Draft(tuple(guess.tokens), tuple(guess.parents), tuple(guess.scores), origin, q)


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
        values = values + temperature * gumbel(uniform(stream_key(sequence.seed, position), tokens)).float()
    likely, best = values.softmax(-1).topk(min(count, len(values)))
    return list(zip(tokens[best].tolist(), likely.tolist(), strict=True))
