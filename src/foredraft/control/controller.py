"""When to draft, and how much. One rule decides about every query of a proposer and every row of a draft: the time that
its accepted tokens are expected to save must exceed the time that it takes.

A token is worth the time that tokens take at present. Queries take what was measured, next to nothing or not, and rows
what the cost curve says. A query is decided on by the proposer's last drafts (worth.py), rows by the draft at hand.

A ledger per proposer bounds the loss if expectations are wrong. It starts with a small allowance, grows by a small
share of the time, and books what the proposer's tokens gain and what its queries and rows cost. A step may only risk
what is in the ledger. Where queries do not pay, that share of the time pays for one now and then: the less one is
expected to lose, the sooner.

Deciding takes time too, and most in steps in which nothing is gained. So a decision that the next steps would only
repeat stands for a stretch of them, and steps without drafts are learnt from together.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Collection, Iterable, Mapping
from collections.abc import Sequence as Items
from copy import deepcopy
from functools import partial
from itertools import groupby
from math import inf
from typing import NamedTuple

from foredraft.control.acceptance import Acceptance
from foredraft.control.costs import Costs, StepTimes
from foredraft.control.ledger import NOTHING, NOTHING_RUN, PACE_MEMORY, UNDECIDED, Behind, Decision, Ledger
from foredraft.control.reasons import DRAFTED, LEDGER, MEASURING, NOTHING_PROPOSED, PROBE, RESTING, TOO_UNSURE
from foredraft.control.worth import Candidate, Load, Offer
from foredraft.types import NO_DRAFT, Commit, Draft, Sequence, Work

# docs/control.md has the sweeps that set these.
_SHARE = 0.005  # of all time, for each proposer: what it may lose
_ALLOWANCE = 4.0  # plain steps: and at the start,
_UNNOTICED_S = 0.01  # or this, where steps are short: the time of so few would not tell what a proposer is worth
_MOST_SAVED = 64.0  # plain steps: and in all, after gains

_BLAME_STEPS = 5  # drafts are charged the median lateness of so many runs: one late run may have another cause
_REFRESH_STEPS = 16  # after so many steps queries are weighed anew
_LONG = 8.0  # times the mean: what deciding takes beyond has another cause
_LEARNT_AT_ONCE = 64  # steps without drafts

_Node = tuple[float, int, int]  # minus its survival, index of the work, node of its draft: they sort best first


class _Query(NamedTuple):
    candidate: Candidate
    works: Items[Work]
    budgets: Items[int]
    survivals: Items[list[float]]  # of the nodes that were drafted for each work
    missing: Items[int]  # catch-up tokens that were run for each
    seconds: float


class Controller:
    """Decides for the sequences with `auto`. Plain Python: the engine measures all times and passes them in."""

    def __init__(self, costs: Costs) -> None:
        self.costs = costs
        self.acceptance = Acceptance()
        step_s = costs.run(1, 0)
        self._allowance_s = max(_ALLOWANCE * step_s, _UNNOTICED_S)
        self._most_s = max(_MOST_SAVED * step_s, _UNNOTICED_S)
        self._ledgers: dict[str, Ledger] = {}
        self.now_s = 0.0  # the time that all steps took so far
        # The times of the last runs with drafts, in units of the expected time.
        self._lateness = deque([1.0] * (_BLAME_STEPS // 2), maxlen=_BLAME_STEPS)
        # What waits to be learnt from: steps without drafts, and queries.
        self._plain: list[tuple[Load, StepTimes]] = []
        self._queries: list[_Query] = []
        self._steps = 0

    def copy(self) -> Controller:
        """A controller with the same state. Both share what is known of the machine."""
        self._learn_from_waiting()
        return deepcopy(self, {id(self.costs): self.costs})

    def budgets(
        self, candidate: Candidate, works: Items[Work], at_hand: Items[Collection[Draft]], load: Load
    ) -> list[Decision]:
        """How many nodes a proposer may draft for each work, and why, with the drafts of others that are at hand."""
        if not candidate.is_free and not self.costs.is_known(load.rows):
            self._learn_from_waiting()
            return [(NOTHING, MEASURING)] * len(works)
        ledger, of = self._ledger(candidate), (candidate.most, load.sequences, load.rows.bit_length())
        if ledger.decided_for != of or self.now_s >= ledger.decided_until_s:
            ledger.forget_decisions()
        decided = [ledger.decisions.get(work.sequence.id, UNDECIDED) for work in works]
        chances = [self._chance_of_next(work, drafts, load) for work, drafts in zip(works, at_hand, strict=True)]
        # Not to query stands whatever is at hand: that leaves less to gain.
        if UNDECIDED in decided or any(nodes and chance for (nodes, _), chance in zip(decided, chances, strict=True)):
            self._learn_from_waiting()  # which have added to the ledger
            ledger.forget_decisions()  # with drafts at hand, this step decides otherwise, and only for itself
            ledger.decided_for = of
            decided = self._decided(candidate, ledger, works, chances, load)
        return [
            (nodes.at_most(work.num_lookahead_tokens), reason)
            for (nodes, reason), work in zip(decided, works, strict=True)
        ]

    def stands_until_s(self, names: Iterable[str], works: Items[Work], load: Load) -> float:
        """Until when, on the clock of `now_s`, what is decided about these proposers and works stands while queries
        bring nothing: until one is due that is not made, or tokens may take another time. -inf: it does not stand."""
        ledgers = [self._ledgers.get(name) for name in names]
        due_s = min((-inf if ledger is None else ledger.stands_until_s(works) for ledger in ledgers), default=-inf)
        return min(due_s, self.now_s + self.costs.run(load.rows, load.keys) / (1 - PACE_MEMORY))

    def _chance_of_next(self, work: Work, at_hand: Collection[Draft], load: Load) -> float:
        """How probable it is that a draft at hand has the next token: then there is nothing to gain. Roots count that
        are worth their row, if that can be afforded: others will not be verified."""
        best = 0.0
        for draft in at_hand:
            row_s, ledger = self.costs.added(load.rows, load.keys, [_reach(work)])[0], self._ledgers[draft.origin[0]]
            token_s, chance = self._token_s(ledger, load), 0.0
            for score, parent in zip(draft.scores, draft.parents, strict=True):
                if parent < 0 and score * token_s > row_s and (1 - score) * row_s <= ledger.balance_s:
                    chance += score
            best = max(best, chance)
        return min(1.0, best)

    def _decided(
        self, candidate: Candidate, ledger: Ledger, works: Items[Work], chances: Items[float], load: Load
    ) -> list[Decision]:
        """Decide about every work. Without drafts at hand, decisions that the next steps would repeat stand for a
        stretch: not to query until a query is due, and to query for all if the ledger covers the whole stretch."""
        offers = ledger.worth.offers(candidate, load, self.costs, partial(self._token_s, ledger))
        is_timed = self.costs.draft(candidate.name, candidate.most, 1) is not None
        left_s, saved_s, is_queried, is_behind = ledger.balance_s, ledger.saved_s, False, False
        decided: list[Decision] = []
        until_s = inf
        for work, chance in zip(works, chances, strict=True):
            nodes, reason = NOTHING, LEDGER
            if is_queried and not is_timed:
                reason = RESTING  # one sequence is enough to time it
            elif affordable := [offer for offer in offers if offer.cost_s <= left_s]:
                offer = ledger.worth.best(affordable, work.sequence.id)
                catch_up_s = ledger.catch_up_s(candidate, work.sequence, self.costs)
                reason, due_s = self._decide(candidate, ledger, work.sequence, 1 - chance, offer, catch_up_s, saved_s)
                until_s = min(until_s, due_s)
                if reason in (DRAFTED, PROBE):
                    nodes, is_queried = offer.nodes, True
                    left_s, saved_s = left_s - offer.cost_s, saved_s - catch_up_s
                    is_behind |= catch_up_s > 0
                    ledger.queried_s = self.now_s
            decided.append((nodes, reason))
        ledger.is_probed = any(reason == PROBE for _, reason in decided)
        is_covered = _REFRESH_STEPS * (ledger.balance_s - left_s) <= ledger.balance_s
        is_lasting = is_timed and is_covered and not is_behind
        all_drafted = is_lasting and all(reason == DRAFTED for _, reason in decided)
        if not any(chances) and (all_drafted or not is_queried):
            ledger.decisions = {work.sequence.id: one for work, one in zip(works, decided, strict=True)}
            if is_queried:
                ledger.decided_until_s = self.now_s + _REFRESH_STEPS * self.costs.run(load.rows, load.keys)
            else:
                missing_s = min(offer.cost_s for offer in offers) - left_s
                ledger.decided_until_s = until_s if missing_s <= 0 else self.now_s + missing_s / _SHARE
        return decided

    def _decide(
        self,
        candidate: Candidate,
        ledger: Ledger,
        sequence: Sequence,
        chance: float,
        offer: Offer,
        catch_up_s: float,
        saved_s: float,
    ) -> tuple[str, float]:
        """Whether to query for a sequence, and when that is due in any case. `saved_s` is left of all savings: the
        sequences of a step share them."""
        has_begun = ledger.behind.get(sequence.id, NOTHING_RUN).spent_s > 0
        is_covered = not catch_up_s or has_begun or catch_up_s < saved_s
        gain_s = chance * offer.gain_s - offer.cost_s
        if gain_s > 0 and catch_up_s <= gain_s * (sequence.max_tokens - sequence.num_output_tokens):
            return DRAFTED if is_covered else LEDGER, inf
        if not is_covered:
            return RESTING, inf
        due_s = ledger.queried_s + max(0.0, catch_up_s - gain_s) / _SHARE
        # One call may have been delayed: a few are made before a proposer is judged by what they took.
        return PROBE if self.now_s >= due_s or not self.costs.is_timed(candidate.name) else RESTING, due_s

    def observe_query(
        self, candidate: Candidate, works: Items[Work], budgets: Items[int], drafts: Items[Draft], seconds: float
    ) -> list[Draft]:
        """Learn from a query and what it took; returns the drafts with scores that follow the record."""
        behind = self._ledger(candidate).behind
        missing = [behind.get(work.sequence.id, NOTHING_RUN).num_missing(work.sequence) for work in works]
        record = self.acceptance.survivals
        survivals = [
            record(work.sequence.id, draft) if draft.tokens else [] for work, draft in zip(works, drafts, strict=True)
        ]
        self._queries.append(_Query(candidate, works, budgets, survivals, missing, seconds))
        if any(missing):  # else that can wait until the target runs
            self._learn_from_waiting()
        return [draft.with_scores(of) if of else draft for draft, of in zip(drafts, survivals, strict=True)]

    def _learn_from_query(self, query: _Query) -> None:
        candidate, works, budgets, survivals, missing, seconds = query
        ledger, name, nodes = self._ledger(candidate), candidate.name, max(budgets)
        known_s = self.costs.draft(name, nodes, len(works))
        drafting_s = min(seconds, known_s or 0.0) if any(survivals) else 0.0
        catch_up_s = (seconds - drafting_s) / max(1, sum(map(bool, missing)))
        is_catching_up = False
        for work, budget, drafted, tokens in zip(works, budgets, survivals, missing, strict=True):
            sequence = work.sequence
            if tokens:
                one = ledger.behind.setdefault(sequence.id, Behind())
                one.spent_s += catch_up_s
                # A proposer that takes longer than the target itself would, for these tokens and for those that it
                # drafts, does not catch up: it is slow.
                most_s = self.costs.run(tokens, tokens * sequence.num_tokens) + budget * self.costs.run(1, 0)
                if one.spent_s <= most_s:
                    is_catching_up = True
                    if not drafted and not candidate.is_free:
                        continue  # it goes on in the next steps
                    self.costs.observe_catch_up(name, tokens, one.spent_s)
            ledger.behind[sequence.id] = Behind(sequence.counters.preemptions, sequence.num_tokens)
            ledger.worth.observe(sequence.id, drafted, budget, candidate.most)
        if not is_catching_up:
            self.costs.observe_draft(name, nodes, len(works), seconds)
            # As with late runs, one late call may have another cause: what is booked is what such calls take.
            drafting_s = seconds = self.costs.draft(name, nodes, len(works)) or 0.0
            if known_s is None:
                ledger.worth.refresh(self.costs, partial(self._token_s, ledger))
        if ledger.is_probed and any(survivals):  # what a probe has found may show that queries pay again
            ledger.forget_decisions()
            ledger.worth.refresh(self.costs, partial(self._token_s, ledger))
        ledger.saved_s -= seconds - drafting_s
        ledger.book(-drafting_s)

    def choose(self, works: Items[Work], drafts: Items[Draft | None], load: Load) -> tuple[list[Draft], list[str]]:
        """What to verify of each draft, and why; None stands for a sequence that is not the controller's.

        All nodes of all sequences compete. The most probable ones are kept, as many as save the most time and as the
        ledgers of their proposers can afford to lose.
        """
        if not any(drafts):
            return [NO_DRAFT] * len(drafts), [NOTHING_PROPOSED] * len(drafts)
        nodes: list[_Node] = []
        for index, draft in enumerate(drafts):
            if draft is not None and draft.q is None:
                nodes += [(-survival, index, node) for node, survival in enumerate(draft.scores)]
        nodes.sort()
        reaches = [_reach(work) for work in works]
        added_s = self.costs.added(load.rows, load.keys, [reaches[index] for _, index, _ in nodes])
        # The gain of drafting is unknown until the cost of plain decoding is known.
        is_known = self.costs.is_known(load.rows)
        count = self._best_count(drafts, nodes, added_s, load) if is_known else 0
        wanted = {index for _, index, _ in nodes[:count]}
        kept = self._affordable(drafts, nodes[:count], added_s[count - 1] / count if count else 0.0)
        chosen: list[Draft] = []
        reasons: list[str] = []
        for index, draft in enumerate(drafts):
            # A sampled draft is verified whole: cutting it would bias the output.
            is_whole = draft is None or draft.q is not None
            chosen.append((draft or NO_DRAFT) if is_whole else draft.only(sorted(kept.get(index, ()))))  # type: ignore[union-attr]
            why_not = LEDGER if index in wanted else TOO_UNSURE if is_known else MEASURING
            reasons.append(DRAFTED if chosen[index] else why_not if draft else NOTHING_PROPOSED)
        return chosen, reasons

    def observe(
        self,
        works: Items[Work],
        drafts: Items[Mapping[str, Draft] | None],
        commits: Items[Commit],
        load: Load,
        times: StepTimes,
    ) -> None:
        """Learn from a step. `drafts` are those of each proposer as it made them, and none is empty; None stands for a
        sequence that is not the controller's. `load` is without them."""
        self._count_step(times)
        self._learn_from_waiting()
        self._charge(times, load)
        run = Load.of(works)
        plain, expected = self.costs.run(load.rows, load.keys), self.costs.run(run.rows, run.keys)
        token_s = self._plain_token_s(load)
        plain_s = plain + token_s * (sum(len(commit.tokens) for commit in commits) - load.sequences)
        self.costs.observe_runs(run.rows, run.keys, [times.run_s])
        drafted = {name for work in works for name in work.draft.origin}
        self._count_time(drafted, times.all_s, plain_s)
        row_s = 0.0
        if run.rows > load.rows:
            self._lateness.append(times.run_s / expected)
            late = sorted(self._lateness)[len(self._lateness) // 2]
            row_s = (late * expected - plain) / (run.rows - load.rows)
        rows, accepted = Counter[str](), Counter[str]()
        for work, made, commit in zip(works, drafts, commits, strict=True):
            if made is not None:
                rows.update(work.draft.origin)
                accepted.update(commit.origins)
                for draft in made.values():
                    self.acceptance.observe(commit.sequence.id, draft, commit.tokens)
        for name in rows:
            self._ledgers[name].book(accepted[name] * token_s - rows[name] * row_s)

    def observe_plain(self, load: Load, times: StepTimes) -> None:
        """Learn from a step without drafts, which teaches only the cost of runs and of queries. Several of them are
        learnt from at once: code that runs once a step has left the processor's caches, and is slow."""
        self._count_step(times)
        self._plain.append((load, times))
        if len(self._plain) >= _LEARNT_AT_ONCE:
            self._learn_from_waiting()

    def release(self, sequence_ids: Iterable[int]) -> None:
        self._learn_from_waiting()  # before those that are gone are forgotten
        gone = list(sequence_ids)
        self.acceptance.release(gone)
        for ledger in self._ledgers.values():
            ledger.worth.release(gone)
            for sequence_id in gone:
                ledger.behind.pop(sequence_id, None)

    def _ledger(self, candidate: Candidate) -> Ledger:
        if candidate.name not in self._ledgers:
            self._ledgers[candidate.name] = Ledger(candidate, self._allowance_s, self._most_s)
        return self._ledgers[candidate.name]

    def _learn_from_waiting(self) -> None:
        queries, self._queries = self._queries, []
        for query in queries:
            self._learn_from_query(query)
        for rows, steps in groupby(self._plain, key=lambda step: step[0].rows):
            loads, times = zip(*steps, strict=True)
            keys = sum(load.keys for load in loads) // len(loads)
            self.costs.observe_runs(rows, keys, [each.run_s for each in times])
        for load, of_step in self._plain:
            self._count_time((), of_step.all_s, of_step.run_s)
            self._charge(of_step, load)
        self._plain.clear()

    def _count_step(self, times: StepTimes) -> None:
        self.now_s += times.all_s
        self._steps += 1
        if self._steps % _REFRESH_STEPS == 0:
            for ledger in self._ledgers.values():
                ledger.worth.refresh(self.costs, partial(self._token_s, ledger))
                ledger.forget_decisions()

    def _count_time(self, drafted: Collection[str], spent_s: float, plain_s: float) -> None:
        """A step with drafts of these proposers took so long, and plain decoding would have for its tokens."""
        for ledger in self._ledgers.values():
            ledger.pace.count(drafted, spent_s, plain_s)
            ledger.book(_SHARE * spent_s)

    def _charge(self, times: StepTimes, load: Load) -> None:
        """The proposers that were queried pay for what that took beside their drafts, most for whom there was most to
        decide."""
        for name, count in times.queried.items():
            share_s = times.deciding_s * count / sum(times.queried.values())
            self.costs.observe_deciding(name, load.sequences, share_s)
            # Of a delay, no more is booked than queries take as a rule.
            self._ledgers[name].book(-min(share_s, _LONG * load.sequences * self.costs.deciding(name)))

    def _plain_token_s(self, load: Load) -> float:
        """What a token takes in plain steps. Rows of prompts beside it are run in any case: a token saves none."""
        sequences = max(1, load.sequences)
        return self.costs.run(sequences, load.keys * sequences // max(1, load.rows)) / sequences

    def _token_s(self, ledger: Ledger, load: Load) -> float:
        """What a token takes at present where this proposer drafts, with what drafts save."""
        return ledger.pace.share * self._plain_token_s(load)

    def _best_count(self, drafts: Items[Draft | None], nodes: list[_Node], added_s: list[float], load: Load) -> int:
        """How many of the most probable nodes save the most time, if so many add so much to the step."""
        plain_s = self._plain_token_s(load)
        token_s = {name: ledger.pace.share * plain_s for name, ledger in self._ledgers.items()}
        best, best_s, saved_s = 0, 0.0, 0.0
        for count, ((minus_survival, index, node), extra_s) in enumerate(zip(nodes, added_s, strict=True), 1):
            saved_s -= minus_survival * token_s[drafts[index].origin[node]]  # type: ignore[union-attr]
            if saved_s - extra_s > best_s:
                best, best_s = count, saved_s - extra_s
        return best

    def _affordable(self, drafts: Items[Draft | None], nodes: list[_Node], row_s: float) -> dict[int, list[int]]:
        """By work, the nodes that the ledgers of their proposers can afford: a ledger covers what is expected to be
        lost of a row. None is kept without its parent."""
        kept: dict[int, list[int]] = {}
        left_s = {name: ledger.balance_s for name, ledger in self._ledgers.items()}
        is_covered = row_s * len(nodes) <= min(left_s.values(), default=0.0)  # as nearly always, whoever drafted them
        for minus_survival, index, node in nodes:
            of_work = kept.setdefault(index, [])
            if not is_covered:
                draft, risk_s = drafts[index], row_s * (1 + minus_survival)
                assert draft is not None
                name, parent = draft.origin[node], draft.parents[node]
                if risk_s > left_s[name] or (parent >= 0 and parent not in of_work):
                    continue
                left_s[name] -= risk_s
            of_work.append(node)
        return kept


def _reach(work: Work) -> int:
    """Keys that one more row of a work reads."""
    return work.sequence.num_computed_tokens + work.num_new_tokens
