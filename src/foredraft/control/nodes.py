"""The nodes of drafts: how probable it is that they are accepted, how many of them are worth verifying, and what the
committed tokens tell about them."""

from __future__ import annotations

from collections.abc import Sequence as Items
from itertools import accumulate, islice
from math import exp
from operator import sub

from foredraft.types import Draft

# What a proposer's own confidence counts for against its record: as much as eight trials with an open outcome, each of
# which tells p (1 - p) = 1/4. Less lets a few wrong drafts end many right ones; more believes a wrong one longer.
_PRIOR = 2.0
# The share of what was learnt that is kept after one more trial or draft: some fifty count. More follow a change later.
MEMORY = 0.98
LEAST, _MOST = 0.002, 0.998  # confidences are taken to lie between these: beyond, no odds would correct them


class Odds:
    """A correction of one proposer's confidence, learnt from its record.

    Its confidence in a token, given that everything above it is accepted, is corrected by a factor on its odds: there
    0.97 and 0.99 differ as 0.4 and 0.7 do, and one number corrects all of them.
    """

    __slots__ = ("_told", "factor")

    def __init__(self, factor: float = 1.0) -> None:
        self.factor = factor
        self._told = 0.0  # by the trials so far

    def survivals(self, draft: Draft) -> list[float]:
        """For every node the probability that it is reached and accepted; never above its parent's."""
        factor, scores, survivals = self.factor, draft.scores, list[float]()
        for parent, score in zip(draft.parents, scores, strict=True):
            confidence = score if parent < 0 else score / scores[parent]
            if not LEAST <= confidence <= _MOST:
                confidence = LEAST if confidence < LEAST else _MOST
            right = factor * confidence
            probability = right / (right + 1 - confidence)
            survivals.append(probability if parent < 0 else probability * survivals[parent])
        return survivals

    def confidence(self, survival: float) -> float:
        """The confidence that is corrected to this probability: the reverse of what `survivals` does to a root."""
        return survival / (survival + self.factor * (1 - survival)) if survival < 1 else 1.0

    def learn(self, draft: Draft, survivals: Items[float], tokens: Items[int]) -> None:
        """Score a draft, verified or not, by the tokens that were committed. Every node that was tested counts: its
        parent is right, and not the last that was committed."""
        depths = {-1: 0}  # of the nodes that are right
        for node, (token, parent) in enumerate(zip(draft.tokens, draft.parents, strict=True)):
            depth = depths.get(parent, len(tokens))
            if depth == len(tokens):
                continue
            probability = survivals[node] / (survivals[parent] if parent >= 0 else 1.0)
            is_right = token == tokens[depth]
            if is_right:
                depths[node] = depth + 1
            # A step towards the outcome: less with every trial, and with forgetting never by too little.
            self._told = self._told * MEMORY + probability * (1 - probability)
            self.factor *= exp((is_right - probability) / (_PRIOR + self._told))


def best_count(survivals: Items[float], extra: Items[float]) -> tuple[int, float]:
    """How many of these nodes, best first, to verify, and what that gains: the tokens that they are expected to bring,
    less those that their rows cost. `extra` has the cost of no row, of one, of two, and so on."""
    gains = list(map(sub, accumulate(survivals), islice(extra, 1, None)))
    gain = max(gains, default=0.0)
    return (gains.index(gain) + 1, gain) if gain > 0 else (0, 0.0)
