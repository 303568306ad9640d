"""The probability that a draft token is accepted: the proposer's confidence, corrected by its record.

A proposer's confidence in a token, given that everything above it is accepted, falls into one of many classes by its
odds, so that 0.97 and 0.99 differ as 0.4 and 0.7 do. Each class has a record over all requests. Each request corrects
that record by its own results, so a new request starts with what other requests have taught.
"""

from __future__ import annotations

from bisect import bisect
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from foredraft.types import Draft

_PRIOR = 30.0  # trials that the proposer's own confidence counts for
_MOST = 400.0  # trials that are remembered of a class
_OWN_TRIALS = 16.0  # trials that the common record counts for in a request's own correction
_OWN_MEMORY = 0.95  # the share of a request's record that is kept after one more trial: about twenty trials count
# Confidences that part the classes, two of which are a doubling of the odds: from about 1 in 17 to 127 in 128.
_BORDERS = [1 / (1 + 2 ** -((place + 0.5) / 2)) for place in range(-8, 14)]

_Origin = tuple[str, bool]  # a proposer, and whether the token is the first of a draft: later ones are accepted more
_Class = tuple[_Origin, int]  # and the class of its confidence


@dataclass
class _Record:
    right: float = 0.0
    trials: float = 0.0


@dataclass
class _Own:
    """A request's trials, its accepted tokens, and those that the common record led to expect."""

    trials: float = 0.0
    right: float = 0.0
    expected: float = 0.0

    def corrected(self, probability: float) -> float:
        """Better results than expected shrink the probability of a failure, worse ones that of a success."""
        if self.right < self.expected:
            return probability * (self.right + _OWN_TRIALS) / (self.expected + _OWN_TRIALS)
        wrong, expected_wrong = self.trials - self.right, self.trials - self.expected
        return 1 - (1 - probability) * (wrong + _OWN_TRIALS) / (expected_wrong + _OWN_TRIALS)


class Acceptance:
    """The records, common and per request."""

    def __init__(self) -> None:
        self._common: dict[_Class, _Record] = {}
        self._requests: dict[int, dict[_Origin, _Own]] = {}

    def survivals(self, sequence_id: int, draft: Draft) -> list[float]:
        """For every node the probability that it is reached and accepted; never above its parent's."""
        own, survivals = self._requests.get(sequence_id, {}), list[float]()
        for node, parent in enumerate(draft.parents):
            kind, confidence = _class_of(draft, node)
            probability = self._common_rate(kind, confidence)
            if kind[0] in own:
                probability = own[kind[0]].corrected(probability)
            survivals.append(probability * survivals[parent] if parent >= 0 else probability)
        return survivals

    def observe(self, sequence_id: int, draft: Draft, tokens: Sequence[int]) -> None:
        """Score a draft, verified or not, by the tokens that were committed."""
        requests = self._requests.setdefault(sequence_id, {})
        for node, is_right in _trials(draft, tokens):
            kind, confidence = _class_of(draft, node)
            own = requests.get(kind[0])
            if own is None:
                own = requests[kind[0]] = _Own()
            own.trials = own.trials * _OWN_MEMORY + 1
            own.right = own.right * _OWN_MEMORY + is_right
            own.expected = own.expected * _OWN_MEMORY + self._common_rate(kind, confidence)
            record = self._common.get(kind)
            if record is None:
                record = self._common[kind] = _Record()
            if record.trials >= _MOST:
                record.right, record.trials = record.right / 2, record.trials / 2
            record.right += is_right
            record.trials += 1

    def release(self, sequence_ids: Iterable[int]) -> None:
        for sequence_id in sequence_ids:
            self._requests.pop(sequence_id, None)

    def _common_rate(self, kind: _Class, confidence: float) -> float:
        record = self._common.get(kind)
        if record is None:
            return confidence
        return (record.right + _PRIOR * confidence) / (record.trials + _PRIOR)


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


def _class_of(draft: Draft, node: int) -> tuple[_Class, float]:
    """The class of a node, and the confidence in it."""
    parent, confidence = draft.parents[node], draft.scores[node]
    if parent >= 0:
        confidence = min(1.0, confidence / draft.scores[parent])
    return ((draft.origin[node], parent < 0), bisect(_BORDERS, confidence)), confidence
