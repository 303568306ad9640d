"""What the target says of every sequence's draft, by the acceptance rule that its request asks for.

Stateless, and blind to who proposed. Greedy is no special case (the noise has no weight), plain decoding is none either
(an empty draft leaves one token).
"""

from __future__ import annotations

import math
from collections.abc import Sequence as Items
from typing import NamedTuple

import torch
from torch import Tensor

from foredraft.sampling.draw import NOT_FINITE, LazyDraws, NodeDraw, Sampler, Tokens
from foredraft.sampling.noise import COIN_STREAM, RESIDUAL_STREAM, gumbel, stream_key, uniform
from foredraft.sampling.pipeline import distribution, largest
from foredraft.sampling.rules import RULES
from foredraft.types import TokenLogprob, Verdict, Work


def verify(logits: Tensor, works: Items[Work], sample: Sampler = LazyDraws) -> list[Verdict]:
    """One verdict per work. `logits` [wanted rows, vocab] holds each work's `num_logits` rows, in order."""
    nodes: list[NodeDraw] = []
    places: list[tuple[int, int]] = []  # where a work's rows end, and its draws begin in `nodes`; -1: it has none yet
    row = 0
    for work in works:
        row += work.num_logits
        places.append((row, len(nodes) if work.reaches_end else -1))
        sequence, draft = work.sequence, work.draft
        if work.reaches_end and (draft.q is None or sequence.params.acceptance == "match"):
            size = len(draft.tokens)
            last = row - 1 - size  # the row of the last known token; those of the nodes follow it
            nodes.append(NodeDraw(last, sequence, draft, -1, 0))
            if size:  # coins are for drafts that were sampled
                depths = enumerate(draft.depths)
                nodes += [NodeDraw(last + 1 + node, sequence, draft, node, depth) for node, depth in depths]
    assert row == logits.shape[0]
    tokens = sample(logits, nodes)
    return [_judge(logits, work, *place, tokens) for work, place in zip(works, places, strict=True)]


def _judge(logits: Tensor, work: Work, end: int, first_draw: int, tokens: Tokens) -> Verdict:
    """One work's verdict. Its rows, which end at `end`, are those of prompt tokens, then that of the last known token,
    then those of the draft's nodes."""
    sequence, draft, params = work.sequence, work.draft, work.sequence.params
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    if params.prompt_logprobs is not None and sequence.wants_prompt_logprobs:
        prompt_logprobs = _prompt_logprobs(logits, end - work.num_logits, work)
    if first_draw < 0:
        return Verdict(prompt_logprobs=prompt_logprobs)
    # Without a draft there is nothing to accept: every rule emits the token that was drawn.
    if not draft.tokens and params.logprobs is None and (token := tokens[first_draw]) != NOT_FINITE:
        return Verdict((), (token,), (None,), prompt_logprobs)
    if draft.q is not None:  # the rules that look at distributions go through them node by node: copied once
        logits, end = logits[end - 1 - len(draft) : end].cpu(), 1 + len(draft)
    target = _Target(logits, end - 1 - len(draft), work, tokens, first_draw)
    try:
        path, emitted = RULES[params.acceptance](draft, target, KeyedChance(sequence.noise_seed, sequence.num_tokens))
    except _NotFiniteError as error:
        return Verdict(error=f"{error}; this request was ended, others go on.")
    logprobs: tuple[TokenLogprob | None, ...] = (None,) * len(emitted)
    if (top := params.logprobs) is not None:
        judged = zip((-1, *path), emitted, strict=True)
        logprobs = tuple(token_logprob(target.row(node), token, top) for node, token in judged)
    return Verdict(tuple(path), tuple(emitted), logprobs, prompt_logprobs)


class _NotFiniteError(Exception):
    """A row that a rule needs has NaN or infinite logits; the message says since when."""


class _Target(NamedTuple):
    """The target at the nodes of one sequence's draft. Every node sees the tokens on its own path."""

    logits: Tensor
    last_row: int  # of the last known token; those of the nodes follow it
    work: Work
    tokens: Tokens
    first_draw: int  # of this sequence, among the tokens

    def row(self, node: int) -> Tensor:
        return self.logits[self.last_row + 1 + node]

    def token(self, node: int, path: list[int]) -> int:
        token = self.tokens[self.first_draw + 1 + node]
        if token == NOT_FINITE:
            raise self._not_finite(node)
        return token

    def distribution(self, node: int, path: list[int]) -> Tensor:
        sequence, draft = self.work.sequence, self.work.draft
        adjusted = NodeDraw(self.last_row + 1 + node, sequence, draft, node, len(path)).adjusted(self.logits)
        if not math.isfinite(largest(adjusted)):
            raise self._not_finite(node)
        return distribution(adjusted, sequence.params)

    def _not_finite(self, node: int) -> _NotFiniteError:
        if math.isfinite(largest(self.row(node))):
            constraint = self.work.sequence.constraint
            if constraint is not None and constraint.error is not None:
                return _NotFiniteError(constraint.error.removesuffix("."))
            return _NotFiniteError("The penalties or the logit bias made logits that are not finite numbers")
        return _NotFiniteError("The model gave logits that are not finite numbers")


class KeyedChance(NamedTuple):
    """Coins and draws keyed by seed and position, in streams of their own: independent of the draft's noise."""

    seed: int
    first_position: int

    def accepts(self, probability: float, position: int, trial: int) -> bool:
        key = stream_key(self.seed, self.first_position + position, COIN_STREAM)
        return float(uniform(key, torch.tensor([trial]))) < probability

    def draw(self, probabilities: Tensor, position: int) -> int:
        key = stream_key(self.seed, self.first_position + position, RESIDUAL_STREAM)
        candidates = probabilities.nonzero().flatten()
        scores = probabilities[candidates].log() + gumbel(uniform(key, candidates))
        return int(candidates[scores.argmax()])


def token_logprob(logits: Tensor, token: int, top: int) -> TokenLogprob:
    """The model's own log probability of a token and of its `top` best, before temperature, penalties and floors."""
    logprobs = logits.log_softmax(-1)
    values, ids = logprobs.topk(min(top, len(logprobs)))
    rank = 1 + int((logprobs > logprobs[token]).sum())
    return TokenLogprob(token, float(logprobs[token]), dict(zip(ids.tolist(), values.tolist(), strict=True)), rank)


def _prompt_logprobs(logits: Tensor, first_row: int, work: Work) -> tuple[TokenLogprob, ...]:
    """Row i of the prompt tells the log probability of token i + 1; the first token has none."""
    sequence, top = work.sequence, work.sequence.params.prompt_logprobs
    assert top is not None
    following = range(sequence.num_computed_tokens + 1, sequence.num_computed_tokens + work.num_new_tokens + 1)
    return tuple(
        token_logprob(logits[row], sequence.token_ids[position], top)
        for row, position in enumerate(following, first_row)
        if position < sequence.num_prompt_tokens
    )
