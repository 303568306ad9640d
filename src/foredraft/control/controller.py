"""When to draft, and how much. One rule decides about every query of a proposer and every row of a draft: the seconds
that accepted tokens are expected to save must exceed the seconds that it takes, with a margin.

Accepted tokens save plain steps. What a query takes is measured, next to nothing or not; what rows take is the cost
curve's. A query is decided on by the proposer's last drafts (worth.py), rows by the draft at hand. Of all budgets and
of all cuts the one with the most tokens per second wins.

A ledger per proposer bounds the loss if expectations are wrong. It starts with a small allowance, grows by a small
share of the time, and books what the proposer's tokens gain and what its queries and rows cost. A step may only risk
what is in the ledger. Where queries do not pay, that share of the time pays for one now and then.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Items
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import NamedTuple

from foredraft.control.acceptance import Acceptance
from foredraft.control.costs import Costs
from foredraft.control.worth import Candidate, Load, Offer, Worth
from foredraft.types import NO_DRAFT, Commit, Draft, Sequence, Work

DRAFTED, NOTHING_PROPOSED, TOO_UNSURE, LEDGER = "drafted", "nothing proposed", "would not pay", "ledger"
MEASURING, RESTING, PROBE = "measuring", "resting", "probe"

# docs/control.md has the sweeps that set these.
_MARGIN = 1.0
_SHARE = 0.005  # of all time, for each proposer: what it may lose
_ALLOWANCE_S = 0.02  # and at the start,
_ALLOWANCE_STEPS = 2  # or so many plain steps where those take longer
_MOST_SAVED = 16.0  # allowances: the cap of a ledger, so that old gains do not pay for ever

_PACE_MEMORY = 0.98  # the share that is kept after one more step: what a token takes is over about fifty
_BLAME_STEPS = 5  # drafts are charged the median lateness of so many runs: one late run may have another cause
_REFRESH_STEPS = 16  # steps without drafts that are learnt from at once, and after which queries are weighed anew
_UP_TO_DATE = 16  # tokens that a proposer runs together with its next draft, at no cost of their own

_Node = tuple[float, int, int]  # survival, index of the work, node of its draft


@dataclass
class _Behind:
    """A sequence's tokens that a proposer has run, and what it has spent on the others since its last draft for it."""

    preemptions: int = 0  # those of the sequence by then; one more means that all must be run again
    computed: int = 0
    spent_s: float = 0.0

    def num_missing(self, sequence: Sequence) -> int:
        is_lost = self.preemptions != sequence.counters.preemptions
        missing = sequence.num_tokens - (0 if is_lost else self.computed)
        return missing if missing > _UP_TO_DATE else 0


class _Account:
    """What is known of one proposer: what a query is worth, its ledger, and how far behind it is."""

    def __init__(self, candidate: Candidate, allowance_s: float) -> None:
        self.worth = Worth(candidate)
        self.ledger_s = self.saved_s = allowance_s  # catching up is paid from all savings, which have no cap
        self.most_s = _MOST_SAVED * allowance_s
        self.queried_s = 0.0  # when it was last queried
        self.behind: dict[int, _Behind] = {}  # by sequence

    def book(self, seconds: float) -> None:
        self.saved_s += seconds
        self.ledger_s = min(self.most_s, self.ledger_s + seconds)


class StepTimes(NamedTuple):
    """The times of a step, but for queries: the target's run, and all the rest."""

    run_s: float
    overhead_s: float


