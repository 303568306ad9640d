"""The speculative part of a step: whose proposers are queried, what is merged and verified, and what it cost."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping
from collections.abc import Sequence as Items
from functools import partial
from math import inf
from typing import Protocol, TypeVar

from foredraft.budget import Budget
from foredraft.control.controller import Controller
from foredraft.control.costs import Calibration, Costs
from foredraft.control.economics import VerifyCurve
from foredraft.control.ledger import NOTHING
from foredraft.control.reasons import MEASURING, NOTHING_PROPOSED
from foredraft.control.worth import Candidate, Load
from foredraft.engine.assignments import Assignments
from foredraft.engine.check_drafts import check_drafts
from foredraft.engine.step_record import Query, StepRecord
from foredraft.proposers.base import Proposer
from foredraft.proposers.merge import merge, pruned
from foredraft.proposers.registry import ProposerChoice, Spec
from foredraft.types import NO_DRAFT, Commit, Draft, Sequence, Work

log = logging.getLogger(__name__)

FAILED = "proposer failed"
CONTROLLER_FAILED = "controller failed"

_PROPOSE_FOR_SEVERAL = "propose for several"  # a call that fails apart from `propose` for one sequence

_T = TypeVar("_T")


class Calibrates(Protocol):
    """What finds out the cost of runs: the engine's `Calibrator`, or a simulation that knows it."""

    def cached(self) -> Calibration | None:
        """An earlier calibration of this model on this machine."""

    def step(self, max_run_s: float = inf) -> Calibration | None:
        """Make one run; returns the calibration with the last."""


