"""When to draft, and how much. One rule decides about every query of a proposer and every row of a draft: the time that
its accepted tokens are expected to save must exceed the time that it takes.

A row is judged by the draft at hand, a query by what earlier drafts have gained: in this request, and in others of its
kind. A credit per proposer bounds the loss if expectations are wrong: it starts small, grows by a small share of the
time and by what the proposer's tokens save, and falls by what its queries and rows cost. Only what is in the credit can
be risked. Where queries do not pay, one is made when the share has paid for what it is expected to lose.

docs/control.md has a worked step. Plain Python: the engine measures all times and passes them in.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable
from collections.abc import Sequence as Items
from copy import deepcopy
from itertools import accumulate
from math import inf
from operator import mul
from typing import NamedTuple, Protocol

from foredraft.control.costs import Costs, Load, median
from foredraft.control.nodes import Odds, best_count
from foredraft.control.reasons import DRAFTED, LEDGER, MEASURING, NOTHING_PROPOSED, PROBE, RESTING, TOO_UNSURE
from foredraft.types import NO_DRAFT, Commit, Draft, Sequence, Work

# What a proposer may lose of all time, and again for calls that were delayed. More finds a proposer that has become
# good sooner. At worst each of two proposers loses both shares: 2 %.
_SHARE = 0.005
# Of that, what pays for queries that are not expected to pay: the rest is left for the rows of what they find.
_PROBES = _SHARE / 2
# What it may lose beside that at the start: so many plain steps, and so many seconds where steps are short, for a few
# drafts are needed to tell what it is worth. At worst all of it is lost, once for each proposer and kind of sampling.
_ALLOWANCE = 4.0
_ALLOWANCE_S = 0.01
# Drafts of others that count as much as one's own in what a request expects. Fewer forget that requests are alike;
# more that they differ. At worst a proposer that is of no use to a request is queried about as often in it.
_OWN_PRIOR = 4.0
# The share of a request's own drafts that is kept after one more: about twenty count. At worst a passage in which
# nothing is gained hides as many drafts of the next one.
_OWN_MEMORY = 0.95
# Drafts that count in what is expected of a proposer in any request, and how many of those one request may give: a long
# answer says little about the next. More of either take a change in later.
_DRAFTS, _OF_ONE = 64, 4
# Drafts that an acceptance counts for that was measured with the head. Fewer let some hard drafts at the start overrule
# thousands; at worst so many more are lost on a head that was measured on another kind of text.
_MEASURED = 8
# The acceptance of a proposer that brings none. Lower ones might never be tried where rows are dear.
UNKNOWN = 0.75
# Calls and runs whose times make an estimate. One late call may have another cause.
_CALLS = 8
_LATE_RUNS = 5

_FEW_CALLS = 4  # are made before a proposer is judged by its time: the first ones are slow
_HOT = 0.75  # a temperature: requests above it, up to it, and greedy ones are of three kinds
_NODES = 64  # of a promised draft


class Candidate(Protocol):
    """A proposer, as far as the controller knows it."""

    name: str  # as in the origin of its draft tokens
    num_lookahead_tokens: int
    acceptance: tuple[float, ...]
    free: bool

    def num_missing(self, sequence: Sequence) -> int:
        """How many tokens of a sequence it has to catch up with."""


class Offer(NamedTuple):
    """A draft, and the probability of each node to be accepted."""

    draft: Draft
    survivals: Items[float]


class Prices(NamedTuple):
    """What a step costs."""

    load: Load  # without drafts
    token_s: float  # of a token in plain steps
    extra: list[float]  # of no row more, of one, of two, and so on, in tokens
    each: list[float]  # the same for each sequence, if all get as many


class _Record:
    """What is known of one proposer where requests sample in one way."""

    def __init__(self, candidate: Candidate, allowance_s: float) -> None:
        self.odds = Odds()
        self.credit_s = allowance_s
        self.delays_s = 0.0  # of the second share, what is left for delays
        self.caught_up_s = 0.0  # what catching up took in all: an investment, which the credit must exceed
        self.catch_up = 0.0  # what catching up takes, in runs of the target for as many tokens
        self.time_s = 0.0  # of all steps with requests of this kind
        self.queried_s = 0.0  # when it was last queried, on that clock
        # By number of sequences in a call, about: what the last calls took for each of them, and the mean of that.
        self.calls: dict[int, deque[float]] = {}
        self.costs_s: dict[int, float] = {}
        self.num_calls = 0
        self.level_s = inf  # of one level of a draft for a sequence: the least that any call has shown
        rates = candidate.acceptance or (UNKNOWN,)
        # By node of a chain, the probability that it is accepted.
        self.promised = list(accumulate([*rates, *rates[-1:] * (_NODES - len(rates))], mul))
        self.num_promised = _MEASURED if candidate.acceptance else 1
        # By number of sequences, about: drafts so far, and what one has gained in tokens, on average. Rows cost more
        # where more sequences share a run.
        self.gains: dict[int, tuple[int, float]] = {}

    def gain(self, sequences: int, extra: Items[float]) -> float:
        """What a draft gains in tokens, where so many sequences share a run."""
        place = sequences.bit_length()
        if place not in self.gains:
            self.gains[place] = self.num_promised, best_count(self.promised, extra)[1]
        return self.gains[place][1]

    def learn_gain(self, sequences: int, gain: float, weight: int = 1) -> None:
        """That of a draft, or of several on average."""
        count, mean = self.gains[sequences.bit_length()]
        count = min(count + weight, _DRAFTS)
        self.gains[sequences.bit_length()] = count, mean + (gain - mean) * weight / count

    def pass_time(self, seconds: float) -> None:
        self.time_s += seconds
        self.credit_s += _SHARE * seconds
        self.delays_s += _SHARE * seconds

    def cost_s(self, sequences: int) -> float:
        """What a call for so many sequences takes for each. What was never tried is taken to cost the least that is
        known: so it is tried."""
        known = self.costs_s.get(sequences.bit_length())
        return min(self.costs_s.values(), default=0.0) if known is None else known

    def book_call(self, seconds: float, count: int, sequences: int, is_timed: bool) -> None:
        """A call for so many sequences, `count` of them of this kind, took so long for each of them. Of a call that
        takes longer than all of the last ones, the rest is a delay, as long as the second share pays for it."""
        place = sequences.bit_length()
        calls = self.calls.setdefault(place, deque(maxlen=_CALLS))
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


class _Request:
    """What is known of one proposer in one request."""

    __slots__ = ("drafts", "gains", "missing", "queries", "record", "sequences", "spent_s")

    def __init__(self, record: _Record) -> None:
        self.record = record
        self.queries = self.sequences = 0  # of its drafts, and how many shared a run with the last
        self.drafts = self.gains = 0.0  # recent ones, and what they gained in tokens
        self.missing = 0  # tokens to catch up with, when it was last decided about
        self.spent_s = 0.0  # on catching up

    def learn_gain(self, sequences: int, gain: float) -> None:
        self.queries, self.sequences = self.queries + 1, sequences
        self.drafts = _OWN_MEMORY * self.drafts + 1
        self.gains = _OWN_MEMORY * self.gains + gain
        if self.queries <= _OF_ONE:
            self.record.learn_gain(sequences, gain)


class Controller:
    """Decides for the sequences with `auto`."""

    def __init__(self, costs: Costs) -> None:
        self.costs = costs
        self._allowance_s = max(_ALLOWANCE * costs.run(1, 0), _ALLOWANCE_S)
        self._records: dict[tuple[str, int], _Record] = {}  # by proposer and kind of sampling
        self._requests: dict[str, dict[int, _Request]] = {}  # by proposer and sequence
        # The times of the last runs with drafts, in units of what was expected.
        self._lateness = deque([1.0] * (_LATE_RUNS // 2), maxlen=_LATE_RUNS)

    def copy(self) -> Controller:
        """A controller with the same state. Both share what is known of the machine."""
        return deepcopy(self, {id(self.costs): self.costs})

    def prices(self, load: Load, nodes: int) -> Prices:
        """What a step costs with such a load, and drafts of at most so many nodes for each sequence."""
        sequences = load.sequences or 1
        extra = self.costs.extra(load, nodes * sequences)
        each = extra if sequences == 1 else [cost / sequences for cost in extra[::sequences]]
        return Prices(load, self.costs.token(load), extra, each)

    def wants(
        self, candidate: Candidate, works: Items[Work], at_hand: Items[Offer | None], prices: Prices
    ) -> list[str]:
        """Whether to query a proposer for each work, and why: DRAFTED and PROBE mean that it is queried. `at_hand` are
        drafts of others that are there already."""
        load, token_s, _, each = prices
        if not self.costs.is_known(load.rows):
            return [MEASURING] * len(works)
        requests, row_s = self._requests.setdefault(candidate.name, {}), each[1] * token_s
        left: dict[_Record, float] = {}
        reasons: list[str] = []
        record: _Record | None = None
        for work, offer in zip(works, at_hand, strict=True):
            request = requests.get(work.sequence.id) or self._begun(candidate, work.sequence, requests)
            if request.record is not record:  # nearly always all are of one kind
                record = request.record
                common, cost_s = record.gain(load.sequences, each), record.cost_s(len(works))
            gain = (_OWN_PRIOR * common + request.gains) / (_OWN_PRIOR + request.drafts)
            if offer is not None:  # where one at hand has the next token, there is nothing to gain
                gain *= 1 - _chance(offer, each[1])
            surplus_s, left_s = gain * token_s - cost_s, left.get(record, record.credit_s)
            is_due = record.time_s >= record.queried_s - surplus_s / _PROBES or record.num_calls < _FEW_CALLS
            if surplus_s <= 0 and not is_due:
                reason = RESTING
            elif cost_s + row_s > left_s:  # a query also risks a row: without one it is of no use
                reason = LEDGER
            elif record in left and not record.num_calls:
                reason = RESTING  # one sequence is enough to time a proposer
            else:
                reason = self._decide(candidate, request, work.sequence, surplus_s)
            reasons.append(reason)
            if reason is DRAFTED or reason is PROBE:
                left[record] = left_s - cost_s
                record.queried_s = record.time_s
        return reasons

    def _decide(self, candidate: Candidate, request: _Request, sequence: Sequence, surplus_s: float) -> str:
        """Whether a query is made that is expected to gain so much beside catching up, or that is due without it."""
        record = request.record
        request.missing = candidate.num_missing(sequence)
        catch_up_s = record.catch_up * self.costs.at_rest(request.missing) if request.missing else 0.0
        has_begun = 0 < request.spent_s < self.costs.at_rest(sequence.num_tokens)
        if catch_up_s and catch_up_s > record.credit_s - record.caught_up_s and not has_begun:
            return LEDGER
        if surplus_s > 0 and catch_up_s <= surplus_s * (sequence.max_tokens - sequence.num_output_tokens):
            return DRAFTED
        is_due = not catch_up_s or record.time_s >= record.queried_s + (catch_up_s - surplus_s) / _PROBES
        return PROBE if is_due else RESTING

    def min_score(self, candidate: Candidate, work: Work, prices: Prices) -> float:
        """The confidence that a draft token must exceed to be worth going on from it: another run of the drafter, and
        the row of a child."""
        record, each = self._requests[candidate.name][work.sequence.id].record, prices.each
        if record.num_calls < _FEW_CALLS or len(each) < 3:  # what a level takes is told by whole drafts
            return 0.0
        last = min(8, len(each) - 1)
        row = (each[last] - each[1]) / (last - 1)
        level = record.level_s / prices.token_s
        return record.odds.confidence(min(1.0, (row + level) / (record.promised[1] / record.promised[0])))

    def observe_query(
        self, candidate: Candidate, works: Items[Work], drafts: Items[Draft], prices: Prices, seconds: float
    ) -> list[Offer | None]:
        """Learn from a query and what it took; returns the drafts with what the record says of them."""
        of_candidate, sequences, size = self._requests[candidate.name], prices.load.sequences, len(works)
        requests = [of_candidate[work.sequence.id] for work in works]
        caught_up_s = self._catch_up(candidate, works, requests, any(drafts), seconds)
        records = [request.record for request in requests]
        for record in set(records):
            record.book_call((seconds - caught_up_s) / size, records.count(record), size, not caught_up_s)
        offers: list[Offer | None] = []
        for request, record, draft in zip(requests, records, drafts, strict=True):
            if not draft.tokens:
                offers.append(None)
                if not request.missing:
                    request.learn_gain(sequences, 0.0)
                continue
            survivals = record.odds.survivals(draft)
            if not candidate.free and not caught_up_s:
                record.level_s = min(record.level_s, seconds / size / draft.depth)
            request.learn_gain(sequences, best_count(sorted(survivals, reverse=True), prices.each)[1])
            offers.append(Offer(draft, survivals))
        return offers

    def _catch_up(
        self, candidate: Candidate, works: Items[Work], requests: Items[_Request], any_draft: bool, seconds: float
    ) -> float:
        """How many seconds of a query went into catching up, if some sequences were behind: all but what a call takes,
        or nothing if it got no further."""
        behind = [(work, request) for work, request in zip(works, requests, strict=True) if request.missing]
        if not behind:
            return 0.0
        before = sum(request.missing for _, request in behind)
        for work, request in behind:
            request.missing = candidate.num_missing(work.sequence)
        run = before - sum(request.missing for _, request in behind)
        if run <= 0:
            return 0.0
        record = behind[0][1].record
        call_s = record.cost_s(len(works)) * len(works) if any_draft else 0.0
        caught_up_s = max(0.0, seconds - call_s)
        for _, request in behind:
            request.spent_s += caught_up_s / len(behind)
            request.record.caught_up_s += caught_up_s / len(behind)
        took = caught_up_s / self.costs.at_rest(run)
        record.catch_up = (record.catch_up + took) / 2 if record.catch_up else took
        return caught_up_s

    def choose(self, works: Items[Work], offers: Items[Offer | None], prices: Prices) -> tuple[list[Draft], list[str]]:
        """What to verify of each draft, and why. All nodes of all sequences compete. The most probable ones are kept,
        as many as save the most time and as the credits of their proposers can afford to lose."""
        is_known = self.costs.is_known(prices.load.rows)
        survivals: list[float] = []
        for offer in offers:
            if offer is not None and offer.draft.q is None and is_known:
                survivals += offer.survivals
        survivals.sort(reverse=True)
        extra = self.costs.extra(prices.load, len(survivals))
        count, _ = best_count(survivals, extra)
        least = survivals[count - 1] if count else inf
        ties = survivals[:count].count(least)  # nodes that are as probable as the last one: so many pass
        row_s = extra[count] / max(1, count) * prices.token_s
        # As nearly always: whoever drafted them, all rows could be lost.
        is_covered = row_s * count <= min([record.credit_s for record in self._records.values()], default=0.0)
        left: dict[_Record, float] = {}
        drafts: list[Draft] = []
        reasons: list[str] = []
        for work, offer in zip(works, offers, strict=True):
            draft, reason = NO_DRAFT, NOTHING_PROPOSED
            if offer is not None and offer.draft.q is not None:  # cutting a sampled draft would bias the output
                draft, reason = offer.draft, DRAFTED
            elif offer is not None:
                kept = [node for node, survival in enumerate(offer.survivals) if survival > least]
                if ties and least in offer.survivals:
                    equal = [node for node, survival in enumerate(offer.survivals) if survival == least][:ties]
                    kept, ties = sorted(kept + equal), ties - len(equal)
                reason = TOO_UNSURE if is_known else MEASURING
                if kept:
                    nodes = kept if is_covered else self._affordable(work, offer, kept, row_s, left)
                    draft, reason = (_cut(offer, nodes), DRAFTED) if nodes else (NO_DRAFT, LEDGER)
            drafts.append(draft)
            reasons.append(reason)
        return drafts, reasons

    def _affordable(
        self, work: Work, offer: Offer, nodes: list[int], row_s: float, left: dict[_Record, float]
    ) -> list[int]:
        """Of these nodes, those that the credits of their proposers can afford, of which so much is left: a credit
        covers what is expected to be lost of a row. None is kept without its parent."""
        kept: list[int] = []
        for node in nodes:
            record = self._requests[offer.draft.origin[node]][work.sequence.id].record
            left_s, risk_s = left.get(record, record.credit_s), row_s * (1 - offer.survivals[node])
            if risk_s <= left_s and (offer.draft.parents[node] < 0 or offer.draft.parents[node] in kept):
                left[record] = left_s - risk_s
                kept.append(node)
        return kept

    def observe(
        self,
        works: Items[Work],
        offers: Items[Collection[Offer] | None],
        commits: Items[Commit],
        prices: Prices,
        query_s: float,
        run_s: float,
    ) -> None:
        """Learn from a step that took so long. `offers` are those of all proposers; None stands for a sequence that is
        not the controller's."""
        costs, load, token_s, row_s = self.costs, prices.load, prices.token_s, 0.0
        run = Load.of(works) if any(work.draft.tokens for work in works) else load
        if run.rows > load.rows:
            expected_s = costs.run(run.rows, run.keys)
            self._lateness.append(run_s / expected_s)
            late_s = median(self._lateness) * expected_s - costs.run(load.rows, load.keys)
            row_s = late_s / (run.rows - load.rows)
        costs.observe(run.rows, run.keys, run_s, run is load)
        kinds = [kind_of(work.sequence) for work, made in zip(works, offers, strict=True) if made is not None]
        for kind in set(kinds):
            seconds = (query_s + run_s) * kinds.count(kind) / len(kinds)
            for (_, of), record in self._records.items():
                if of == kind:
                    record.pass_time(seconds)
        for work, made, commit in zip(works, offers, commits, strict=True):
            for draft, survivals in made or ():
                self._requests[draft.origin[0]][work.sequence.id].record.odds.learn(draft, survivals, commit.tokens)
            if made is not None and work.draft.tokens:
                for name in set(work.draft.origin):
                    record = self._requests[name][work.sequence.id].record
                    accepted = commit.origins.count(name)
                    record.credit_s += accepted * token_s - work.draft.origin.count(name) * row_s

    def release(self, sequence_ids: Iterable[int]) -> None:
        """Forget sequences that have ended. What their last drafts gained is kept, as that of a few."""
        for sequence_id in sequence_ids:
            for requests in self._requests.values():
                request = requests.pop(sequence_id, None)
                if request is not None and request.queries > _OF_ONE:
                    request.record.learn_gain(request.sequences, request.gains / request.drafts, _OF_ONE)

    def _begun(self, candidate: Candidate, sequence: Sequence, requests: dict[int, _Request]) -> _Request:
        """A request that is new to a proposer."""
        key = candidate.name, kind_of(sequence)
        if key not in self._records:
            self._records[key] = _Record(candidate, self._allowance_s)
        request = requests[sequence.id] = _Request(self._records[key])
        return request


def _chance(offer: Offer, row: float) -> float:
    """How probable it is that a draft at hand has the next token. Roots count that are worth a row."""
    return sum([s for s, parent in zip(offer.survivals, offer.draft.parents, strict=True) if parent < 0 and s > row])


def kind_of(sequence: Sequence) -> int:
    """How a request samples: what is learnt from hot requests says nothing about greedy ones."""
    temperature = sequence.params.temperature
    assert temperature is not None  # params are resolved
    return (temperature > 0) + (temperature > _HOT)


def _cut(offer: Offer, nodes: list[int]) -> Draft:
    """The draft of these nodes alone, with what the record says of them as scores."""
    draft, survivals = offer
    if len(nodes) == len(draft.tokens):
        return draft.with_scores(survivals)
    place = {-1: -1, **{node: index for index, node in enumerate(nodes)}}
    return Draft(
        tuple([draft.tokens[node] for node in nodes]),
        tuple([place[draft.parents[node]] for node in nodes]),
        tuple([survivals[node] for node in nodes]),
        tuple([draft.origin[node] for node in nodes]),
    )
