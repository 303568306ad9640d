"""When to guess, and how much: per step and sequence, so that the batch as a whole writes the most tokens per second.

Guessing may never cost more than a little, so there is a ledger: a small allowance, which grows a little with time,
plus what guessing has gained so far against plain decoding, minus what it has cost. A step may only risk what is in it.
The ledger is capped, so that old gains do not pay for a text on which guessing fails. A model that must first read a
text it has not followed is paid from what was saved in all, which is not. What a proposer takes that was never asked
can only be found out: one text asks it, whatever that costs.
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

_ALLOWANCE_S = 0.02  # what may be lost before anything is gained, or one plain step where that takes longer
_ALLOWANCE_SHARE = 0.005  # and on top, of all time spent
_MOST_SAVED = 2.0  # allowances: what is beyond that does not pay for later losses
_QUERY_S = 0.02  # of asking for guesses none of which is worth verifying
_QUERY_SHARE = 0.005  # and on top, of all time spent
_MOST_QUERY_S = 0.005  # that a step is charged with: a new text takes more, but only once
_LEAST_SURVIVAL = 0.02  # a node that is less likely is not even considered
_MARGIN = 1.1  # guessing must promise this much more than not to guess: what looks best is partly luck
_BLAME_STEPS = 5  # guesses are charged as if all were as late as the median: one was held up by something else
_PLAIN_STEPS = 8  # steps without a guess that are learnt from at once
_NODE_COUNTS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)  # numbers of guesses that are tried on a step to see if any would pay
_DEPTHS = (1, 2, 4)  # and so many behind every text, which in a large batch are more
_FOLLOWS = 16  # tokens of a text that a model reads along with its next guess, at no cost of their own
_PATIENCE = 8  # calls in which a model that reads a text may guess nothing,
_READS = 256  # or one for so many tokens of it
_PROBE_EVERY = 64  # steps at least, after which a resting model is asked again
_PROBE_SHARE = 0.005  # and what that may cost, of all time spent

_Node = tuple[float, int, int]  # survival, index of the work, node of its draft
_Pair = tuple[int, str]  # a sequence's id and a proposer


class Load(NamedTuple):
    """What a step runs in any case."""

    rows: int
    keys: int  # that those rows read
    texts: int  # sequences that get a token

    @classmethod
    def of(cls, works: Items[Work]) -> Load:
        rows = keys = texts = 0
        for work in works:  # what `_keys` and `Work.reaches_end` say, but in half the time: every step comes by here
            own = work.num_rows
            reach = work.sequence.num_computed_tokens + work.num_new_tokens
            rows += own
            keys += own * reach
            texts += reach == work.sequence.num_tokens
        return cls(rows, keys, texts)


class StepTimes(NamedTuple):
    """What a step took: guessing, as far as it takes time worth counting, the target's run, and all the rest."""

    draft_s: float
    run_s: float
    overhead_s: float
    catch_up_s: float = 0.0  # of a model, over a text that it had not followed
    query_s: float = 0.0  # of proposers that are asked at no risk


