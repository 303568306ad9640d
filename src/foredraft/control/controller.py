"""When to draft, and how much. One rule decides about every query of a proposer and every row of a draft: the time that
its accepted tokens are expected to save must exceed the time that it takes.

A row is judged by the draft at hand, a query by what earlier drafts have gained: in this request, and in others of its
kind. A credit per proposer bounds the loss if expectations are wrong: it starts small, grows by a small share of the
time and by what the proposer's tokens save, and falls by what its queries and rows cost. Only what is in the credit can
be risked. Where queries do not pay, one is made when the share has paid for what it is expected to lose.

docs/control.md has a worked step. Plain Python: the engine measures all times and passes them in.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Collection, Iterable, Mapping
from collections.abc import Sequence as Items
from copy import deepcopy
from typing import NamedTuple

from foredraft.control.costs import ENOUGH, RECENT, Costs, Load, median
from foredraft.control.nodes import MEMORY, best_count
from foredraft.control.reasons import DRAFTED, LEDGER, MEASURING, NOTHING_PROPOSED, PROBE, RESTING, TOO_UNSURE
from foredraft.control.records import Candidate, Record, Request, allowance_s
from foredraft.types import NO_DRAFT, Commit, Draft, Sequence, Work

_HOT = 0.75  # a temperature: requests above it, up to it, and greedy ones are of three kinds


class Offer(NamedTuple):
    """A draft, and the probability of each node to be accepted."""

    draft: Draft
    survivals: Items[float]


class Prices(NamedTuple):
    """What a step costs."""

    load: Load  # without drafts
    token_s: float  # of a token in plain steps
    each: list[float]  # of no row more for each sequence, of one, of two, and so on, in tokens


class Controller:
    """Decides for the sequences with `auto`."""

    def __init__(self, costs: Costs) -> None:
        self.costs = costs
        self._allowance_s = allowance_s(costs.run(1, 0))
        self._records: dict[tuple[str, int], Record] = {}  # by proposer and kind of sampling
        self._requests: dict[str, dict[int, Request]] = {}  # by proposer and sequence
        # Of recent steps without prompts: what they took, and what plain steps would have taken for their tokens.
        self._spent_s = self._plain_s = self._allowance_s
        self._begun: set[int] = set()  # sequences about which something was decided
        self._looked_s: dict[int, deque[float]] = {}  # by number of sequences, about: seconds of the last looks at them
        # The times of the last runs with drafts, in units of what was expected.
        self._lateness = deque([1.0] * (RECENT // 2), maxlen=RECENT)

    def copy(self) -> Controller:
        """A controller with the same state. Both share what is known of the machine."""
        return deepcopy(self, {id(self.costs): self.costs})

    @property
    def pace(self) -> float:
        """What a token takes at present, in units of plain decoding. A token that a row does not bring is drafted again
        in the next step: so much it is worth, and no more."""
        return min(1.0, self._spent_s / self._plain_s)

    def prices(self, load: Load, nodes: int) -> Prices:
        """What a step costs with such a load, and drafts of at most so many nodes for each sequence."""
        return Prices(load, self.costs.token(load), self.costs.extra(load, nodes, load.sequences or 1))

    def rests(self, sequences: Items[Sequence], load: Load) -> bool:
        """Whether these sequences need not be looked at in a step of such a load. Looking takes time as well: it is
        worth it if the queries that `wants` would make are expected to gain more in all, or if a probe is due."""
        if not self._begun.issuperset([each.id for each in sequences if each.num_lookahead_tokens]):
            return False
        token_s, looking_s, gain_s = self.costs.token(load), self._looking_s(load), 0.0
        row_s = self.costs.extra(load, 1, load.sequences or 1)[1] * token_s
        for record in self._records.values():
            size = len(record.live)
            cost_s, catch_up_s = record.cost_s(size), self._catch_up_s(record, record.num_missing)
            invests = not catch_up_s or catch_up_s <= record.credit_s - record.caught_up_s
            if size and invests and cost_s + row_s <= record.credit_s:
                gains = record.expected(load.sequences)
                if record.is_due(looking_s + catch_up_s + size * cost_s - sum(gains) * token_s):
                    return False
                for gain in gains:  # those that expect most come first
                    if gain * token_s <= cost_s:
                        break
                    gain_s += gain * token_s - cost_s
        return gain_s <= looking_s

    def pass_over(self, sequence: Sequence, load: Load) -> None:
        """It got no slots for a draft in a step of such a load. To look at it again would not help."""
        if self.costs.is_known(load.rows):
            self._begun.add(sequence.id)

    def _catch_up_s(self, record: Record, missing: int) -> float:
        """What it is expected to take to catch up with so many tokens."""
        return record.catch_up * self.costs.at_rest(missing) if missing else 0.0

    def _looking_s(self, load: Load) -> float:
        """What it takes to look at so many sequences and to learn from them."""
        known = self._looked_s.get(load.sequences.bit_length())
        return median(known) if known else 0.0

    def wants(
        self, candidate: Candidate, works: Items[Work], at_hand: Items[Offer | None], prices: Prices
    ) -> list[str]:
        """Whether to query a proposer for each work, and why: DRAFTED and PROBE mean that it is queried. `at_hand` are
        drafts of others that are there already."""
        load, token_s, each = prices
        if not self.costs.is_known(load.rows):
            return [MEASURING] * len(works)
        requests, row_s = self._requests.setdefault(candidate.name, {}), each[1] * token_s
        judged: list[tuple[Request, float]] = []
        losses: dict[Record, float] = {}  # of the queries that are not expected to pay, if all are made
        record: Record | None = None
        for work, offer in zip(works, at_hand, strict=True):
            request = requests.get(work.sequence.id) or self._begin(candidate, work.sequence, requests)
            if request.record is not record:  # nearly always all are of one kind
                record = request.record
                common, cost_s = record.gain(load.sequences, each), record.cost_s(len(works))
            gain = request.gain(common)
            if offer is not None:  # where one at hand has the next token, there is nothing to gain
                gain *= 1 - _chance(offer, each[1])
            surplus_s = gain * token_s - cost_s
            judged.append((request, surplus_s))
            if surplus_s <= 0:
                losses[record] = losses.get(record, 0.0) - surplus_s
        due = {record for record, loss_s in losses.items() if record.is_due(loss_s)}
        left: dict[Record, float] = {}
        reasons: list[str] = []
        for work, (request, surplus_s) in zip(works, judged, strict=True):
            record = request.record
            cost_s, left_s = record.cost_s(len(works)), left.get(record, record.credit_s)
            if surplus_s <= 0 and not (record in due and record.is_due(-surplus_s, request.queried_s)):
                reason = RESTING
            elif cost_s + row_s > left_s:  # a query also risks a row: without one it is of no use
                reason = LEDGER
            elif record in left and not record.num_calls:
                reason = RESTING  # one sequence is enough to time a proposer
            else:
                reason, catch_up_s = self._decide(candidate, request, work.sequence, surplus_s, left_s)
                if reason is DRAFTED or reason is PROBE:
                    left[record] = left_s - cost_s - catch_up_s  # sequences that are behind share what was saved
                    request.queried_s = record.time_s
                    if reason is PROBE:
                        record.probed_s = record.time_s
            reasons.append(reason)
        return reasons

    def _decide(
        self, candidate: Candidate, request: Request, sequence: Sequence, surplus_s: float, left_s: float
    ) -> tuple[str, float]:
        """Whether a query is made that is expected to gain so much beside catching up, or that is due without it, with
        so much left of the credit; and what catching up is expected to take."""
        record = request.record
        request.missing = candidate.num_missing(sequence)
        catch_up_s = self._catch_up_s(record, request.missing)
        has_begun = 0 < request.spent_s < self.costs.at_rest(sequence.num_tokens)
        if catch_up_s and catch_up_s > left_s - record.caught_up_s and not has_begun:
            return LEDGER, 0.0
        if surplus_s > 0 and catch_up_s <= surplus_s * (sequence.max_tokens - sequence.num_output_tokens):
            return DRAFTED, catch_up_s
        is_due = not catch_up_s or record.is_due(catch_up_s - surplus_s, record.probed_s)
        return (PROBE if is_due else RESTING), catch_up_s

    def min_score(self, candidate: Candidate, work: Work, prices: Prices) -> float:
        """The confidence that a draft token must exceed to be worth going on from it: another run of the drafter, and
        the row of a child."""
        request, each = self._requests[candidate.name][work.sequence.id], prices.each
        record = request.record
        if record.num_calls < ENOUGH or len(each) < 3:  # what a level takes is told by whole drafts
            return 0.0
        last = min(8, len(each) - 1)
        row = (each[last] - each[1]) / (last - 1)
        costs = (row + record.level_s / prices.token_s) / self.pace
        return request.odds.confidence(min(1.0, costs / (record.promised[1] / record.promised[0])))

    def offers(self, candidate: Candidate, works: Items[Work], drafts: Items[Draft]) -> list[Offer | None]:
        """The drafts of a query, with what the record says of them."""
        requests = self._requests[candidate.name]
        return [
            Offer(draft, requests[work.sequence.id].odds.survivals(draft)) if draft.tokens else None
            for work, draft in zip(works, drafts, strict=True)
        ]

    def observe_query(
        self, candidate: Candidate, works: Items[Work], offers: Items[Offer | None], prices: Prices, seconds: float
    ) -> None:
        """Learn from a query, what it offers, and what it took."""
        of_candidate, sequences, size = self._requests[candidate.name], prices.load.sequences, len(works)
        requests = [of_candidate[work.sequence.id] for work in works]
        caught_up_s = self._catch_up(candidate, works, requests, any(offers), seconds)
        records = [request.record for request in requests]
        for record in set(records):
            record.book_call((seconds - caught_up_s) / size, records.count(record), size, not caught_up_s)
        for request, record, offer in zip(requests, records, offers, strict=True):
            if offer is None:
                if not request.missing:
                    request.learn_gain(sequences, 0.0)
                continue
            if not candidate.free and not caught_up_s:
                record.level_s = min(record.level_s, seconds / size / offer.draft.depth)
            request.learn_gain(sequences, best_count(sorted(offer.survivals, reverse=True), prices.each)[1])

    def _catch_up(
        self, candidate: Candidate, works: Items[Work], requests: Items[Request], any_draft: bool, seconds: float
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

    def choose(self, offers: Items[Offer | None], prices: Prices) -> tuple[list[Draft], list[str]]:
        """What to verify of each draft, and why. All nodes of all sequences compete. The most probable ones are kept,
        as many as save the most time and as the highest credit can afford to lose. (A proposer without credit was not
        queried.)"""
        is_known = self.costs.is_known(prices.load.rows)
        survivals: list[float] = []  # of all nodes that may be cut
        for offer in offers:
            if offer is not None and offer.draft.q is None and is_known:
                survivals += offer.survivals
        best = sorted(range(len(survivals)), key=survivals.__getitem__, reverse=True)
        chances, pace = [survivals[node] for node in best], self.pace
        extra = self.costs.extra(prices.load, len(best))
        worth, _ = best_count([pace * chance for chance in chances], extra)
        count, most_s = worth, max([record.credit_s for record in self._records.values() if record.live], default=0.0)
        while count and extra[count] * prices.token_s * (1 - sum(chances[:count]) / count) > most_s:
            count -= 1  # what is expected to be lost of so many rows is not covered
        kept = sorted(best[:count])  # of equals the first are kept, so none without its parent
        drafts: list[Draft] = []
        reasons: list[str] = []
        begin = end = first = last = 0  # where an offer's nodes are among all, and among those that are kept
        for offer in offers:
            draft, reason = NO_DRAFT, NOTHING_PROPOSED
            if offer is not None and offer.draft.q is not None:  # cutting a sampled draft would bias the output
                draft, reason = offer.draft, DRAFTED
            elif offer is not None:
                begin, end = end, end + len(offer.survivals)
                first, last = last, bisect_left(kept, end, last)
                reason = MEASURING if not is_known else LEDGER if worth > count else TOO_UNSURE
                if first < last:
                    draft, reason = offer.draft.only([node - begin for node in kept[first:last]]), DRAFTED
            drafts.append(draft)
            reasons.append(reason)
        return drafts, reasons

    def observe(
        self,
        works: Items[Work],
        offers: Mapping[int, Collection[Offer]],
        commits: Items[Commit],
        prices: Prices,
        query_s: float,
        run_s: float,
        looking_s: float = 0.0,
    ) -> None:
        """Learn from a step that took so long: in queries, in the run, and in looking at its sequences beside that.
        `offers` are those of all proposers, by the place of a sequence in the step."""
        costs, load, token_s = self.costs, prices.load, prices.token_s
        if load.rows == load.sequences:
            self._spent_s = MEMORY * self._spent_s + query_s + run_s + looking_s
            self._plain_s = MEMORY * self._plain_s + token_s * sum([len(commit.tokens) for commit in commits])
        if looking_s:
            self._looked_s.setdefault(load.sequences.bit_length(), deque(maxlen=RECENT)).append(looking_s)
            payer = max([record for record in self._records.values() if record.live], key=_credit, default=None)
            if payer is not None:  # who has most, and not more than it has: where nobody has any, nobody is looked at
                payer.credit_s -= min(looking_s, max(0.0, payer.credit_s))
        for (name, _), record in self._records.items():
            if record.live:  # its share of all sequences of the controller
                record.pass_time((query_s + run_s) * len(record.live) / len(self._requests[name]))
        run = Load.of(works) if offers else load
        row_s = self._row_s(run, load, run_s)
        costs.observe(run.rows, run.keys, run_s, run.rows == load.rows)
        for index, made in offers.items():
            sequence_id, draft, commit = works[index].sequence.id, works[index].draft, commits[index]
            for proposed, survivals in made:
                self._requests[proposed.origin[0]][sequence_id].learn_odds(proposed, survivals, commit.tokens)
            for name in set(draft.origin):
                record = self._requests[name][sequence_id].record
                record.credit_s += commit.origins.count(name) * token_s - draft.origin.count(name) * row_s

    def _row_s(self, run: Load, load: Load, run_s: float) -> float:
        """What each row more than a plain step has took in a run, by the median of the last ones."""
        if run.rows == load.rows:
            return 0.0
        expected_s = self.costs.run(run.rows, run.keys)
        self._lateness.append(run_s / expected_s)
        late_s = median(self._lateness) * expected_s - self.costs.run(load.rows, load.keys)
        return late_s / (run.rows - load.rows)

    def release(self, sequence_ids: Iterable[int]) -> None:
        """Forget sequences that have ended."""
        for sequence_id in sequence_ids:
            self._begun.discard(sequence_id)
            for requests in self._requests.values():
                request = requests.pop(sequence_id, None)
                if request is not None:
                    request.end()

    def _begin(self, candidate: Candidate, sequence: Sequence, requests: dict[int, Request]) -> Request:
        """A request that is new to a proposer."""
        key = candidate.name, kind_of(sequence)
        if key not in self._records:
            self._records[key] = Record(candidate, self._allowance_s)
        self._begun.add(sequence.id)
        request = requests[sequence.id] = Request(self._records[key])
        return request


def _chance(offer: Offer, row: float) -> float:
    """How probable it is that a draft at hand has the next token. Roots count that are worth a row."""
    roots = [s for s, parent in zip(offer.survivals, offer.draft.parents, strict=True) if parent < 0 and s > row]
    return min(1.0, sum(roots))


def _credit(record: Record) -> float:
    return record.credit_s


def kind_of(sequence: Sequence) -> int:
    """How a request samples: what is learnt from hot requests says nothing about greedy ones."""
    temperature = sequence.params.temperature
    assert temperature is not None  # params are resolved
    return (temperature > 0) + (temperature > _HOT)
