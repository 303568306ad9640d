"""The probability that a draft token is accepted: the proposer's confidence, corrected by its record.

A proposer's confidence in a token, given that everything above it is accepted, is corrected on the scale of log odds:
there 0.97 and 0.99 differ as 0.4 and 0.7 do, and one number corrects all of them. Each proposer has a correction over
all requests. Each request adds one of its own, so a new request starts with what other requests have taught.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import exp, log

from foredraft.types import Draft

# docs/control.md has the sweeps that set these. A trial tells most where the outcome is open: p (1 - p), at most 1/4.
_PRIOR = 2.0  # what a proposer's own confidence counts for: eight open trials
_MEMORY = 0.99  # the share of the record that is kept after one more trial
_OWN_PRIOR = 8.0  # what the common correction counts for in a request
_OWN_MEMORY = 0.95
_LEAST = 0.002  # confidences are taken to be no closer to 0 or 1

_Origin = tuple[str, bool]  # a proposer, and whether the token is the first of a draft: later ones are accepted more


@dataclass(slots=True)
class _Correction:
    log_odds: float = 0.0  # that are added to those of a confidence
    told: float = 0.0  # by the trials so far

    def learn(self, error: float, tells: float, prior: float, memory: float) -> None:
        """Step towards the outcome of a trial: less with every trial, and with forgetting never by too little."""
        self.told = self.told * memory + tells
        self.log_odds += error / (prior + self.told)


_Corrections = defaultdict[_Origin, _Correction]


class Acceptance:
    """The corrections, common and per request."""

    def __init__(self) -> None:
        self._common: _Corrections = defaultdict(_Correction)
        self._requests: dict[int, _Corrections] = {}

    def survivals(self, sequence_id: int, draft: Draft) -> list[float]:
        """For every node the probability that it is reached and accepted; never above its parent's."""
        survivals: list[float] = []
        for node, parent in enumerate(draft.parents):
            probability = self._probability(sequence_id, draft, node)
            survivals.append(probability * survivals[parent] if parent >= 0 else probability)
        return survivals

    def observe(self, sequence_id: int, draft: Draft, tokens: Sequence[int]) -> None:
        """Score a draft, verified or not, by the tokens that were committed."""
        if sequence_id not in self._requests:
            self._requests[sequence_id] = defaultdict(_Correction)
        own = self._requests[sequence_id]
        for node, is_right in _trials(draft, tokens):
            probability = self._probability(sequence_id, draft, node)
            error, tells, origin = is_right - probability, probability * (1 - probability), _origin(draft, node)
            self._common[origin].learn(error, tells, _PRIOR, _MEMORY)
            own[origin].learn(error, tells, _OWN_PRIOR, _OWN_MEMORY)

    def release(self, sequence_ids: Iterable[int]) -> None:
        for sequence_id in sequence_ids:
            self._requests.pop(sequence_id, None)

    def _probability(self, sequence_id: int, draft: Draft, node: int) -> float:
        """That a node is accepted, if everything above it is."""
        parent, confidence, origin = draft.parents[node], draft.scores[node], _origin(draft, node)
        if parent >= 0:
            confidence /= draft.scores[parent]
        confidence = min(max(confidence, _LEAST), 1 - _LEAST)
        log_odds = log(confidence / (1 - confidence)) + self._common[origin].log_odds
        if sequence_id in self._requests:
            log_odds += self._requests[sequence_id][origin].log_odds
        return 1 / (1 + exp(-log_odds))


def _origin(draft: Draft, node: int) -> _Origin:
    return draft.origin[node], draft.parents[node] < 0


def _trials(draft: Draft, tokens: Sequence[int]) -> Iterator[tuple[int, bool]]:
    """The nodes that were tested: children of committed tokens, and whether they were committed next."""
    node = -1
    for token in tokens:
        right = None
        for child in draft.children(node):
            yield child, draft.tokens[child] == token
            if draft.tokens[child] == token:
                right = child
        if right is None:
            return
        node = right