class Controller:
    """Decides for the sequences with `auto`. Plain Python: the engine measures all times and passes them in."""

    def __init__(self, costs: Costs) -> None:
        self.costs = costs
        self.acceptance = Acceptance()
        self._allowance_s = max(_ALLOWANCE_S, _ALLOWANCE_STEPS * costs.run(1, 0))
        self._accounts: dict[str, _Account] = {}
        self._now_s = 0.0  # the time that all steps took so far
        # Of the last steps: the time that they took, and that plain decoding would have taken for their tokens.
        self._spent_s = self._plain_s = self._allowance_s
        self._query_s = 0.0  # of the queries of this step
        # The times of the last runs with drafts, in units of the expected time.
        self._lateness = deque([1.0] * (_BLAME_STEPS // 2), maxlen=_BLAME_STEPS)
        self._plain: list[tuple[Load, StepTimes]] = []  # steps without drafts that were not learnt from yet
        self._steps = 0

    def copy(self) -> Controller:
        """A controller with the same state. Both share what is known of the machine."""
        self._learn_from_plain_steps()
        return deepcopy(self, {id(self.costs): self.costs})

    def budgets(
        self, candidate: Candidate, works: Items[Work], chances: Items[float], load: Load
    ) -> list[tuple[int, str]]:
        """How many nodes a proposer may draft for each work, and why. `chances` are the probabilities that a draft at
        hand has the next token: then there is nothing to gain."""
        account = self._account(candidate)
        if not candidate.is_free and not self.costs.is_known(load.rows):
            self._learn_from_plain_steps()
            return [(0, MEASURING)] * len(works)
        offers = account.worth.offers(candidate, load, self.costs, self._token_s(load))
        is_timed = self.costs.draft(candidate.name, 1, 1) is not None
        budgets: list[tuple[int, str]] = []
        ledger_s = account.ledger_s
        for work, chance in zip(works, chances, strict=True):
            offer = next((offer for offer in offers if offer.cost_s <= ledger_s), None)
            reason = LEDGER if offer is None else self._decide(candidate, account, work, 1 - chance, offer)
            if offer is None or reason not in (DRAFTED, PROBE) or not (is_timed or ledger_s == account.ledger_s):
                budgets.append((0, reason if reason != DRAFTED else RESTING))  # one sequence is enough to time it
                continue
            ledger_s -= offer.cost_s
            account.queried_s = self._now_s
            budgets.append((min(offer.nodes, work.num_lookahead_tokens), reason))
        return budgets

    def _decide(self, candidate: Candidate, account: _Account, work: Work, chance: float, offer: Offer) -> str:
        sequence = work.sequence
        behind = account.behind.get(sequence.id, _Behind())
        missing = 0 if candidate.is_free else behind.num_missing(sequence)
        catch_up_s = self.costs.catch_up(candidate.name, missing)
        gain_s = chance * account.worth.relative(sequence.id) * offer.gain_s - _MARGIN * offer.cost_s
        if gain_s <= 0:
            is_due = offer.cost_s + catch_up_s <= _SHARE * (self._now_s - account.queried_s)
            return PROBE if is_due and catch_up_s <= account.saved_s else RESTING
        if catch_up_s > gain_s * (sequence.max_tokens - sequence.num_output_tokens):
            return TOO_UNSURE
        return DRAFTED if catch_up_s <= account.saved_s else LEDGER

    def observe_query(
        self, candidate: Candidate, works: Items[Work], budgets: Items[int], drafts: Items[Draft], seconds: float
    ) -> list[Draft]:
        """Learn from a query and what it took; returns the drafts with probabilities that follow the record."""
        account, name = self._account(candidate), candidate.name
        sequences = [work.sequence for work in works]
        known_s = (self.costs.draft(name, max(budgets), len(works)) or 0.0) if any(drafts) else 0.0
        behind = [account.behind.setdefault(sequence.id, _Behind()) for sequence in sequences]
        missing = [one.num_missing(sequence) for one, sequence in zip(behind, sequences, strict=True)]
        catch_up_s = max(0.0, seconds - known_s) / max(1, sum(map(bool, missing)))
        calibrated: list[Draft] = []
        is_catching_up = False
        for sequence, draft, one, tokens in zip(sequences, drafts, behind, missing, strict=True):
            survivals = self.acceptance.survivals(sequence.id, draft)
            calibrated.append(replace(draft, scores=tuple(survivals)) if draft else draft)
            one.spent_s += catch_up_s if tokens else 0.0
            # The target's own time for these tokens is the limit: beyond it, the proposer is merely slow.
            is_late = bool(tokens) and one.spent_s > self.costs.run(tokens, tokens * sequence.num_tokens)
            is_catching_up |= bool(tokens) and not is_late
            if tokens and not is_late and not draft and not candidate.is_free:
                continue  # it goes on in the next steps
            if tokens and not is_late:
                self.costs.observe_catch_up(name, tokens, one.spent_s)
            account.behind[sequence.id] = _Behind(sequence.counters.preemptions, sequence.num_tokens)
            account.worth.observe(sequence.id, survivals)
        draft_s = min(seconds, known_s) if is_catching_up else seconds
        if not is_catching_up:
            self.costs.observe_draft(name, max(budgets), len(works), seconds)
        self._query_s += seconds
        account.saved_s -= seconds - draft_s
        account.book(-draft_s)
        return calibrated

    def choose(self, works: Items[Work], drafts: Items[Draft | None], load: Load) -> tuple[list[Draft], list[str]]:
        """What to verify of each draft, and why; None stands for a sequence that is not the controller's.

        All nodes of all sequences compete. The most probable ones are kept, as many as give the most tokens per second
        and as the ledgers of their proposers can afford to lose.
        """
        if not any(drafts):
            return [NO_DRAFT] * len(drafts), [NOTHING_PROPOSED] * len(drafts)
        self._learn_from_plain_steps()
        nodes: list[_Node] = []
        for index, draft in enumerate(drafts):
            if draft is not None and draft.q is None:
                nodes += [(survival, index, node) for node, survival in enumerate(draft.scores)]
        nodes.sort(key=lambda node: (-node[0], node[1], node[2]))
        # The gain of drafting is unknown until the cost of plain decoding is known.
        is_known = self.costs.is_known(load.rows)
        nodes = nodes[: self._best_count(works, nodes, load)] if is_known else []
        wanted = {index for _, index, _ in nodes}
        kept = self._affordable(works, drafts, nodes, load)
        chosen: list[Draft] = []
        reasons: list[str] = []
        for index, draft in enumerate(drafts):
            if draft is None or draft.q is not None:
                chosen.append(draft or NO_DRAFT)  # a sampled draft is verified whole: cutting it would bias the output
            else:
                chosen.append(draft.only(sorted(kept[index])))
            if chosen[index]:
                reasons.append(DRAFTED)
            elif not draft:
                reasons.append(NOTHING_PROPOSED)
            else:
                reasons.append(LEDGER if index in wanted else TOO_UNSURE if is_known else MEASURING)
        return chosen, reasons

    def observe(
        self,
        works: Items[Work],
        drafts: Items[Mapping[str, Draft] | None],
        commits: Items[Commit],
        load: Load,
        times: StepTimes,
    ) -> None:
        """Learn from a step. `drafts` are those of each proposer as it made them, None for a sequence that is not the
        controller's; `load` is the load without them.

        Steps without drafts teach only the cost of runs. Several of them are learnt from at once: code that runs once a
        step has left the processor's caches, and is slow.
        """
        self._steps += 1
        if self._steps % _REFRESH_STEPS == 0:
            for account in self._accounts.values():
                account.worth.refresh()
        if not any(drafts) and not any(work.draft for work in works):
            self._plain.append((load, times))
            if len(self._plain) >= _REFRESH_STEPS:
                self._learn_from_plain_steps()
            return
        self._learn_from_plain_steps()
        run = Load.of(works)
        plain, expected = self.costs.run(load.rows, load.keys), self.costs.run(run.rows, run.keys)
        token_s = plain / max(1, load.sequences)
        self._learn_from_run(run, times, plain, token_s * sum(len(commit.tokens) for commit in commits))
        row_s = 0.0
        if run.rows > load.rows:
            self._lateness.append((times.run_s + times.overhead_s) / expected)
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
            self._accounts[name].book(accepted[name] * token_s - rows[name] * row_s)

    def release(self, sequence_ids: Iterable[int]) -> None:
        gone = list(sequence_ids)
        self.acceptance.release(gone)
        for account in self._accounts.values():
            for sequence_id in gone:
                account.worth.release(sequence_id)
                account.behind.pop(sequence_id, None)

    def _account(self, candidate: Candidate) -> _Account:
        if candidate.name not in self._accounts:
            self._accounts[candidate.name] = _Account(candidate, self._allowance_s)
        return self._accounts[candidate.name]

    def _learn_from_plain_steps(self) -> None:
        for load, times in self._plain:
            seconds = times.run_s + times.overhead_s
            self._learn_from_run(load, times, seconds, seconds)
        self._plain.clear()

    def _learn_from_run(self, run: Load, times: StepTimes, without_s: float, plain_s: float) -> None:
        """A run of so many rows, which would have taken `without_s` without drafts. Plain decoding would have taken
        `plain_s` for its tokens."""
        self.costs.observe_overhead(times.overhead_s)
        self.costs.observe_run(run.rows, run.keys, times.run_s)
        seconds = self._query_s + times.run_s + times.overhead_s
        self._now_s, self._query_s = self._now_s + seconds, 0.0
        self._spent_s = _PACE_MEMORY * self._spent_s + seconds
        self._plain_s = _PACE_MEMORY * self._plain_s + plain_s
        for account in self._accounts.values():
            account.book(_SHARE * without_s)

    def _token_s(self, load: Load) -> float:
        """What a token takes at present, with what drafts save."""
        return self.costs.run(load.rows, load.keys) / max(1, load.sequences) / max(1.0, self._plain_s / self._spent_s)

    def _best_count(self, works: Items[Work], nodes: list[_Node], load: Load) -> int:
        """How many of the most probable nodes save the most time."""
        keys, plain, token_s = load.keys, self.costs.run(load.rows, load.keys), self._token_s(load)
        best, best_s, saved_s = 0, 0.0, 0.0
        for count, (survival, index, _) in enumerate(nodes, 1):
            keys += _reach(works[index])
            saved_s += survival * token_s
            net_s = saved_s - _MARGIN * (self.costs.run(load.rows + count, keys) - plain)
            if net_s > best_s:
                best, best_s = count, net_s
        return best

    def _affordable(
        self, works: Items[Work], drafts: Items[Draft | None], nodes: list[_Node], load: Load
    ) -> list[list[int]]:
        """By work, the nodes that the ledgers of their proposers can afford to lose; none without its parent."""
        kept: list[list[int]] = [[] for _ in works]
        keys = load.keys + sum(_reach(works[index]) for _, index, _ in nodes)
        extra_s = self.costs.run(load.rows + len(nodes), keys) - self.costs.run(load.rows, load.keys)
        risked: Counter[str] = Counter()
        for _, index, node in nodes:
            draft = drafts[index]
            assert draft is not None
            name, parent = draft.origin[node], draft.parents[node]
            is_covered = (risked[name] + 1) * extra_s / len(nodes) <= self._accounts[name].ledger_s
            if is_covered and (parent < 0 or parent in kept[index]):
                risked[name] += 1
                kept[index].append(node)
        return kept


def _reach(work: Work) -> int:
    """Keys that one more row of a work reads."""
    return work.sequence.num_computed_tokens + work.num_new_tokens
