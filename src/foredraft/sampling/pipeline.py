"""From logits to the distribution that a request asked for: penalties and bias, the grammar, then floors on the logits.

Top-k, top-p and min-p each keep the tokens whose logit reaches some floor, so together they are one number: the highest
floor. Ties at the floor stay in, which makes the kept set a function of the logits alone, on every device.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence as Items
from typing import cast

import torch
from torch import Tensor

from foredraft.params import SamplingParams
from foredraft.types import Sequence

_LOOKS = (64, 1024, 8192)  # top-p is looked for among this many of the best tokens, before all are sorted
_LOWEST = torch.finfo(torch.float32).min  # a token whose logit is below that, -inf, cannot be drawn
_TIES = 32  # tokens beyond the k-th that are looked at, in case they equal it


def adjust_after(logits: Tensor, sequence: Sequence, path: Items[int]) -> Tensor:
    """Logits [vocab] of a model after a path behind the sequence: penalties and bias, then -inf for every token that
    the grammar does not allow there. A smaller model may lack all that are allowed."""
    if sequence.params.adjusts_logits:
        prompt = sequence.token_ids[: sequence.num_prompt_tokens]
        logits = adjust(logits, sequence.params, prompt, [*sequence.output_token_ids, *path])
    if sequence.constraint is None:
        return logits
    allowed = sequence.constraint.mask(sequence.constrained_path(path))[: len(logits)]
    return logits.masked_fill(~allowed.to(logits.device), -math.inf)


def adjust(logits: Tensor, params: SamplingParams, prompt: Items[int], output: Items[int]) -> Tensor:
    """Logits [vocab] after repetition, presence and frequency penalties and logit bias, given the tokens before them.

    Repetition counts prompt and output, presence and frequency only the output, as in vLLM. A bias is for the target's
    tokens: those that a smaller model does not have are passed over.
    """
    if not params.adjusts_logits:
        return logits
    repetition = cast(float, params.repetition_penalty)
    logits = logits.clone()
    if repetition != 1:
        seen = _ids(sorted({*prompt, *output}), logits)
        values = logits[seen]
        logits[seen] = torch.where(values > 0, values / repetition, values * repetition)
    if output and (params.presence_penalty or params.frequency_penalty):
        counts = Counter(output)
        amounts = [params.presence_penalty + params.frequency_penalty * count for count in counts.values()]
        logits[_ids(list(counts), logits)] -= torch.tensor(amounts, device=logits.device)
    if params.logit_bias:
        ids, biases = params.bias_arrays
        known = bisect_left(ids, len(logits))
        places = torch.frombuffer(ids, dtype=torch.int64)[:known].to(logits.device)
        logits[places] += torch.frombuffer(biases, dtype=torch.float32)[:known].to(logits.device)
    return logits


def largest(logits: Tensor) -> float:
    """The largest logit, or NaN if there is one. On a CPU numpy takes a tenth of torch's time for a single row."""
    return float(logits.numpy(force=True).max())


def floor(logits: Tensor, params: SamplingParams, highest: float | None = None) -> float:
    """The lowest logit that may still be drawn. At temperature 0 that is the largest: the distribution is one-hot.
    `highest` is the largest logit, where it is known: it takes a pass over all of them."""
    temperature = cast(float, params.temperature)
    if temperature == 0:
        return largest(logits) if highest is None else highest
    floors = [_LOWEST]
    top_k, top_p, min_p = cast(int, params.top_k), cast(float, params.top_p), cast(float, params.min_p)
    kept = logits
    if 0 < top_k < len(logits):
        kept = _best(logits, top_k)
        floors.append(float(kept.min()))
    if top_p < 1:
        floors.append(_top_p_floor(kept, temperature, top_p))
    if min_p > 0:
        floors.append(largest(logits) + temperature * math.log(min_p))
    return max(floors)


def distribution(logits: Tensor, params: SamplingParams) -> Tensor:
    """The probabilities that a token is drawn with: float64 [vocab]. At temperature 0 one is 1."""
    temperature = cast(float, params.temperature)
    if temperature == 0:
        one_hot = torch.zeros(len(logits), dtype=torch.float64, device=logits.device)
        one_hot[logits.argmax()] = 1.0
        return one_hot
    scaled = (logits - logits.max()).double() / temperature
    return torch.where(logits >= floor(logits, params), scaled, -math.inf).softmax(-1)


def _best(logits: Tensor, count: int) -> Tensor:
    """The `count` largest logits and those equal to the last of them, in order of id."""
    best, ids = logits.topk(min(count + _TIES, len(logits)))
    if best[-1] == best[count - 1]:  # there may be more ties than these
        return logits[logits >= best[count - 1]]
    return logits[ids[best >= best[count - 1]].sort().values]


def _top_p_floor(kept: Tensor, temperature: float, top_p: float) -> float:
    """The logit of the last token that is needed to reach `top_p` of the mass of those that are kept."""
    highest = kept.max()
    needed = top_p * float(((kept - highest) / temperature).exp().sum(dtype=torch.float64))
    for size in (*(look for look in _LOOKS if look < len(kept)), len(kept)):
        best = kept.topk(size).values
        reached = ((best - highest) / temperature).exp().cumsum(0, dtype=torch.float64) >= needed
        if bool(reached[-1]):
            break
    return float(best[min(int((~reached).sum()), size - 1)])


def _ids(token_ids: list[int], like: Tensor) -> Tensor:
    return torch.tensor(token_ids, dtype=torch.int64, device=like.device)