class Speculation:
    """Drafts for every step, from the proposers that its requests chose, cut by the controller where they left that to
    it. Proposers and controller may fail without harm: sequences go on without them."""

    def __init__(
        self,
        make_proposer: Callable[[ProposerChoice], Proposer],
        calibrator: Calibrates,
        vocab_size: int,
        choose_head: Callable[[VerifyCurve], ProposerChoice | None] = lambda curve: None,
        clock: Callable[[], float] = time.perf_counter,  # in seconds; a simulation has its own
    ) -> None:
        self.assignments = Assignments(make_proposer)
        self._choose_head = choose_head
        self._calibrator = calibrator
        self._vocab_size = vocab_size  # of the target's logits
        self._clock = clock
        self.controller: Controller | None = None  # none before the machine was measured
        self._controller_wanted = False
        self._controller_failed = False
        self._step: StepRecord | None = None
        self._learns: Callable[[Controller], None] | None = None  # from the last step; not done yet

    def prepare(self, spec: Spec) -> int:
        """Make what a request will need, before it is admitted; returns how many slots its drafts may take. A request
        that leaves the choice to the controller gets no drafts before there is one."""
        self._controller_wanted |= spec.adaptive
        return self.assignments.prepare(spec)

    @property
    def wants_calibration(self) -> bool:
        """Whether requests have asked for a controller, and the machine is still to be measured for it."""
        return self._controller_wanted and self.controller is None and not self._controller_failed

    def calibrate_step(self, max_run_s: float = inf) -> None:
        """Make one run of the calibration; the last one makes the controller."""
        self._control(partial(self._calibrator.step, max_run_s))

    def calibrate(self, from_cache_only: bool = False) -> None:
        """Make the controller, from an earlier calibration or from one that begins and ends here."""
        if self.controller is None and not self._controller_failed:
            self._control(self._calibrator.cached)
        while not from_cache_only and self.controller is None and not self._controller_failed:
            self.calibrate_step()

    def register(self, sequence: Sequence, spec: Spec) -> None:
        self.assignments.register(sequence, spec)

    @property
    def is_resting(self) -> bool:
        """Whether it is decided that nobody is queried in the next step. Then drafts need no slots."""
        last, controller = self._step, self.controller
        return (
            last is not None and controller is not None and not last.queries and controller.now_s < last.stands_until_s
        )

    def propose(self, works: list[Work]) -> list[Work]:
        """Give every work that has slots for one a draft, merged from those of its proposers. Those that take time are
        queried last: what the others have found decides whether it is worth it."""
        started, last = self._clock(), self._step
        early = self._repeated_queries(works)
        if early is not None and not any(any(query.drafts.values()) for query in early.values()):
            self._repeat(works, early, started)
            return works
        step = self._step = StepRecord(works, self.assignments.of(works))
        if not step.named and not step.any_adaptive:
            return works
        if early is not None and last is not None and early.keys() == last.queries.keys():
            self._take(early, step, last)
        else:
            self._decide(step, early or {})
        for index, drafts in step.proposed.items():
            works = works if works is not step.works else list(works)
            works[index] = self._merged(works[index], drafts)
        chosen = self._chosen(works, step)
        if all(of.adaptive and work.num_lookahead_tokens for work, of in step.items()):
            names = [proposer.name for name, proposer in self.assignments.proposers.items() if name in step.named]
            step.stands_until_s = self._controlled(lambda c: c.stands_until_s(names, works, step.load)) or -inf
        step.deciding_s = self._clock() - started - step.query_s
        return chosen

    def _decide(self, step: StepRecord, early: Mapping[str, Query]) -> None:
        """Query every proposer that somebody named and for whom that is worth it, if that is for the controller to say.
        `early` has the drafts that are there already."""
        for is_free in (True, False):
            for name, proposer in self.assignments.proposers.items():
                if proposer.free is is_free and name in step.named:
                    candidate = _candidate(proposer)
                    budgets = self._budgets(name, candidate, step)
                    if budgets:
                        query = early.get(name) or self._asked(name, proposer, candidate, step.works, budgets)
                        self._add(name, query._replace(budgets=budgets), step)

    def _take(self, queries: dict[str, Query], step: StepRecord, last: StepRecord) -> None:
        """Let decisions stand that the last step made. Only the last query has brought something: what is at hand would
        have changed what is decided about later ones."""
        for index, reasons in last.reasons.items():
            step.reasons[index] = reasons[:-1]  # without what became of the draft
        for name, query in queries.items():
            self._add(name, query, step)

    def _repeated_queries(self, works: list[Work]) -> dict[str, Query] | None:
        """The last step's queries, made again up to the first that brings something; None if decisions do not stand."""
        last, controller = self._step, self.controller
        if last is None or controller is None or controller.now_s >= last.stands_until_s or not last.is_like(works):
            return None
        queries: dict[str, Query] = {}
        for name, query in last.queries.items():
            if any(self.assignments.has_failed(name, work.sequence) for work in works):
                return None
            queries[name] = self._asked(name, query.proposer, query.candidate, works, query.budgets)
            if any(queries[name].drafts.values()):
                break
        return queries

    def _repeat(self, works: list[Work], queries: dict[str, Query], started: float) -> None:
        """Let this step repeat the last one: nothing was drafted, so there is nothing to decide."""
        last, query_s = self._step, 0.0
        assert last is not None
        for _, candidate, budgets, drafts, seconds in queries.values():
            query_s += seconds
            nodes, none = list(budgets.values()), list(drafts.values())
            self._controlled(lambda c: c.observe_query(candidate, works, nodes, none, seconds))  # noqa: B023
        last.repeat(works, query_s, self._clock() - started - query_s)

    @property
    def any_wants_target_argmax(self) -> bool:
        return any(proposer.wants_target_argmax for proposer in self.assignments.proposers.values())

    def wants_target_argmax(self, sequence: Sequence) -> bool:
        """Whether a proposer of the sequence wants to know the target's argmax after every draft token."""
        of = self.assignments
        return any(of.proposers[name].wants_target_argmax for name in of[sequence].names)

    def reasons(self, index: int) -> tuple[str, ...]:
        """Why a sequence of the last step, by its place there, got the draft that it got, or none."""
        return () if self._step is None else tuple(self._step.reasons.get(index, ()))

    def observe(self, works: Items[Work], commits: Items[Commit], step_s: float) -> None:
        """Proposers learn the committed tokens. What they cost, the controller is to `learn`. The step took `step_s`
        after `propose`."""
        for name, proposer in self.assignments.proposers.items():
            self._observe(name, proposer, commits)
        step = self._step
        assert step is not None
        if step.proposed:
            self._count_savings(works, commits, step.query_s + step.deciding_s + step_s)
        for index, reasons in step.reasons.items():
            decisions = works[index].sequence.counters.decisions
            for reason in reasons:
                decisions[reason] += 1
        if self.controller is None or not step.any_adaptive:
            return  # no request here left the choice to the controller, so none waits for it to learn
        self.learn()  # from the step before, if nobody has asked for it
        load, times = step.load, step.times(step_s)
        if step.made or any(work.draft.tokens for work in works):
            mine = [step.made.get(index, {}) if of.adaptive else None for index, of in enumerate(step.assigned)]
            self._learns = lambda controller: controller.observe(works, mine, commits, load, times)
        else:
            self._learns = lambda controller: controller.observe_plain(load, times)

    def learn(self) -> None:
        """Let the controller learn from the last step. That is due while the next one runs: a GPU leaves the host time
        for it, and no draft waits for it."""
        learns, self._learns = self._learns, None
        if learns is not None:
            self._controlled(learns)

    def _count_savings(self, works: Items[Work], commits: Items[Commit], step_s: float) -> None:
        """What each sequence with a draft gained on as many plain steps of this batch as it got tokens."""
        if self.controller is None:
            return
        load = Load.of([work.with_draft(NO_DRAFT) for work in works])
        plain_s = self.controller.costs.run(load.rows, load.keys)
        for work, commit in zip(works, commits, strict=True):
            if work.draft:
                work.sequence.counters.saved_s += len(commit.tokens) * plain_s - step_s

    def release(self, sequence_ids: Iterable[int]) -> None:
        self.learn()  # before those that are gone are forgotten
        ids = list(sequence_ids)
        self.assignments.release(ids)
        self._controlled(lambda controller: controller.release(ids))

    def clear(self) -> None:
        """Clear what proposers have learnt from finished sequences, so that the next run starts cold."""
        for name, proposer in self.assignments.proposers.items():
            self.assignments.guarded(name, proposer.clear)

    def _add(self, name: str, query: Query, step: StepRecord) -> None:
        """Add one proposer's drafts to the step."""
        budgets, candidate = query.budgets, query.candidate
        step.queries[name] = query
        step.query_s += query.seconds
        made: dict[int, Draft] = {}
        for index in budgets:
            draft, sequence = query.drafts[index], step.works[index].sequence
            if draft:
                draft = pruned(draft, sequence)
            elif self.assignments.has_failed(name, sequence):
                step.reasons[index].append(FAILED)
            made[index] = draft
            if draft:
                step.made.setdefault(index, {})[name] = draft
        mine = [index for index in budgets if step.assigned[index].adaptive]
        if mine:  # the controller learns from those that were its decision
            some, nodes = [step.works[index] for index in mine], [budgets[index] for index in mine]
            raw, own_s = [made[index] for index in mine], query.seconds * len(mine) / len(budgets)
            step.controlled_s += own_s
            step.decided[candidate.name] = len(mine) + sum(map(len, raw))
            known = self._controlled(lambda c: c.observe_query(candidate, some, nodes, raw, own_s))
            made.update(zip(mine, known or (), strict=False))
        for index, draft in made.items():
            if draft:
                step.proposed.setdefault(index, {})[name] = draft

    def _asked(
        self, name: str, proposer: Proposer, candidate: Candidate, works: list[Work], wanted: Mapping[int, Budget]
    ) -> Query:
        """Ask a proposer for drafts of so many nodes, by index of the works, as far as those have slots for them."""
        started = self._clock()
        budgets = {index: nodes.at_most(works[index].num_lookahead_tokens) for index, nodes in wanted.items()}
        drafts = self._drafts(name, proposer, [works[index] for index in budgets], list(budgets.values()))
        return Query(proposer, candidate, budgets, dict(zip(budgets, drafts)), self._clock() - started)

    def _budgets(self, name: str, candidate: Candidate, step: StepRecord) -> dict[int, Budget]:
        """How many nodes a proposer drafts, by index of the works that it drafts for."""
        budgets: dict[int, Budget] = {}
        mine: list[int] = []
        for index, (work, assignment) in enumerate(step.items()):
            if not work.num_lookahead_tokens or name not in assignment.names:
                continue
            if self.assignments.has_failed(name, work.sequence):
                step.reasons[index].append(FAILED)
            elif not assignment.adaptive:
                budgets[index] = Budget(work.num_lookahead_tokens)
            elif self.controller is not None:
                mine.append(index)
        if mine:
            at_hand = [step.proposed.get(index, {}).values() for index in mine]
            some, load = [step.works[index] for index in mine], step.load
            decided = self._controlled(lambda c: c.budgets(candidate, some, at_hand, load))
            for index, (budget, reason) in zip(
                mine, decided or [(NOTHING, CONTROLLER_FAILED)] * len(mine), strict=True
            ):
                step.reasons[index].append(f"{candidate.name}: {reason}")
                if budget:
                    budgets[index] = budget
        return budgets

    def _drafts(self, name: str, proposer: Proposer, works: list[Work], budgets: list[int]) -> list[Draft]:
        """Drafts for all works at once. If that fails, each work is tried alone, so that only those to blame lose. If
        none is to blame, the proposer is: after a few such steps in a row it is given up."""
        if len(works) == 1:
            alone = self.assignments.attempt(
                *(name, "propose", works[0].sequence), self._checked, proposer, works, budgets
            )
            return alone or [NO_DRAFT]
        try:
            drafts = self._checked(proposer, works, budgets)
        except Exception as error:
            drafts = [self._drafts(name, proposer, [work], [budget])[0] for work, budget in zip(works, budgets)]
            if not any(self.assignments.has_failed(name, work.sequence) for work in works):
                what = "failed for several sequences at once, but for none of them alone."
                self.assignments.count_failure(name, _PROPOSE_FOR_SEVERAL, what, error)
            return drafts
        self.assignments.count_success(name, _PROPOSE_FOR_SEVERAL)
        return drafts

    def _observe(self, name: str, proposer: Proposer, commits: Items[Commit]) -> None:
        """Tell a proposer every commit by itself: it may fail for one sequence and go on for the others."""
        for commit in commits:
            if not self.assignments.has_failed(name, commit.sequence):
                self.assignments.attempt(name, "observe", commit.sequence, proposer.observe, [commit])

    def _checked(self, proposer: Proposer, works: list[Work], budgets: list[int]) -> list[Draft]:
        drafts = proposer.propose([work.sequence for work in works], budgets)
        check_drafts(drafts, budgets, self._vocab_size)
        return drafts

    def _merged(self, work: Work, drafts: dict[str, Draft]) -> Work:
        """The work with the drafts of all its proposers, in the order in which the request names them."""
        names = self.assignments[work.sequence].names
        return work.with_draft(merge([drafts[name] for name in names if name in drafts], work.num_lookahead_tokens))

    def _chosen(self, works: list[Work], step: StepRecord) -> list[Work]:
        """The works with what the controller lets pass of the drafts that are its to decide about."""
        mine = [of.adaptive and work.num_lookahead_tokens > 0 for work, of in step.items()]
        if not any(mine):
            return works
        if not step.proposed and self.controller is not None:
            for index, is_mine in enumerate(mine):
                if is_mine:
                    step.reasons[index].append(NOTHING_PROPOSED)
            return works
        if not all(mine) and step.proposed:  # fixed drafts run in any case
            step.load = Load.of(
                [work.with_draft(NO_DRAFT) if is_mine else work for work, is_mine in zip(works, mine, strict=True)]
            )
        drafts = [work.draft if is_mine else None for work, is_mine in zip(works, mine, strict=True)]
        chosen, reasons = self._controlled(
            lambda controller: controller.choose(works, drafts, step.load)
        ) or _without_controller(drafts, CONTROLLER_FAILED if self._controller_failed else MEASURING)
        decided: list[Work] = []
        for index, (work, is_mine, draft, reason) in enumerate(zip(works, mine, chosen, reasons, strict=True)):
            if is_mine:
                step.reasons[index].append(reason)
            decided.append(work.with_draft(draft) if is_mine and draft is not work.draft else work)
        return decided

    def _controlled(self, action: Callable[[Controller], _T]) -> _T | None:
        """Let the controller do something; None where there is none, or where it fails."""
        if self.controller is None:
            return None
        try:
            return action(self.controller)
        except Exception:
            self._give_controller_up()
            return None

    def _control(self, calibration: Callable[[], Calibration | None]) -> None:
        """Make the controller, if there is a calibration by now, and choose the head that `auto` uses on this machine:
        no head is loaded before it is known that it could pay."""
        try:
            measured = calibration()
            if measured is not None:
                self.assignments.head = self._choose_head(measured.curve)
                self.controller = Controller(Costs(measured))
        except Exception:
            self._give_controller_up()

    def _give_controller_up(self) -> None:
        self.controller, self._controller_failed = None, True
        log.exception("The controller failed; sequences that leave the choice to it get no drafts any more.")


def _candidate(proposer: Proposer) -> Candidate:
    acceptance = tuple(getattr(proposer, "acceptance", ()))
    return Candidate(proposer.name, proposer.free, proposer.num_lookahead_tokens, acceptance)


def _without_controller(drafts: list[Draft | None], reason: str) -> tuple[list[Draft], list[str]]:
    """Nothing is verified but sampled drafts: dropping those after looking at them would bias the output."""
    kept = [draft if draft is not None and draft.q is not None else NO_DRAFT for draft in drafts]
    return kept, [reason] * len(kept)
