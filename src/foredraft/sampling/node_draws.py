"""The target's token after every node of a draft, as the match rule needs it: a function of logits, path and seed.

A backend draws for all nodes of all sequences in one call (`Backend.sample`). On a CPU the tokens are drawn when they
are read, because the rule reads only those on the accepted path.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from collections.abc import Sequence as Items
from typing import NamedTuple, overload

from torch import Tensor

from foredraft.sampling.draw import Draw
from foredraft.sampling.noise import stream_key
from foredraft.sampling.pipeline import adjust_after, floor, largest
from foredraft.types import Draft, Sequence

NOT_FINITE = -1  # instead of a token, where the logits have NaN or an infinite maximum


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


Sampler = Callable[[Tensor, Items[NodeDraw]], Items[int]]  # logits [rows, vocab] -> the token of every node


class LazyDraws(Items[int]):
    """Tokens that are drawn one by one when they are read."""

    def __init__(self, logits: Tensor, nodes: Items[NodeDraw], draw: Draw) -> None:
        self._logits = logits
        self._nodes = nodes
        self._draw = draw

    def __len__(self) -> int:
        return len(self._nodes)

    @overload
    def __getitem__(self, index: int) -> int: ...

    @overload
    def __getitem__(self, index: slice) -> Items[int]: ...

    def __getitem__(self, index: int | slice) -> int | Items[int]:
        if isinstance(index, slice):
            return LazyDraws(self._logits, self._nodes[index], self._draw)
        node = self._nodes[index]
        row = node.adjusted(self._logits)
        highest = largest(row)
        if not math.isfinite(highest):
            return NOT_FINITE
        params = node.sequence.params
        return self._draw(row, floor(row, params, highest), params.temperature or 0.0, node.key)
