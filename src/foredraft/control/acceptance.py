"""The probability that a draft token is accepted: the proposer's confidence, corrected by its record.

A proposer's confidence in a token, given that everything above it is accepted, is corrected by a factor on its odds:
there 0.97 and 0.99 differ as 0.4 and 0.7 do, and one number corrects all of them. Each proposer has a correction over
all requests. Each request adds one of its own, so a new request starts with what other requests have taught.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import exp

from foredraft.types import Draft

# docs/control.md has the sweeps that set these. A trial tells most where the outcome is open: p (1 - p), at most 1/4.
_PRIOR = 2.0  # what a proposer's own confidence counts for: eight open trials
_MEMORY = 0.99  # the share of the record that is kept after one more trial
_OWN_PRIOR = 8.0  # what the common correction counts for in a request
_OWN_MEMORY = 0.95
_LEAST = 0.002  # confidences are taken to be no closer to 0 or 1


@dataclass(slots=True)
class _Correction:
    odds: float = 1.0  # those of a confidence are multiplied by it
    told: float = 0.0  # by the trials so far

    def learn(self, error: float, tells: float, prior: float, memory: float) -> None:
        """Step towards the outcome of a trial: less with every trial, and with forgetting never by too little."""
        self.told = self.told * memory + tells
        self.odds *= exp(error / (prior + self.told))


class _Record:
    """The corrections of one proposer: for the first tokens of its drafts, and for later ones, which are accepted
    more."""

    __slots__ = ("first", "later")

    def __init__(self) -> None:
        self.first, self.later = _Correction(), _Correction()


_NOTHING_LEARNT = _Record()  # of requests without a record; only read
_Records = defaultdict[str, _Record]  # by proposer


class Acceptance:
    """The corrections, common and per request."""

    def __init__(self) -> None:
        self._common: _Records = defaultdict(_Record)
        self._requests: dict[int, _Records] = {}

    def survivals(self, sequence_id: int, draft: Draft) -> list[float]:
        """For every node the probability that it is reached and accepted; never above its parent's."""
        survivals: list[float] = []
        scores, proposer, first, later = draft.scores, "", 1.0, 1.0
        for parent, score, origin in zip(draft.parents, scores, draft.origin, strict=True):
            if origin != proposer:  # nearly always all nodes are of one
                proposer, common = origin, self._common[origin]
                own = self._requests[sequence_id][origin] if sequence_id in self._requests else _NOTHING_LEARNT
                first, later = common.first.odds * own.first.odds, common.later.odds * own.later.odds
            odds, above = (first, 1.0) if parent < 0 else (later, survivals[parent])
            confidence = score if parent < 0 else score / scores[parent]
            survivals.append(above * _probability(confidence, odds))
        return survivals

    def observe(self, sequence_id: int, draft: Draft, tokens: Sequence[int]) -> None:
        """Score a draft, verified or not, by the tokens that were committed."""
        if sequence_id not in self._requests:
            self._requests[sequence_id] = defaultdict(_Record)
        scores, depths = draft.scores, {-1: 0}  # of the nodes whose tokens were committed
        for node, (token, parent) in enumerate(zip(draft.tokens, draft.parents, strict=True)):
            depth = depths.get(parent, len(tokens))
            if depth == len(tokens):
                continue  # it was not tested: its parent is wrong, or the last that was committed
            common, own = self._common[draft.origin[node]], self._requests[sequence_id][draft.origin[node]]
            of_all, of_request = (common.first, own.first) if parent < 0 else (common.later, own.later)
            confidence = scores[node] if parent < 0 else scores[node] / scores[parent]
            probability = _probability(confidence, of_all.odds * of_request.odds)
            is_right = token == tokens[depth]
            if is_right:
                depths[node] = depth + 1
            error, tells = is_right - probability, probability * (1 - probability)
            of_all.learn(error, tells, _PRIOR, _MEMORY)
            of_request.learn(error, tells, _OWN_PRIOR, _OWN_MEMORY)

    def release(self, sequence_ids: Iterable[int]) -> None:
        for sequence_id in sequence_ids:
            self._requests.pop(sequence_id, None)


def _probability(confidence: float, odds: float) -> float:
    """That a token is accepted, if everything above it is: by the proposer's confidence, corrected by these odds."""
    confidence = _LEAST if confidence < _LEAST else min(confidence, 1 - _LEAST)
    right = odds * confidence
    return right / (right + 1 - confidence)
