"""What a query of a proposer is worth: its last drafts, weighed by what they would gain under the present load."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from collections.abc import Sequence as Items
from itertools import accumulate, pairwise
from operator import mul
from typing import NamedTuple

from foredraft.budget import Budget
from foredraft.control.costs import Costs
from foredraft.types import Work

_RECENT = 32  # drafts by which a proposer is judged, empty ones too
_OF_ONE = 4  # of those, at most so many are of one request
_OWN_PRIOR = 8.0  # drafts that those of all requests count for in a request's own mean
_OWN_MEMORY = 0.95  # the share of a request's own drafts that is kept after one more: about twenty count
_MEASURED = 8  # drafts that a measured acceptance counts for, until as many as are judged by are made
_NEXT_TO_NOTHING = 0.1  # of a plain step: a query that takes no more is always tried where it could pay
UNKNOWN = 0.75  # the acceptance of a proposer that brings no measured one
_NO_REQUEST = -1
_LEAST = 0.01  # the least acceptance that a proposer may promise
_NODE_COUNTS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)  # budgets of proposers that take time


class Load(NamedTuple):
    """What a step runs in any case, with or without drafts."""

    rows: int
    keys: int  # that those rows read
    sequences: int  # that get a token

    @classmethod
    def of(cls, works: Items[Work]) -> Load:
        rows = keys = sequences = 0
        # As the properties of `Work` compute it, in half the time: this runs in every step.
        for sequence, num_new_tokens, _, draft, num_computed_nodes in works:
            own = num_new_tokens + len(draft.tokens) - num_computed_nodes
            reach = sequence.num_computed_tokens + num_new_tokens
            rows += own
            keys += own * reach
            sequences += reach == len(sequence.token_ids)
        return cls(rows, keys, sequences)


class Candidate(NamedTuple):
    """A proposer, as far as the controller knows it."""

    name: str  # as in the origin of its draft tokens
    is_free: bool  # whether it takes next to no time
    most: int  # the most nodes that it drafts
    acceptance: tuple[float, ...] = ()  # measured by depth, before any request


class Offer(NamedTuple):
    """A budget for a proposer and what it is expected to bring, per sequence."""

    nodes: Budget
    gain_s: float  # that its tokens save, less what the rows cost that are worth verifying
    cost_s: float  # of the query, deciding on it included


class Worth:
    """The last drafts of one proposer: of each, the probabilities of its nodes to be accepted, best first.

    One draft as good as the proposer promises is among them until there are enough others. Where a query takes next to
    nothing it stays, so that such proposers are always tried where they could pay at all.
    """

    def __init__(self, candidate: Candidate) -> None:
        rates = tuple(max(_LEAST, rate) for rate in candidate.acceptance) or (UNKNOWN,)
        rates = (*rates, *rates[-1:] * (_NODE_COUNTS[-1] - len(rates)))
        self._promised: list[float] = list(accumulate(rates, mul))
        measured = [self._promised] * (_MEASURED if candidate.acceptance else 0)
        self._recent = [(_NO_REQUEST, survivals) for survivals in measured]  # by request, oldest first
        self._own: dict[int, tuple[float, float]] = {}  # by sequence: drafts, and what they were to gain, in tokens
        # As it was when offers were last made: seconds of a token and of rows, and the mean gain of a draft in tokens.
        self._token_s, self._rows_s, self._mean = 1.0, [0.0], 0.0
        self._offers: dict[tuple[int, int, int], list[Offer]] = {}  # by most nodes, sequences and rows, about

    def observe(self, sequence_id: int, survivals: Items[float], budget: int, most: int) -> None:
        """The proposer was queried, and drafted these nodes or none. Where it used its whole budget, more nodes, up to
        the most, are taken to follow as promised: otherwise a small budget would never be raised again."""
        nodes = sorted(survivals, reverse=True)
        if budget <= len(nodes) < most:
            last, *further = self._promised[len(nodes) - 1 : most]
            nodes += [nodes[-1] * promised / last for promised in further]
        of_request = [place for place, (request, _) in enumerate(self._recent) if request == sequence_id]
        if len(of_request) >= _OF_ONE or len(self._recent) >= _RECENT:
            self._recent.pop(of_request[0] if len(of_request) >= _OF_ONE else 0)
        self._recent.append((sequence_id, nodes))
        drafts, gain = self._own.get(sequence_id, (0.0, 0.0))
        more = _gains(nodes, self._token_s, self._rows_s)[-1] / self._token_s
        self._own[sequence_id] = _OWN_MEMORY * drafts + 1, _OWN_MEMORY * gain + more

    def release(self, sequence_ids: Iterable[int]) -> None:
        for sequence_id in sequence_ids:
            self._own.pop(sequence_id, None)

    def refresh(self) -> None:
        """Weigh anew with the next query: costs and drafts have changed."""
        self._offers.clear()

    def best(self, offers: Items[Offer], sequence_id: int) -> Offer:
        """The best of these offers for a request, with what it is to gain there: as much more or less than elsewhere as
        its own drafts were to gain."""
        drafts, gain = self._own.get(sequence_id, (0.0, 0.0))
        share = (_OWN_PRIOR + gain / self._mean) / (_OWN_PRIOR + drafts) if self._mean else 1.0
        best = max(offers, key=lambda offer: share * offer.gain_s - offer.cost_s)
        return best._replace(gain_s=share * best.gain_s)

    def offers(
        self, candidate: Candidate, load: Load, costs: Costs, token_takes: Callable[[Load], float]
    ) -> list[Offer]:
        """Budgets, if all sequences get the same. `token_takes` tells what a token takes at present."""
        key = candidate.most, load.sequences, load.rows.bit_length()
        if key in self._offers:
            return self._offers[key]
        sequences, reach, token_s = max(1, load.sequences), load.keys // max(1, load.rows), token_takes(load)
        plain = costs.run(load.rows, load.keys)
        rows_s = [0.0]  # extra seconds per sequence of so many nodes for each
        for nodes in range(sequences, sequences * candidate.most + 1, sequences):
            rows_s.append((costs.run(load.rows + nodes, load.keys + nodes * reach) - plain) / sequences)
        deciding_s = costs.deciding(candidate.name)
        most_s = (costs.draft(candidate.name, candidate.most, sequences) or 0.0) / sequences + deciding_s
        drafts = [survivals for _, survivals in self._recent]
        if len(drafts) < _RECENT or most_s <= _NEXT_TO_NOTHING * costs.run(1, reach):
            drafts.append(self._promised)
        of_drafts = [_gains(draft, token_s, rows_s) for draft in drafts]
        gains = [sum(of_budget) / len(drafts) for of_budget in zip(*of_drafts, strict=True)]
        self._token_s, self._rows_s, self._mean = token_s, rows_s, gains[-1] / token_s
        # To go on from a node takes another run of the drafter, and the row of a child, at its cheapest.
        row_s = max(0.0, min(more - less for less, more in pairwise(rows_s)))
        run_s = costs.level(candidate.name, sequences) / sequences
        child_s = token_s * self._promised[1] / self._promised[0]  # that a child saves, if its parent is accepted
        offers: list[Offer] = []
        for nodes in [candidate.most] if candidate.is_free else _NODE_COUNTS:
            if nodes <= candidate.most:
                draft_s = (costs.draft(candidate.name, nodes, sequences) or 0.0) / sequences
                budget = Budget(nodes, row_s / child_s, run_s / child_s)
                offers.append(Offer(budget, gains[nodes], draft_s + deciding_s))
        self._offers[key] = offers
        return offers


def _gains(survivals: Items[float], token_s: float, rows_s: Items[float]) -> list[float]:
    """What the best cut of a draft gains, by the most nodes that it may have."""
    gains, expected = [0.0], 0.0
    for survival, cost_s in zip(survivals, rows_s[1:], strict=False):
        expected += survival
        gains.append(max(gains[-1], expected * token_s - cost_s))
    return gains + gains[-1:] * (len(rows_s) - len(gains))
