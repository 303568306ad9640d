"""The probability that a draft token is accepted: the proposer's confidence, corrected by its record.

A proposer's confidence in a token, given that everything above it is accepted, falls into one of a few classes. Each
class has a record over all requests. Each request corrects that record by its own results, so a new request starts
with what other requests have taught.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from foredraft.types import Draft

_CLASSES = 16
_PRIOR = 30.0  # trials that the proposer's own confidence counts for
_MOST = 400.0  # trials that are remembered of a class
_OWN_PRIOR = 16.0  # trials that the common record counts for in a request's own correction
_OWN_MEMORY = 0.95  # the share of a request's record that is kept after one more trial: about twenty trials count
SUREST = 0.92  # the highest probability of a draft token: those that look surest are partly lucky
_PRIOR_RIGHT = 1.5  # a new proposer starts with two trials, of which so many were accepted

_Origin = tuple[
    str, bool
]  # a proposer, and whether the token is the first of a draft: later ones are accepted more often
_Class = tuple[_Origin, int]  # and the class of its confidence


@dataclass
class _Record:
    right: float = 0.0
    trials: float = 0.0


@dataclass
class _Own:
    """A request's accepted tokens, and those that the common record led to expect."""

    right: float = 0.0
    expected: float = 0.0


class Acceptance:
    """The records, common and per request."""

    def __init__(self) -> None:
        self._common: dict[_Class, _Record] = {}
        self._by_proposer: dict[str, _Record] = {}
        self._requests: dict[int, dict[_Origin, _Own]] = {}

    def survivals(self, sequence_id: int, draft: Draft, least: float = 0.0) -> list[float]:
        """For every node the probability that it is reached and accepted; never above its parent's. Nodes below a
        node whose probability is under `least` get 0, because nobody uses them."""
        survivals: list[float] = []
        for node, parent in enumerate(draft.parents):
            above = survivals[parent] if parent >= 0 else 1.0
            survivals.append(above * self._probability(sequence_id, draft, node) if above >= least else 0.0)
        return survivals

    def rate(self, sequence_id: int, proposer: str) -> float | None:
        """The acceptance rate of a proposer for this request, at any confidence; None before any trial."""
        record = self._by_proposer.get(proposer)
        if record is None or not record.trials:
            return None
        expected = (record.right + _PRIOR_RIGHT) / (record.trials + 2)  # one rejected token is no verdict
        return min(SUREST, self._bend(sequence_id, (proposer, True)) * expected)

    def observe(self, sequence_id: int, draft: Draft, tokens: Sequence[int]) -> None:
        """Score a draft, verified or not, by the tokens that were committed."""
        for node, is_right in _trials(draft, tokens):
            kind = _class_of(draft, node)
            expected = self._common_rate(kind, _confidence(draft, node))
            own = self._requests.setdefault(sequence_id, {}).setdefault(kind[0], _Own())
            own.right = own.right * _OWN_MEMORY + is_right
            own.expected = own.expected * _OWN_MEMORY + expected
            for record in (
                self._common.setdefault(kind, _Record()),
                self._by_proposer.setdefault(draft.origin[node], _Record()),
            ):
                if record.trials >= _MOST:
                    record.right, record.trials = record.right / 2, record.trials / 2
                record.right += is_right
                record.trials += 1

    def release(self, sequence_ids: Iterable[int]) -> None:
        for sequence_id in sequence_ids:
            self._requests.pop(sequence_id, None)

    def _probability(self, sequence_id: int, draft: Draft, node: int) -> float:
        kind = _class_of(draft, node)
        return min(SUREST, self._common_rate(kind, _confidence(draft, node)) * self._bend(sequence_id, kind[0]))

    def _common_rate(self, kind: _Class, confidence: float) -> float:
        record = self._common.get(kind)
        if record is None:
            return confidence
        return (record.right + _PRIOR * confidence) / (record.trials + _PRIOR)

    def _bend(self, sequence_id: int, origin: _Origin) -> float:
        """The acceptance of a request in units of the common one."""
        own = self._requests.get(sequence_id, {}).get(origin)
        return 1.0 if own is None else (own.right + _OWN_PRIOR) / (own.expected + _OWN_PRIOR)


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


def _confidence(draft: Draft, node: int) -> float:
    parent = draft.parents[node]
    return min(1.0, draft.scores[node] / (draft.scores[parent] if parent >= 0 else 1.0))


def _class_of(draft: Draft, node: int) -> _Class:
    origin = (draft.origin[node], draft.parents[node] < 0)
    return origin, min(_CLASSES - 1, int(_confidence(draft, node) * _CLASSES))