class Controller:
    """Decides for the sequences that leave it to the engine. Plain Python; its clock is what the engine tells it."""

    def __init__(self, costs: Costs) -> None:
        self.costs = costs
        self.acceptance = Acceptance()
        self._allowance_s = max(_ALLOWANCE_S, costs.run(1, 0))
        self.ledger_s = self.saved_s = self._allowance_s
        self._rested: Counter[_Pair] = Counter()  # steps since it was last asked
        self._read: dict[_Pair, tuple[int, int]] = {}  # preemptions and tokens of the text when it was last asked
        self._catching_up: dict[_Pair, int] = {}  # tokens that it reads before it guesses again
        self._catch_up_s: defaultdict[str, float] = defaultdict(float)  # by proposer, spent on those so far
        self._empty_calls: Counter[str] = Counter()  # by proposer, calls without any guess
        self._probing_s = 0.0  # what asking resting models may take
        self._query_s = _QUERY_S  # what asking may still take until a guess is worth verifying
        self._may_pay: dict[tuple[int, int], bool] = {}  # (rows, texts) -> whether any guess could
        self._steps = 0
        # What the last runs with guesses took, in units of what was expected.
        self._lateness = deque([1.0] * (_BLAME_STEPS // 2), maxlen=_BLAME_STEPS)
        self._plain: list[tuple[Load, StepTimes]] = []  # steps without a guess that nothing was learnt from yet

    def copy(self) -> Controller:
        """One that goes on from here by itself; what is known of the machine they share."""
        self._learn_from_plain_steps()
        return deepcopy(self, {id(self.costs): self.costs})

    def draft_budget(self, work: Work, proposer: str, origin: str, most: int, load: Load) -> tuple[int, str]:
        """How many guesses to ask of a proposer that takes time to guess, and why. `origin` is the name that its
        guesses bear, whatever its options."""
        sequence = work.sequence
        pair = (sequence.id, proposer)
        preemptions, read = self._read.get(pair, (0, 0))
        catch_up_tokens = sequence.num_tokens - (read if preemptions == sequence.counters.preemptions else 0)
        catch_up_tokens = catch_up_tokens if catch_up_tokens > _FOLLOWS else 0
        wanted, reason = self._wanted(work, pair, origin, most, load, catch_up_tokens)
        if wanted:
            self._read[pair] = (sequence.counters.preemptions, sequence.num_tokens)
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
        texts = max(1, load.texts)
        reach = _keys(work, 1)

        def verify(rows: int) -> float:
            further = texts * (rows - 1)
            return self.costs.run(load.rows + further, load.keys + further * reach) / plain

        best = best_length([rate] * most, texts * per_node / plain, verify)
        if best.speedup <= _MARGIN:
            return self._probe(pair, per_node + (verify(2) - 1) * plain, catch_up)
        left = work.sequence.max_tokens - work.sequence.num_output_tokens
        if catch_up > left * plain / texts * (1 - 1 / best.speedup):
            return 0, TOO_UNSURE
        if best.k * per_node + (verify(best.k + 1) - 1) * plain > self.ledger_s or catch_up > max(0.0, self.saved_s):
            return 0, LEDGER
        self._rested[pair] = 0
        return best.k, DRAFTED

    def may_query(self, load: Load) -> bool:
        """Whether proposers that are asked at no risk should be. Not where no number of guesses would pay beside what
        runs in any case, as sure as guesses can be, nor where asking has gone on for long in vain: it takes little
        time, but in a large batch not nothing."""
        shape = (load.rows, load.texts)
        if shape not in self._may_pay:
            texts, reach = max(1, load.texts), load.keys // load.rows
            least = _MARGIN * texts / self.costs.run(load.rows, load.keys)
            self._may_pay[shape] = any(
                _most_tokens(texts, more) / self.costs.run(load.rows + more, load.keys + more * reach) > least
                for more in (*_NODE_COUNTS, *(depth * texts for depth in _DEPTHS))
            )
        return self._query_s > 0 and self._may_pay[shape]

    def choose(self, works: Items[Work], drafts: Items[Draft | None], load: Load) -> tuple[list[Draft], list[str]]:
        """What to verify of each draft, and why; None stands for a sequence that is not the controller's.

        All nodes of all sequences compete: the likeliest come first, as many as make the most tokens per second.
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
        nodes.sort(key=lambda branch: (-branch[0], branch[1], branch[2]))
        if not nodes:
            wanted, affordable, why_not = 0, 0, TOO_UNSURE
        elif self.costs.is_known(load.rows):
            wanted = self._best_count(works, nodes, load)
            affordable, why_not = self._affordable(works, nodes[:wanted], load), TOO_UNSURE
            self._query_s = _QUERY_S if wanted else self._query_s
        else:  # without knowing what plain decoding takes, nothing can be said about what guessing gains
            wanted, affordable, why_not = 0, 0, MEASURING
        kept: list[list[int]] = [[] for _ in works]
        for _, index, node in nodes[:affordable]:
            kept[index].append(node)
        too_risky = {index for _, index, _ in nodes[affordable:wanted]}
        chosen: list[Draft] = []
        reasons: list[str] = []
        for index, draft in enumerate(drafts):
            if draft is None or draft.q is not None:  # a sampled draft is verified whole, or the text is biased
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

    def observe_draft(self, proposer: str, nodes: int, seconds: float) -> float:
        """Learn from a call of a proposer that takes time; returns how much of it went into texts that it had not
        followed."""
        reading = [pair for pair in self._catching_up if pair[1] == proposer]
        catch_up_tokens = sum(self._catching_up[pair] for pair in reading)
        self._empty_calls[proposer] = 0 if nodes else self._empty_calls[proposer] + 1
        is_catching_up = catch_up_tokens > 0 and self._empty_calls[proposer] <= max(
            _PATIENCE, catch_up_tokens // _READS
        )
        catch_up_s = max(0.0, seconds - nodes * (self.costs.draft(proposer) or 0.0)) if is_catching_up else 0.0
        self._catch_up_s[proposer] += catch_up_s
        if is_catching_up and nodes:
            self.costs.observe_catch_up(proposer, catch_up_tokens, self._catch_up_s[proposer])
        elif not is_catching_up:
            self.costs.observe_draft(proposer, nodes, seconds)
        if nodes or not is_catching_up:
            self._catch_up_s[proposer] = 0.0
            for pair in reading:
                del self._catching_up[pair]
        return catch_up_s

    def observe(
        self, works: Items[Work], drafts: Items[Draft | None], commits: Items[Commit], load: Load, times: StepTimes
    ) -> None:
        """Learn from a step: `drafts` are those before anything was cut from them, `load` is that without them.

        Steps without a guess teach only what runs take, several of them at once: code that is called once a step is out
        of the caches by then, and slow.
        """
        self._steps += 1
        if self._steps % _PLAIN_STEPS == 0:
            self._may_pay.clear()  # by now it may be otherwise
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
        for by_pair in (self._rested, self._read, self._catching_up):
            for pair in [pair for pair in by_pair if pair[0] in gone]:
                del by_pair[pair]

    def _learn_from_plain_steps(self) -> None:
        for load, times in self._plain:
            self.costs.observe_overhead(times.overhead_s)
            self.costs.observe_run(load.rows, load.keys, times.run_s)
            self._book(0.0, times.run_s + times.overhead_s, times.query_s)
        self._plain.clear()

    def _book(self, earned_s: float, plain_s: float, query_s: float) -> None:
        """Enter what a step earned that would have taken `plain_s` without guesses, and what asking took."""
        earned_s += _ALLOWANCE_SHARE * plain_s
        self._probing_s += _PROBE_SHARE * plain_s
        self._query_s = min(_QUERY_S, self._query_s + _QUERY_SHARE * plain_s - min(query_s, _MOST_QUERY_S))
        self.saved_s += earned_s
        self.ledger_s = min(_MOST_SAVED * self._allowance_s, self.ledger_s + earned_s)

    def _plain_token(self, load: Load) -> float:
        """Seconds per token of a step in which every text gets one and nothing else is run."""
        return self.costs.run(load.texts, load.keys * load.texts // load.rows) / load.texts

    def _is_catching_up(self, proposer: str) -> bool:
        return any(pair[1] == proposer for pair in self._catching_up)

    def _probe(self, pair: _Pair, risk: float, catch_up: float) -> tuple[int, str]:
        """Ask a resting model for one guess, but only so often that its cost is lost in the time between."""
        self._rested[pair] += 1
        if self._rested[pair] < _PROBE_EVERY or risk > self.ledger_s or risk + catch_up > self._probing_s:
            return 0, RESTING
        self._probing_s -= risk + catch_up
        self._rested[pair] = 0
        return 1, PROBE

    def _least_survival(self, load: Load) -> float:
        """A node that is less likely cannot pay, whatever comes with it: its row costs more than it promises."""
        worth = self.costs.run(load.rows, load.keys) / max(1, load.texts)  # of a token
        return max(_LEAST_SURVIVAL, self.costs.least_row() / worth)

    def _best_count(self, works: Items[Work], nodes: list[_Node], load: Load) -> int:
        """How many of the likeliest nodes make the most tokens per second."""
        tokens, keys = float(load.texts), load.keys
        best, best_rate = 0, _MARGIN * tokens / self.costs.run(load.rows, load.keys)
        for count, (survival, index, _) in enumerate(nodes, 1):
            tokens += survival
            keys += _keys(works[index], 1)
            rate = tokens / self.costs.run(load.rows + count, keys)
            if rate > best_rate:
                best, best_rate = count, rate
        return best

    def _affordable(self, works: Items[Work], nodes: list[_Node], load: Load) -> int:
        """How many of these nodes may be lost without harm."""
        limit = self.ledger_s + self.costs.run(load.rows, load.keys)
        keys = load.keys + sum(_keys(works[index], 1) for _, index, _ in nodes)
        count = len(nodes)
        while count and self.costs.run(load.rows + count, keys) > limit:
            count -= 1
            keys -= _keys(works[nodes[count][1]], 1)
        return count


def _most_tokens(texts: int, drafts: int) -> float:
    """Tokens of a step if its guesses are as sure as guesses can be: chains of equal length, one behind every text."""
    depth, deeper = divmod(drafts, texts)
    return texts * sum(SUREST**i for i in range(depth + 1)) + deeper * SUREST ** (depth + 1)


def _keys(work: Work, rows: int) -> int:
    """Keys that so many rows of a work read, to within the rows themselves."""
    return rows * (work.sequence.num_computed_tokens + work.num_new_tokens)
