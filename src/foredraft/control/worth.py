"""What a query of a proposer is worth: its last drafts, weighed by what they would gain under the present load."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from collections.abc import Sequence as Items
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from foredraft.budget import Budget
from foredraft.control.costs import Costs
from foredraft.types import Work

_RECENT = 32  # drafts by which a proposer is judged, empty ones too
_OF_ONE = 4  # of those, at most so many are of one request
_OWN_PRIOR = 3.0  # drafts that those of all requests count for in a request's own mean
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
        self._promised = np.cumprod((*rates, *rates[-1:] * (_NODE_COUNTS[-1] - len(rates))))
        measured = [self._promised] * (_MEASURED if candidate.acceptance else 0)
        self._recent = [(_NO_REQUEST, survivals) for survivals in measured]  # by request, oldest first
        self._own: dict[int, tuple[float, float]] = {}  # by sequence: drafts, and what they were to gain, in tokens
        # As it was when offers were last made: seconds of a token and of rows, and the mean gain of a draft in tokens.
        self._token_s, self._rows_s, self._mean = 1.0, np.zeros(1), 0.0
        self._offers: dict[tuple[int, int, int], list[Offer]] = {}  # by most nodes, sequences and rows, about
        self._last: tuple[Candidate, Load] | None = None  # for whom offers were last made

    def observe(self, sequence_id: int, survivals: Items[float], budget: int, most: int) -> None:
        """The proposer was queried, and drafted these nodes or none. Where it used its whole budget, more nodes, up to
        the most, are taken to follow as promised: otherwise a small budget would never be raised again."""
        nodes = np.zeros(len(self._promised))
        size = min(len(survivals), len(nodes))
        nodes[:size] = sorted(survivals, reverse=True)[:size]
        if budget <= size < most:
            nodes[size:most] = self._promised[size:most] * (nodes[size - 1] / self._promised[size - 1])
        of_request = [place for place, (request, _) in enumerate(self._recent) if request == sequence_id]
        if len(of_request) >= _OF_ONE or len(self._recent) >= _RECENT:
            self._recent.pop(of_request[0] if len(of_request) >= _OF_ONE else 0)
        self._recent.append((sequence_id, nodes))
        drafts, gain = self._own.get(sequence_id, (0.0, 0.0))
        more = float(_gains(nodes, self._token_s, self._rows_s)[-1]) / self._token_s
        self._own[sequence_id] = _OWN_MEMORY * drafts + 1, _OWN_MEMORY * gain + more

    def release(self, sequence_ids: Iterable[int]) -> None:
        for sequence_id in sequence_ids:
            self._own.pop(sequence_id, None)

    def refresh(self, costs: Costs, token_takes: Callable[[Load], float]) -> None:
        """Weigh anew: costs and drafts have changed. The last offers are made again at once, because the next query
        needs them, and would wait for it."""
        self._offers.clear()
        if self._last is not None:
            self.offers(*self._last, costs, token_takes)

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
        self._last, most = (candidate, load), min(candidate.most, len(self._promised))
        sequences, reach, token_s = max(1, load.sequences), load.keys // max(1, load.rows), token_takes(load)
        counts = range(0, sequences * most + 1, sequences)
        of_runs = np.array([costs.run(load.rows + count, load.keys + count * reach) for count in counts])
        rows_s = (of_runs - of_runs[0]) / sequences  # extra seconds per sequence of so many nodes for each
        deciding_s = costs.deciding(candidate.name)
        most_s = (costs.draft(candidate.name, candidate.most, sequences) or 0.0) / sequences + deciding_s
        drafts = [survivals for _, survivals in self._recent]
        if len(drafts) < _RECENT or most_s <= _NEXT_TO_NOTHING * costs.run(1, reach):
            drafts.append(self._promised)
        gains: list[float] = _gains(np.array(drafts), token_s, rows_s).mean(0).tolist()
        self._token_s, self._rows_s, self._mean = token_s, rows_s, gains[-1] / token_s
        # To go on from a node takes another run of the drafter, and the row of a child, at its cheapest.
        row_s = max(0.0, float(np.diff(rows_s).min()))
        run_s = costs.level(candidate.name, sequences) / sequences
        child_s = token_s * float(self._promised[1] / self._promised[0])  # that one saves, if its parent is accepted
        offers: list[Offer] = []
        for nodes in [most] if candidate.is_free else _NODE_COUNTS:
            if nodes <= most:
                draft_s = (costs.draft(candidate.name, nodes, sequences) or 0.0) / sequences
                budget = Budget(nodes, row_s / child_s, run_s / child_s)
                offers.append(Offer(budget, gains[nodes], draft_s + deciding_s))
        self._offers[key] = offers
        return offers


def _gains(survivals: NDArray[np.float64], token_s: float, rows_s: NDArray[np.float64]) -> NDArray[np.float64]:
    """What the best cut of a draft gains, by the most nodes that it may have: [..., nodes] for survivals [..., nodes],
    and a first one for no node."""
    saved_s = survivals[..., : len(rows_s) - 1].cumsum(-1) * token_s
    gains = np.zeros((*saved_s.shape[:-1], len(rows_s)))
    np.subtract(saved_s, rows_s[1:], out=gains[..., 1:])
    return np.maximum.accumulate(gains, axis=-1)
