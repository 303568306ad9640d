"""Drawing tokens: one as argmax of logits + temperature * gumbel among those that reach a floor, and the target's token
after every node of a draft, as the match rule needs it.

`draw` is the reference in torch, for every device; the kernels give the same tokens faster. Equal scores go to the
lowest id. A backend draws for all nodes of all sequences (`Backend.sample`). On a CPU the tokens are drawn when they
are read, because the rule reads only those on the accepted path.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from collections.abc import Sequence as Items
from dataclasses import dataclass
from typing import NamedTuple, Protocol, cast

from torch import Tensor

from foredraft.params import SamplingParams
from foredraft.sampling.noise import gumbel, highest_uniform_without, stream_key, uniform
from foredraft.sampling.pipeline import adjust_after, floor, largest
from foredraft.types import Draft, Sequence

NOT_FINITE = -1  # instead of a token, where the logits have NaN or an infinite maximum

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


def pick(logits: Tensor, params: SamplingParams, seed: int, position: int) -> int:
    """The token that this seed draws at this position, among those above the floor."""
    return draw(logits, floor(logits, params), cast(float, params.temperature), stream_key(seed, position))


class NodeDraw(NamedTuple):
    """The draw after one node; node -1 is the last committed token."""

    row: int  # of the logits
    sequence: Sequence
    draft: Draft
    node: int
    depth: int  # draft tokens from the last committed token down to the node

    @property
    def key(self) -> int:
        """The key of the noise."""
        return stream_key(self.sequence.noise_seed, self.sequence.num_tokens + self.depth)

    def adjusted(self, logits: Tensor) -> Tensor:
        """The node's row [vocab] after penalties, bias and grammar, which see the tokens on the node's own path."""
        row = logits[self.row]
        if not self.sequence.adjusts_logits:
            return row
        return adjust_after(row, self.sequence, self.draft.path_tokens(self.node))


class Tokens(Protocol):
    """The token of every node."""

    def __getitem__(self, index: int, /) -> int: ...


Sampler = Callable[[Tensor, Items[NodeDraw]], Tokens]  # logits [rows, vocab] -> the token of every node


@dataclass(frozen=True)
class LazyDraws:
    """Tokens that are drawn one by one when they are read."""

    logits: Tensor
    nodes: Items[NodeDraw]

    def __getitem__(self, index: int) -> int:
        node = self.nodes[index]
        row = node.adjusted(self.logits)
        highest = largest(row)
        if not math.isfinite(highest):
            return NOT_FINITE
        params = node.sequence.params
        return draw(row, floor(row, params, highest), params.temperature or 0.0, node.key)
