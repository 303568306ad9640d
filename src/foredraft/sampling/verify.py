"""What the target says of every sequence's draft, by the acceptance rule that its request asks for.

Stateless, and blind to who guessed. Greedy is no special case (the noise has no weight), plain decoding is none either
(an empty draft leaves one token).
"""

from __future__ import annotations

import math
from collections.abc import Sequence as Items
from typing import cast

import torch
from torch import Tensor

from foredraft.params import SamplingParams
from foredraft.sampling.draw import Draw, draw
from foredraft.sampling.noise import COIN_STREAM, RESIDUAL_STREAM, gumbel, stream_key, uniform
from foredraft.sampling.pipeline import adjust, distribution, floor, largest
from foredraft.sampling.rules import RULES
from foredraft.types import Sequence, TokenLogprob, Verdict, Work


def verify(logits: Tensor, works: Items[Work], draw: Draw = draw) -> list[Verdict]:
    """One verdict per work. `logits` [wanted rows, vocab] holds each work's `num_logits` rows, in order."""
    verdicts: list[Verdict] = []
    row = 0
    for work in works:
        rows = logits[row : row + work.num_logits]
        row += work.num_logits
        verdicts.append(_judge(rows, work, draw) if len(rows) else Verdict())
    assert row == len(logits)
    return verdicts


def _judge(rows: Tensor, work: Work, draw: Draw) -> Verdict:
    """One work's verdict; its rows are those of prompt tokens, then the last known token, then the draft's nodes."""
    sequence, draft, params = work.sequence, work.draft, work.sequence.params
    prompt_logprobs = _prompt_logprobs(rows, work)
    if not work.reaches_end:
        return Verdict(prompt_logprobs=prompt_logprobs)
    target = _Target(rows[len(rows) - 1 - len(draft) :], sequence, draw)
    try:
        path, tokens = RULES[params.acceptance](draft, target, KeyedChance(sequence.seed, sequence.num_tokens))
    except _NotFiniteError:
        return Verdict(error="The model gave logits that are not finite numbers; this request was ended, others go on.")
    top = params.logprobs
    judged = zip((-1, *path), tokens, strict=True)
    logprobs = [None if top is None else token_logprob(target.row(node), token, top) for node, token in judged]
    return Verdict(tuple(path), tuple(tokens), tuple(logprobs), prompt_logprobs)


class _NotFiniteError(Exception):
    """A row that a rule asked for has NaN or infinite logits."""


class _Target:
    """The target at the nodes of one sequence's draft. Every node sees the tokens on its own path."""

    def __init__(self, rows: Tensor, sequence: Sequence, draw: Draw) -> None:
        self._rows = rows  # [1 + nodes, vocab]
        self._sequence = sequence
        self._draw = draw
        self._prompt = sequence.token_ids[: sequence.num_prompt_tokens]
        self._output = sequence.output_token_ids

    def row(self, node: int) -> Tensor:
        return self._rows[1 + node]

    def token(self, node: int, path: list[int]) -> int:
        return pick(
            self._adjusted(node, path),
            self._sequence.params,
            self._sequence.seed,
            self._sequence.num_tokens + len(path),
            self._draw,
        )

    def distribution(self, node: int, path: list[int]) -> Tensor:
        return distribution(self._adjusted(node, path), self._sequence.params)

    def _adjusted(self, node: int, path: list[int]) -> Tensor:
        row = self.row(node)
        if not math.isfinite(largest(row)):
            raise _NotFiniteError
        return adjust(row, self._sequence.params, self._prompt, [*self._output, *path])


class KeyedChance:
    """Coins and draws keyed by seed and position, in streams of their own: independent of the draft's noise."""

    def __init__(self, seed: int, first_position: int) -> None:
        self._seed = seed
        self._first = first_position

    def accepts(self, probability: float, position: int, trial: int) -> bool:
        key = stream_key(self._seed, self._first + position, COIN_STREAM)
        return float(uniform(key, torch.tensor([trial]))) < probability

    def draw(self, probabilities: Tensor, position: int) -> int:
        key = stream_key(self._seed, self._first + position, RESIDUAL_STREAM)
        candidates = probabilities.nonzero().flatten()
        scores = probabilities[candidates].log() + gumbel(uniform(key, candidates))
        return int(candidates[scores.argmax()])


def pick(logits: Tensor, params: SamplingParams, seed: int, position: int, draw: Draw = draw) -> int:
    """The token that this seed draws at this position, among those above the floor. A backend's own `draw` gives the
    same token."""
    return draw(logits, floor(logits, params), cast(float, params.temperature), stream_key(seed, position))


def token_logprob(logits: Tensor, token: int, top: int) -> TokenLogprob:
    """The model's own log probability of a token and of its `top` best, before temperature, penalties and floors."""
    logprobs = logits.log_softmax(-1)
    values, ids = logprobs.topk(min(top, len(logprobs)))
    return TokenLogprob(token, float(logprobs[token]), dict(zip(ids.tolist(), values.tolist(), strict=True)))


def _prompt_logprobs(rows: Tensor, work: Work) -> tuple[TokenLogprob, ...]:
    """Row i of the prompt tells the log probability of token i + 1; the first token has none."""
    sequence, top = work.sequence, work.sequence.params.prompt_logprobs
    if top is None or not sequence.wants_prompt_logprobs:
        return ()
    following = range(sequence.num_computed_tokens + 1, sequence.num_computed_tokens + work.num_new_tokens + 1)
    return tuple(
        token_logprob(row, sequence.token_ids[position], top)
        for row, position in zip(rows, following, strict=False)
        if position < sequence.num_prompt_tokens
    )
