"""What is known of proposers: what their drafts gain, what calls cost, and how much they may still lose."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence as Items
from itertools import accumulate
from math import inf
from operator import mul
from typing import Protocol

from foredraft.control.costs import ENOUGH, RECENT
from foredraft.control.nodes import LEAST, MEMORY, Odds, best_count
from foredraft.types import Draft, Sequence

# What a proposer may lose of all time, and again for calls that were delayed. More finds a proposer that has become
# good sooner. At worst each of two proposers loses both shares: 2 %.
SHARE = 0.005
# Of its share of the time, what pays for queries that are not expected to pay: the rest is left for the rows of what
# they find. At worst it comes back half as soon.
_PROBES = SHARE / 2
# What it may lose beside that at the start: so many plain steps, and so many seconds where steps are short, for a few
# drafts are needed to tell what it is worth. At worst all of it is lost, once for each proposer and kind of sampling.
_ALLOWANCE = 4.0
_ALLOWANCE_S = 0.01
# Drafts for which all other requests count in what one expects, and for which one counts in what they expect. Fewer
# forget that requests are alike; more that they differ. At worst a useless proposer is queried as often in a request.
_OTHERS = 4
# Drafts that an acceptance counts for that was measured with the head. Fewer let some hard drafts at the start overrule
# thousands; at worst so many more are lost on a head that was measured on another kind of text.
_MEASURED = 8
# The acceptance of a proposer that brings none. Lower ones might never be tried where rows are dear.
UNKNOWN = 0.75
_NODES = 64  # of a promised draft
_MOST_DRAFTS = round(1 / (1 - MEMORY))  # that count in what is expected of a proposer in any request


class Candidate(Protocol):
    """A proposer, as far as the controller knows it."""

    name: str  # as in the origin of its draft tokens
    acceptance: tuple[float, ...]
    free: bool

    def num_missing(self, sequence: Sequence) -> int:
        """How many tokens of a sequence it has to catch up with."""


def allowance_s(step_s: float) -> float:
    """What a proposer may lose at the start, where a plain step takes so long."""
    return max(_ALLOWANCE * step_s, _ALLOWANCE_S)


class Record:
    """What is known of one proposer where requests sample in one way."""

    def __init__(self, candidate: Candidate, allowance_s: float) -> None:
        self.odds = Odds()
        self.credit_s = allowance_s
        self.delays_s = 0.0  # of the second share, what is left for delays
        self.caught_up_s = 0.0  # what catching up took in all: an investment, which the credit must exceed
        self.catch_up = 0.0  # what catching up takes, in runs of the target for as many tokens
        self.time_s = 0.0  # of all steps with requests of this kind
        self.probed_s = 0.0  # when it was last queried without paying, on that clock
        # By number of sequences in a call, about: what the last calls took for each of them, and the mean of that.
        self.calls: dict[int, deque[float]] = {}
        self.costs_s: dict[int, float] = {}
        self.num_calls = 0
        self.level_s = inf  # of one level of a draft for a sequence: the least that any call has shown
        rates = [max(LEAST, rate) for rate in candidate.acceptance or (UNKNOWN,)]
        # By node of a chain, the probability that it is accepted.
        self.promised = list(accumulate([*rates, *rates[-1:] * (_NODES - len(rates))], mul))
        self.num_promised = _MEASURED if candidate.acceptance else 1
        # By number of sequences, about: drafts so far, and what one has gained in tokens, on average. Rows cost more
        # where more sequences share a run.
        self.gains: dict[int, tuple[int, float]] = {}
        self.live: set[Request] = set()
        self._expected: tuple[int, list[float]] | None = None

    def gain(self, sequences: int, extra: Items[float]) -> float:
        """What a draft gains in tokens, where so many sequences share a run."""
        place = sequences.bit_length()
        if place not in self.gains:
            self.gains[place] = self.num_promised, best_count(self.promised, extra)[1]
        return self.gains[place][1]

    def learn_gain(self, sequences: int, gain: float, weight: int = 1) -> None:
        """That of a draft, or of several on average."""
        count, mean = self.gains[sequences.bit_length()]
        count = min(count + weight, _MOST_DRAFTS)
        self.gains[sequences.bit_length()] = count, mean + (gain - mean) * weight / count
        self.changed()

    def expected(self, sequences: int) -> list[float]:
        """What drafts of the live requests gain in tokens where so many sequences share a run, the highest first. It
        only changes when something is learnt, or requests come and go."""
        place = sequences.bit_length()
        if self._expected is None or self._expected[0] != place:
            common = self.gains[place][1] if place in self.gains else inf
            self._expected = place, sorted([request.gain(common) for request in self.live], reverse=True)
        return self._expected[1]

    @property
    def num_missing(self) -> int:
        """How many tokens must be caught up with before any live request gets a draft, where that has not begun."""
        return min([0 if request.spent_s else request.missing for request in self.live], default=0)

    def changed(self) -> None:
        """What live requests expect has changed."""
        self._expected = None

    def is_due(self, loss_s: float, since_s: float | None = None) -> bool:
        """Whether the share has paid, since the last probe or since then, for a query that is to lose so much."""
        passed_s = self.time_s - (self.probed_s if since_s is None else since_s)
        return passed_s * _PROBES >= loss_s or self.num_calls < ENOUGH

    def pass_time(self, seconds: float) -> None:
        self.time_s += seconds
        self.credit_s += SHARE * seconds
        self.delays_s += SHARE * seconds

    def cost_s(self, sequences: int) -> float:
        """What a call for so many sequences takes for each. What was never tried is taken to cost the least that is
        known: so it is tried."""
        known = self.costs_s.get(sequences.bit_length())
        return min(self.costs_s.values(), default=0.0) if known is None else known

    def book_call(self, seconds: float, count: int, sequences: int, is_timed: bool) -> None:
        """A call for so many sequences, `count` of them of this kind, took so long for each of them. Of a call that
        takes longer than all of the last ones, the rest is a delay, as long as the second share pays for it."""
        place = sequences.bit_length()
        calls = self.calls.setdefault(place, deque(maxlen=RECENT))
        delay_s = count * (seconds - max(calls)) if calls else 0.0
        self.credit_s -= count * seconds
        if 0 < delay_s <= self.delays_s:
            self.delays_s -= delay_s
            self.credit_s += delay_s
        if is_timed:
            self.num_calls += 1
            calls.append(seconds)
            ordered = sorted(calls)
            # A mean, for drafts may end early; of the longest call no more counts than of the next.
            self.costs_s[place] = (sum(ordered[:-1]) + ordered[-2]) / len(ordered) if len(ordered) > 1 else seconds


class Request:
    """What is known of one proposer in one request."""

    __slots__ = ("drafts", "gains", "missing", "odds", "queried_s", "queries", "record", "sequences", "spent_s")

    def __init__(self, record: Record) -> None:
        self.record = record
        self.odds = Odds(record.odds.factor)
        self.queried_s = 0.0  # when it was last queried, on the record's clock
        self.queries = self.sequences = 0  # of its drafts, and how many shared a run with the last
        self.drafts = self.gains = 0.0  # recent ones, and what they gained in tokens
        self.missing = 0  # tokens to catch up with, when it was last decided about
        self.spent_s = 0.0  # on catching up
        record.live.add(self)
        record.changed()

    def gain(self, common: float) -> float:
        """What a draft is expected to gain in tokens, where it gains so much in any request."""
        return (_OTHERS * common + self.gains) / (_OTHERS + self.drafts)

    def learn_gain(self, sequences: int, gain: float) -> None:
        self.queries, self.sequences = self.queries + 1, sequences
        self.drafts = MEMORY * self.drafts + 1
        self.gains = MEMORY * self.gains + gain
        self.record.changed()
        if self.queries <= _OTHERS:
            self.record.learn_gain(sequences, gain)

    def learn_odds(self, draft: Draft, survivals: Items[float], tokens: Items[int]) -> None:
        """Score a draft by the tokens that were committed; the first ones count for other requests too."""
        self.odds.learn(draft, survivals, tokens)
        if self.queries <= _OTHERS:
            odds = self.record.odds
            odds.learn(draft, odds.survivals(draft), tokens)

    def end(self) -> None:
        """What its last drafts gained is kept, as that of a few."""
        self.record.live.remove(self)
        self.record.changed()
        if self.queries > _OTHERS:
            self.record.learn_gain(self.sequences, self.gains / self.drafts, _OTHERS)
