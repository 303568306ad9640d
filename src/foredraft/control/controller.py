"""When to draft, and how much: per step and sequence, so that the whole batch emits the most tokens per second.

A ledger bounds what drafting may lose. It starts with a small allowance, which grows a little with time. Gains against
plain decoding are added and costs are subtracted. A step may only risk what is in the ledger. The ledger is capped, so
that old gains do not pay for a sequence on which drafting fails. Catch-up runs of a draft model are paid from all
savings, which have no cap. A proposer with unknown cost is measured once, on one sequence.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Iterable
from collections.abc import Sequence as Items
from copy import deepcopy
from typing import NamedTuple

from foredraft.control.acceptance import SUREST, Acceptance
from foredraft.control.costs import Costs
from foredraft.control.economics import best_length
from foredraft.types import NO_DRAFT, Commit, Draft, Work

DRAFTED, NOTHING_PROPOSED, TOO_UNSURE, LEDGER = "drafted", "nothing proposed", "would not pay", "ledger"
MEASURING, RESTING, PROBE = "measuring", "resting", "probe"

_ALLOWANCE_S = 0.02  # the loss that is allowed before any gain, or one plain step where that takes longer
_ALLOWANCE_SHARE = 0.005  # of all time spent, added to the allowance
_MOST_SAVED = 2.0  # allowances: the cap of the ledger
_QUERY_S = 0.02  # time for queries whose drafts are not worth verifying
_QUERY_SHARE = 0.005  # of all time spent, added to it
_MOST_QUERY_S = 0.005  # the most that one step is charged: a new sequence takes more, but only once
_LEAST_SURVIVAL = 0.02  # a node with a lower probability is not considered
_MARGIN = 1.1  # drafting must promise this multiple of the plain rate: what looks best is partly luck
_BLAME_STEPS = 5  # drafts are charged the median lateness of so many runs: one late run may have another cause
_PLAIN_STEPS = 8  # steps without drafts that are learnt from at once
_NODE_COUNTS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)  # node counts that are tried on a step to see if any would pay
_DEPTHS = (1, 2, 4)  # and so many nodes for every sequence, which are more in a large batch
_NO_CATCH_UP = 16  # tokens that a draft model runs together with its next draft, at no cost of their own
_CATCH_UP_TOKENS = 256  # catch-up tokens that a draft model runs in one call, at least
_CATCH_UP_BESIDE = 16  # and in a call that also drafts for other sequences, which wait for it
_PATIENCE = 8 * _CATCH_UP_TOKENS  # fewer tokens than these get as many calls as these would
_PROBE_EVERY = 64  # steps at least between two queries of a resting draft model
_PROBE_SHARE = 0.005  # of all time spent: what these queries may cost

_Node = tuple[float, int, int]  # survival, index of the work, node of its draft
_Pair = tuple[int, str]  # a sequence's id and a proposer


class Load(NamedTuple):
    """What a step runs in any case, with or without drafts."""

    rows: int
    keys: int  # that those rows read
    sequences: int  # that get a token

    @classmethod
    def of(cls, works: Items[Work]) -> Load:
        rows = keys = sequences = 0
        for work in works:  # as `_keys` and `Work.reaches_end` compute it, in half the time: this runs in every step
            own = work.num_rows
            reach = work.sequence.num_computed_tokens + work.num_new_tokens
            rows += own
            keys += own * reach
            sequences += reach == work.sequence.num_tokens
        return cls(rows, keys, sequences)


class StepTimes(NamedTuple):
    """The times of a step: drafting with proposers that take time, the target's run, and all the rest."""

    draft_s: float
    run_s: float
    overhead_s: float
    catch_up_s: float = 0.0  # of draft models, over tokens that they had not computed
    query_s: float = 0.0  # of proposers that take next to no time


