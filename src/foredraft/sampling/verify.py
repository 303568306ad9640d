"""The match rule: the target's token at a node is argmax(logits + temperature * noise), and a guess is right if it
is that token.

Stateless, and blind to who guessed. At temperature 0 the noise has no weight, so greedy is no special case; an empty
draft leaves one token, so plain decoding is none either.
"""

from __future__ import annotations

import math
from collections.abc import Sequence as Items
from typing import cast

from torch import Tensor

from foredraft.params import SamplingParams
from foredraft.sampling.noise import gumbel, highest_uniform_without, stream_key, uniform
from foredraft.sampling.pipeline import adjust, floor
from foredraft.types import TokenLogprob, Verdict, Work

_FEW = 1024  # so many candidates get their noise at once; of more, the best get theirs first, to rule others out
_BEST = 32
_NOT_FINITE = "The model gave logits that are not finite numbers; this request was ended, others go on."


def verify(logits: Tensor, works: Items[Work]) -> list[Verdict]:
    """One verdict per work. `logits` [wanted rows, vocab] holds each work's `num_logits` rows, in order."""
    verdicts: list[Verdict] = []
    row = 0
    for work in works:
        rows = logits[row : row + work.num_logits]
        row += work.num_logits
        verdicts.append(_judge(rows, work) if len(rows) else Verdict())
    assert row == len(logits)
    return verdicts


def _judge(rows: Tensor, work: Work) -> Verdict:
    """Walk the draft from its root while the target's own tokens follow it."""
    sequence, draft, params = work.sequence, work.draft, work.sequence.params
    prompt_logprobs = _prompt_logprobs(rows, work)
    if not work.reaches_end:
        return Verdict(prompt_logprobs=prompt_logprobs)

    root = len(rows) - 1 - len(draft)
    prompt, output = sequence.token_ids[: sequence.num_prompt_tokens], sequence.output_token_ids
    path: list[int] = []
    logprobs: list[TokenLogprob | None] = []
    node = -1
    while True:
        raw = rows[root + 1 + node]
        if not math.isfinite(raw.max()):
            return Verdict(error=_NOT_FINITE)
        token = pick(adjust(raw, params, prompt, output), params, sequence.seed, len(prompt) + len(output))
        output.append(token)
        logprobs.append(None if params.logprobs is None else token_logprob(raw, token, params.logprobs))
        node = next((child for child in draft.children(node) if draft.tokens[child] == token), -1)
        if node < 0:
            break
        path.append(node)
    return Verdict(tuple(path), tuple(output[sequence.num_output_tokens :]), tuple(logprobs), prompt_logprobs)


def pick(logits: Tensor, params: SamplingParams, seed: int, position: int) -> int:
    """The token that this seed draws at this position: argmax of logits + temperature * gumbel among those above
    the floor.

    Equal scores go to the lowest id. Noise is computed only for tokens that can still win: first for the best few,
    then for those whose uniform is high enough to beat them from below.
    """
    temperature = cast(float, params.temperature)
    key = stream_key(seed, position)
    candidates = (logits >= floor(logits, params)).nonzero().flatten()
    if len(candidates) > _FEW:
        candidates = _contenders(logits, candidates, temperature, key)
    return int(candidates[_scores(logits, candidates, temperature, key).argmax()])


def _contenders(logits: Tensor, candidates: Tensor, temperature: float, key: int) -> Tensor:
    """The candidates that can still win, in order of id: the best few, and those with noise enough to beat them."""
    values = logits[candidates]
    lead = values.topk(_BEST).values[-1]
    to_beat = _scores(logits, candidates[values >= lead], temperature, key).max()
    noise_needed = float(to_beat - lead) / max(temperature, 1e-30)  # at temperature 0 all candidates are in the lead
    loud = uniform(key, candidates) > highest_uniform_without(noise_needed)
    return candidates[(values >= lead) | loud]


def _scores(logits: Tensor, token_ids: Tensor, temperature: float, key: int) -> Tensor:
    return logits[token_ids].double() + temperature * gumbel(uniform(key, token_ids))


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
