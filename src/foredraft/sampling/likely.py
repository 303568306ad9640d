"""Which tokens the target will most probably draw, by the logits of a drafting model: under the match rule the noise of
the target is known, so only the difference of the logits is not. The reference in torch; kernels do the same faster."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Items
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from foredraft.params import SamplingParams
from foredraft.sampling.noise import gumbel, uniform
from foredraft.sampling.pipeline import floor

CONTENDERS = 256  # largest logits that may win by noise, beside those that equal the last of them

Top = Callable[[Tensor, int], tuple[Tensor, Tensor]]  # the largest few of rows, and their columns; see Backend.top


class Drawing(NamedTuple):
    """How the target draws a token."""

    params: SamplingParams  # resolved
    key: int  # of the noise


def likely(
    top: Top, logits: Tensor, drawings: Items[Drawing], count: int, token_ids: Tensor | None
) -> tuple[Tensor, Tensor]:
    """See Backend.likely."""
    values, columns = top(logits, count)
    highest = values[:, :1]
    shares = (values - highest).exp() / (logits - highest).exp().sum(1, keepdim=True)
    for row, how in enumerate(drawings):
        if how.params.temperature:
            names = token_ids[row] if token_ids is not None and token_ids.dim() == 2 else token_ids
            shares[row], columns[row] = _with_noise(logits[row], how, shares.shape[1], names)
    return torch.where(shares > 0, shares, 0), columns  # also where there is no number


def _with_noise(logits: Tensor, how: Drawing, count: int, token_ids: Tensor | None) -> tuple[Tensor, Tensor]:
    """The shares and columns of one row."""
    if not logits.max().isfinite():
        return logits.new_zeros(count), torch.zeros(count, dtype=torch.int64, device=logits.device)
    lead = float(logits.topk(min(CONTENDERS, len(logits))).values[-1])
    columns = (logits >= max(floor(logits, how.params), lead)).nonzero().flatten()
    noise = gumbel(uniform(how.key, columns if token_ids is None else token_ids[columns]))
    scores = (logits[columns].double() + (how.params.temperature or 0.0) * noise).float()
    best = scores.sort(descending=True, stable=True).indices[:count]
    missing = (0, count - len(best))
    return functional.pad(scores.softmax(0)[best], missing), functional.pad(columns[best], missing)