class Controller:
    """Decides for the sequences with `auto`. Plain Python: the engine measures all times and passes them in."""

    def __init__(self, costs: Costs) -> None:
        self.costs = costs
        self.acceptance = Acceptance()
        self._allowance_s = max(_ALLOWANCE_S, costs.run(1, 0))
        self.ledger_s = self.saved_s = self._allowance_s
        self._rested: Counter[_Pair] = Counter()  # steps since the last query
        self._computed: dict[_Pair, tuple[int, int]] = {}  # preemptions and tokens of the sequence at the last query
        self._catching_up: dict[_Pair, int] = {}  # catch-up tokens before the next draft
        self._catch_up_s: defaultdict[str, float] = defaultdict(float)  # by proposer, spent on catching up so far
        self._caught_up: Counter[str] = Counter()  # by proposer, tokens that it must have caught up with by now
        self._probing_s = 0.0  # what queries of resting draft models may cost
        self._query_s = _QUERY_S  # what queries may still cost until a draft is worth verifying
        self._may_pay: dict[tuple[int, int], bool] = {}  # (rows, sequences) -> whether any draft could pay
        self._steps = 0
        # The times of the last runs with drafts, in units of the expected time.
        self._lateness = deque([1.0] * (_BLAME_STEPS // 2), maxlen=_BLAME_STEPS)
        self._plain: list[tuple[Load, StepTimes]] = []  # steps without drafts that were not learnt from yet

    def copy(self) -> Controller:
        """A controller with the same state. Both share what is known of the machine."""
        self._learn_from_plain_steps()
        return deepcopy(self, {id(self.costs): self.costs})

    def draft_budget(self, work: Work, proposer: str, origin: str, most: int, load: Load) -> tuple[int, str]:
        """How many nodes a proposer that takes time may draft, and why. `origin` is the name in its drafts, which does
        not depend on its options."""
        sequence = work.sequence
        pair = (sequence.id, proposer)
        preemptions, computed = self._computed.get(pair, (0, 0))
        catch_up_tokens = sequence.num_tokens - (computed if preemptions == sequence.counters.preemptions else 0)
        catch_up_tokens = catch_up_tokens if catch_up_tokens > _NO_CATCH_UP else 0
        wanted, reason = self._wanted(work, pair, origin, most, load, catch_up_tokens)
        if wanted:
            self._computed[pair] = (sequence.counters.preemptions, sequence.num_tokens)
            if catch_up_tokens:
                self._catching_up[pair] = catch_up_tokens
        return wanted, reason

    def _wanted(
        self, work: Work, pair: _Pair, origin: str, most: int, load: Load, catch_up_tokens: int
    ) -> tuple[int, str]:
        sequence_id, proposer = pair
        per_node, rate = self.costs.draft(proposer), self.acceptance.rate(sequence_id, origin)
        if per_node is None:
            is_queried_by_another = pair not in self._catching_up and self._is_catching_up(proposer)
            return (0, RESTING) if is_queried_by_another else (1, PROBE)
        plain, catch_up = self.costs.run(load.rows, load.keys), self.costs.catch_up(proposer, catch_up_tokens)
        if rate is None:
            return self._probe(pair, per_node, catch_up)
        sequences = max(1, load.sequences)
        reach = _keys(work, 1)

        def verify(rows: int) -> float:
            further = sequences * (rows - 1)
            return self.costs.run(load.rows + further, load.keys + further * reach) / plain

        best = best_length([rate] * most, sequences * per_node / plain, verify)
        if best.speedup <= _MARGIN:
            return self._probe(pair, per_node + (verify(2) - 1) * plain, catch_up)
        left = work.sequence.max_tokens - work.sequence.num_output_tokens
        if catch_up > left * plain / sequences * (1 - 1 / best.speedup):
            return 0, TOO_UNSURE
        if best.k * per_node + (verify(best.k + 1) - 1) * plain > self.ledger_s or catch_up > max(0.0, self.saved_s):
            return 0, LEDGER
        self._rested[pair] = 0
        return best.k, DRAFTED

    def may_query(self, load: Load) -> bool:
        """Whether to query the proposers that take next to no time. Not where no number of nodes would pay, even at the
        highest acceptance. Not where queries have brought nothing for long: a query takes little time, but many
        sequences make it count."""
        shape = (load.rows, load.sequences)
        if shape not in self._may_pay:
            sequences, reach = max(1, load.sequences), load.keys // load.rows
            least = _MARGIN * sequences / self.costs.run(load.rows, load.keys)
            self._may_pay[shape] = any(
                _most_tokens(sequences, more) / self.costs.run(load.rows + more, load.keys + more * reach) > least
                for more in (*_NODE_COUNTS, *(depth * sequences for depth in _DEPTHS))
            )
        return self._query_s > 0 and self._may_pay[shape]

    def choose(self, works: Items[Work], drafts: Items[Draft | None], load: Load) -> tuple[list[Draft], list[str]]:
        """What to verify of each draft, and why; None stands for a sequence that is not the controller's.

        All nodes of all sequences compete. The most probable ones are kept, as many as give the most tokens per second.
        """
        if not any(drafts):
            return [NO_DRAFT] * len(drafts), [NOTHING_PROPOSED] * len(drafts)
        self._learn_from_plain_steps()
        nodes: list[_Node] = []
        least = self._least_survival(load)
        for index, draft in enumerate(drafts):
            if draft is not None and draft.q is None:
                survivals = self.acceptance.survivals(works[index].sequence.id, draft, least)
                nodes += [(s, index, node) for node, s in enumerate(survivals) if s >= least]
        nodes.sort(key=lambda node: (-node[0], node[1], node[2]))
        if not nodes:
            wanted, affordable, why_not = 0, 0, TOO_UNSURE
        elif self.costs.is_known(load.rows):
            wanted = self._best_count(works, nodes, load)
            affordable, why_not = self._affordable(works, nodes[:wanted], load), TOO_UNSURE
            self._query_s = _QUERY_S if wanted else self._query_s
        else:  # the gain of drafting is unknown until the cost of plain decoding is known
            wanted, affordable, why_not = 0, 0, MEASURING
        kept: list[list[int]] = [[] for _ in works]
        for _, index, node in nodes[:affordable]:
            kept[index].append(node)
        too_risky = {index for _, index, _ in nodes[affordable:wanted]}
        chosen: list[Draft] = []
        reasons: list[str] = []
        for index, draft in enumerate(drafts):
            if (
                draft is None or draft.q is not None
            ):  # a sampled draft is verified whole: cutting it would bias the output
                chosen.append(draft or NO_DRAFT)
            else:
                chosen.append(draft.only(sorted(kept[index])))
            if chosen[index]:
                reasons.append(DRAFTED)
            elif not draft:
                reasons.append(NOTHING_PROPOSED)
            else:
                reasons.append(LEDGER if index in too_risky else why_not)
        return chosen, reasons

    def observe_draft(self, proposer: str, nodes: int, seconds: float, without: Items[int] = ()) -> float:
        """Learn from a call of a proposer that takes time; returns how much of that time was spent catching up.
        `without` are the sequences of the call that got no draft: those that catch up go on with it."""
        pending = [pair for pair in self._catching_up if pair[1] == proposer]
        catch_up_tokens = sum(self._catching_up[pair] for pair in pending)
        is_done = nodes > 0 and not any(sequence_id in without for sequence_id, _ in pending)
        if pending and not is_done:
            self._caught_up[proposer] += _CATCH_UP_BESIDE if nodes else _CATCH_UP_TOKENS
        is_catching_up = catch_up_tokens > 0 and self._caught_up[proposer] <= max(_PATIENCE, catch_up_tokens)
        catch_up_s = max(0.0, seconds - nodes * (self.costs.draft(proposer) or 0.0)) if is_catching_up else 0.0
        self._catch_up_s[proposer] += catch_up_s
        if is_catching_up and is_done:
            self.costs.observe_catch_up(proposer, catch_up_tokens, self._catch_up_s[proposer])
        elif not is_catching_up:
            self.costs.observe_draft(proposer, nodes, seconds)
        if is_done or not is_catching_up:
            self._catch_up_s[proposer] = self._caught_up[proposer] = 0
            for pair in pending:
                del self._catching_up[pair]
        return catch_up_s

    def observe(
        self, works: Items[Work], drafts: Items[Draft | None], commits: Items[Commit], load: Load, times: StepTimes
    ) -> None:
        """Learn from a step. `drafts` are the drafts before they were cut, `load` is the load without them.

        Steps without drafts teach only the cost of runs. Several of them are learnt from at once: code that runs once a
        step has left the processor's caches, and is slow.
        """
        self._steps += 1
        if self._steps % _PLAIN_STEPS == 0:
            self._may_pay.clear()  # the costs may have changed
        if not times.draft_s and not times.catch_up_s and not any(drafts) and not any(work.draft for work in works):
            self._plain.append((load, times))
            if len(self._plain) >= _PLAIN_STEPS:
                self._learn_from_plain_steps()
            return
        self._learn_from_plain_steps()
        run = Load.of(works) if any(work.draft for work in works) else load
        plain = self.costs.run(load.rows, load.keys)
        expected = plain if run == load else self.costs.run(run.rows, run.keys)
        self.costs.observe_overhead(times.overhead_s)
        self.costs.observe_run(run.rows, run.keys, times.run_s)
        cost = 0.0
        if run.rows > load.rows:
            self._lateness.append((times.run_s + times.overhead_s) / expected)
            cost = sorted(self._lateness)[len(self._lateness) // 2] * expected - plain
        mine = [commit for draft, commit in zip(drafts, commits, strict=True) if draft is not None and commit.tokens]
        further = sum(len(commit.tokens) - 1 for commit in mine)
        gain = further * self._plain_token(load) if further else 0.0
        self.saved_s -= times.catch_up_s
        if mine:
            self._book(gain - cost - times.draft_s, plain, times.query_s)
        for draft, commit in zip(drafts, commits, strict=True):
            if draft is not None:
                self.acceptance.observe(commit.sequence.id, draft, commit.tokens)

    def release(self, sequence_ids: Iterable[int]) -> None:
        gone = set(sequence_ids)
        self.acceptance.release(gone)
        for by_pair in (self._rested, self._computed, self._catching_up):
            for pair in [pair for pair in by_pair if pair[0] in gone]:
                del by_pair[pair]

    def forget(self, proposer: str) -> None:
        """Forget a proposer that is closed and that no sequence uses."""
        self.costs.forget(proposer)
        self._catch_up_s.pop(proposer, None)
        self._caught_up.pop(proposer, None)

    def _learn_from_plain_steps(self) -> None:
        for load, times in self._plain:
            self.costs.observe_overhead(times.overhead_s)
            self.costs.observe_run(load.rows, load.keys, times.run_s)
            self._book(0.0, times.run_s + times.overhead_s, times.query_s)
        self._plain.clear()

    def _book(self, earned_s: float, plain_s: float, query_s: float) -> None:
        """Book what a step earned. Without drafts it would have taken `plain_s`; queries took `query_s`."""
        earned_s += _ALLOWANCE_SHARE * plain_s
        self._probing_s += _PROBE_SHARE * plain_s
        self._query_s = min(_QUERY_S, self._query_s + _QUERY_SHARE * plain_s - min(query_s, _MOST_QUERY_S))
        self.saved_s += earned_s
        self.ledger_s = min(_MOST_SAVED * self._allowance_s, self.ledger_s + earned_s)

    def _plain_token(self, load: Load) -> float:
        """Seconds per token of a step in which every sequence gets one token and nothing else runs."""
        return self.costs.run(load.sequences, load.keys * load.sequences // load.rows) / load.sequences

    def _is_catching_up(self, proposer: str) -> bool:
        return any(pair[1] == proposer for pair in self._catching_up)

    def _probe(self, pair: _Pair, risk: float, catch_up: float) -> tuple[int, str]:
        """Query a resting draft model for one token, so rarely that its cost is a small share of the time between."""
        self._rested[pair] += 1
        if self._rested[pair] < _PROBE_EVERY or risk > self.ledger_s or risk + catch_up > self._probing_s:
            return 0, RESTING
        self._probing_s -= risk + catch_up
        self._rested[pair] = 0
        return 1, PROBE

    def _least_survival(self, load: Load) -> float:
        """A node with a lower probability cannot pay: its row costs more than it is expected to gain."""
        worth = self.costs.run(load.rows, load.keys) / max(1, load.sequences)  # of a token
        return max(_LEAST_SURVIVAL, self.costs.least_row() / worth)

    def _best_count(self, works: Items[Work], nodes: list[_Node], load: Load) -> int:
        """How many of the most probable nodes give the most tokens per second."""
        tokens, keys = float(load.sequences), load.keys
        best, best_rate = 0, _MARGIN * tokens / self.costs.run(load.rows, load.keys)
        for count, (survival, index, _) in enumerate(nodes, 1):
            tokens += survival
            keys += _keys(works[index], 1)
            rate = tokens / self.costs.run(load.rows + count, keys)
            if rate > best_rate:
                best, best_rate = count, rate
        return best

    def _affordable(self, works: Items[Work], nodes: list[_Node], load: Load) -> int:
        """How many of these nodes the ledger can afford to lose."""
        limit = self.ledger_s + self.costs.run(load.rows, load.keys)
        keys = load.keys + sum(_keys(works[index], 1) for _, index, _ in nodes)
        count = len(nodes)
        while count and self.costs.run(load.rows + count, keys) > limit:
            count -= 1
            keys -= _keys(works[nodes[count][1]], 1)
        return count


def _most_tokens(sequences: int, nodes: int) -> float:
    """Tokens of a step with the highest acceptance: chains of equal length, one for every sequence."""
    depth, deeper = divmod(nodes, sequences)
    return sequences * sum(SUREST**i for i in range(depth + 1)) + deeper * SUREST ** (depth + 1)


def _keys(work: Work, rows: int) -> int:
    """Keys that so many rows of a work read, not counting the rows themselves."""
    return rows * (work.sequence.num_computed_tokens + work.num_new_tokens)
