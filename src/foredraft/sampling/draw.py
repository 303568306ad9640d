"""Drawing one token: argmax of logits + temperature * gumbel among those that reach a floor.

The reference in torch, for every device; kernels/draw.c gives the same tokens faster. Equal scores go to the lowest id.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from foredraft.sampling.noise import gumbel, highest_uniform_without, uniform

Draw = Callable[[Tensor, float, float, int], int]  # logits [vocab], floor, temperature, key of the noise -> token

_FEW = 1024  # up to here all candidates get noise at once; beyond, the best first, which rules most others out
_BEST = 32


def draw(logits: Tensor, floor: float, temperature: float, key: int) -> int:
    """The token that the noise of `key` draws.

    Noise is computed only for tokens that can still win: first for the best few, then for those whose uniform is high
    enough to beat them from below.
    """
    candidates = (logits >= floor).nonzero().flatten()
    if len(candidates) == 1:
        return int(candidates)  # no noise can change that; the usual case at temperature 0
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
