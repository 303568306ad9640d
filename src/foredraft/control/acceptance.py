"""How likely a guess is right: what proposers believe of it, corrected by how often they were right before.

A proposer's belief in a guess, given that everything above it is right, falls into one of a few classes; each class has
the record of all requests, and each request bends the record by how it fares itself. A request of which nothing is
known yet therefore begins with what others have taught.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from foredraft.types import Draft

_CLASSES = 16
_PRIOR = 30.0  # trials that the proposer's own belief counts for
_MOST = 400.0  # trials that are remembered of a class
_OWN_PRIOR = 16.0  # trials that a request's likeness to others counts for
_OWN_MEMORY = 0.95  # how much of a request's record outlives one more trial: about twenty trials count
SUREST = 0.92  # no guess is taken to be surer: those that look surest are partly lucky
_HOPE = 1.5  # of two further trials so many are taken to be right

_Origin = tuple[str, bool]  # a proposer, and whether its guess is the first of a draft: later ones are oftener right
_Class = tuple[_Origin, int]  # and how much it believes in the guess


@dataclass
class _Record:
    right: float = 0.0
    trials: float = 0.0


@dataclass
class _Own:
    """A request's hits beside those that the common record led to expect."""

    right: float = 0.0
    expected: float = 0.0


class Acceptance:
    """The records, common and per request."""

    def __init__(self) -> None:
        self._common: dict[_Class, _Record] = {}
        self._by_proposer: dict[str, _Record] = {}
        self._requests: dict[int, dict[_Origin, _Own]] = {}

    def survivals(self, sequence_id: int, draft: Draft, least: float = 0.0) -> list[float]:
        """For every node the probability that it is reached and right; never above its parent's. 0 for what hangs on
        a node that is less likely than `least`: nobody wants to know."""
        survivals: list[float] = []
        for node, parent in enumerate(draft.parents):
            above = survivals[parent] if parent >= 0 else 1.0
            survivals.append(above * self._probability(sequence_id, draft, node) if above >= least else 0.0)
        return survivals

    def rate(self, sequence_id: int, proposer: str) -> float | None:
        """How often a proposer's guesses are right for this request, whatever it believes; None before any trial."""
        record = self._by_proposer.get(proposer)
        if record is None or not record.trials:
            return None
        hoped = (record.right + _HOPE) / (record.trials + 2)  # one bad guess is no verdict
        return min(SUREST, self._bend(sequence_id, (proposer, True)) * hoped)

    def observe(self, sequence_id: int, draft: Draft, tokens: Sequence[int]) -> None:
        """Score a draft, verified or not, by the tokens that came."""
        for node, is_right in _trials(draft, tokens):
            kind = _class_of(draft, node)
            confidence_given = self._common_rate(kind, _confidence(draft, node))
            own = self._requests.setdefault(sequence_id, {}).setdefault(kind[0], _Own())
            own.right = own.right * _OWN_MEMORY + is_right
            own.expected = own.expected * _OWN_MEMORY + confidence_given
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
        """How much oftener a request's guesses are right than others'."""
        own = self._requests.get(sequence_id, {}).get(origin)
        return 1.0 if own is None else (own.right + _OWN_PRIOR) / (own.expected + _OWN_PRIOR)


def _trials(draft: Draft, tokens: Sequence[int]) -> Iterator[tuple[int, bool]]:
    """The nodes that were put to the test: children of what came, and whether they came next."""
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
