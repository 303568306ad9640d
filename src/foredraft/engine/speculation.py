"""The speculative part of a step: whose proposers are queried, what is merged and verified, and what it cost."""

from __future__ import annotations

import logging
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable
from collections.abc import Sequence as Items
from functools import partial
from math import inf
from typing import Protocol, TypeVar

from foredraft.control.controller import MEASURING, NOTHING_PROPOSED, Controller
from foredraft.control.costs import Calibration, Costs
from foredraft.control.economics import VerifyCurve
from foredraft.control.worth import Candidate, Load
from foredraft.engine.assignments import Assignment, Assignments
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


class _Step:
    """What one step remembers until its commits are known. Most works of most steps have no drafts: what is kept by
    index of the works has entries only for those that do."""

    def __init__(self, works: list[Work], assigned: list[Assignment]) -> None:
        self.works = works  # without drafts
        self.assigned = assigned  # of each work
        self.made: dict[int, dict[str, Draft]] = {}  # by work and proposer, as they were made; none is empty
        self.proposed: dict[int, dict[str, Draft]] = {}  # as they are merged: the controller corrects the scores
        self.reasons: defaultdict[int, list[str]] = defaultdict(list)
        self.query_s = 0.0
        self.is_queried = False  # whether any proposer was
        self.deciding_s = 0.0  # what it took beside the queries
        self.rests_until_s = -inf  # how long nobody need be queried after it, on the controller's clock
        self.any_adaptive = any(assignment.adaptive for assignment in assigned)
        # What runs without the controller's drafts; of no interest where it decides about nobody.
        self.load = Load.of(works) if self.any_adaptive else Load(0, 0, 0)

    def items(self) -> Iterable[tuple[Work, Assignment]]:
        return zip(self.works, self.assigned, strict=True)

    @property
    def sequences(self) -> list[int]:
        return [work.sequence.id for work in self.works]


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
        self._step: _Step | None = None
        self._learning_s = 0.0  # what the controller took to learn from the last step

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

    def propose(self, works: list[Work]) -> list[Work]:
        """Give every work that has slots for one a draft, merged from those of its proposers. Those that take time are
        queried last: what the others have found decides whether it is worth it."""
        if self._is_resting(works):
            return works
        started = self._clock()
        step = self._step = _Step(works, self.assignments.of(works))
        named = {name for assignment in step.assigned for name in assignment.names}
        if not named and not step.any_adaptive:
            return works
        for is_free in (True, False):
            for name, proposer in self.assignments.proposers.items():
                if proposer.free is is_free and name in named:
                    self._query(name, proposer, step)
        for index, drafts in step.proposed.items():
            works = works if works is not step.works else list(works)
            works[index] = self._merged(works[index], drafts)
        chosen = self._chosen(works, step)
        if not step.is_queried and all(of.adaptive and work.num_lookahead_tokens for work, of in step.items()):
            names = [proposer.name for name, proposer in self.assignments.proposers.items() if name in named]
            step.rests_until_s = self._controlled(lambda c: c.rests_until_s(names, works)) or -inf
        step.deciding_s = self._clock() - started - step.query_s
        return chosen

    def _is_resting(self, works: list[Work]) -> bool:
        """Whether this step repeats the last one, in which the controller let nobody be queried: for the same
        sequences, and as long as it keeps to that. Then it has the same reasons, and takes next to no time."""
        last, controller = self._step, self.controller
        if last is None or controller is None or controller.now_s >= last.rests_until_s:
            return False
        sequences = [work.sequence.id for work in works]
        if last.sequences != sequences or not all(work.num_lookahead_tokens for work in works):
            return False
        last.works, last.load, last.deciding_s = works, Load.of(works), 0.0
        return True

    @property
    def any_wants_target_argmax(self) -> bool:
        return any(proposer.wants_target_argmax for proposer in self.assignments.proposers.values())

    def wants_target_argmax(self, sequence: Sequence) -> bool:
        """Whether a proposer of the sequence wants to know the target's argmax after every draft token."""
        names = self.assignments[sequence].names
        return any(self.assignments.proposers[name].wants_target_argmax for name in names)

    def reasons(self, index: int) -> tuple[str, ...]:
        """Why a sequence of the last step, by its place there, got the draft that it got, or none."""
        return () if self._step is None else tuple(self._step.reasons.get(index, ()))

    def observe(self, works: Items[Work], commits: Items[Commit], step_s: float) -> None:
        """Proposers learn the committed tokens, and the controller what they cost. The step took `step_s` after
        `propose`."""
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
        mine = [step.made.get(index, {}) if of.adaptive else None for index, of in enumerate(step.assigned)]
        started, deciding_s = self._clock(), step.deciding_s + self._learning_s
        self._controlled(lambda controller: controller.observe(works, mine, commits, step.load, step_s, deciding_s))
        self._learning_s = self._clock() - started

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
        ids = list(sequence_ids)
        self.assignments.release(ids)
        self._controlled(lambda controller: controller.release(ids))

    def clear(self) -> None:
        """Clear what proposers have learnt from finished sequences, so that the next run starts cold."""
        for name, proposer in self.assignments.proposers.items():
            self.assignments.guarded(name, proposer.clear)

    def _query(self, name: str, proposer: Proposer, step: _Step) -> None:
        """Add one proposer's drafts to the step."""
        candidate = _candidate(proposer)
        budgets = self._budgets(name, candidate, step)
        if not budgets:
            return
        step.is_queried = True
        started = self._clock()
        works = [step.works[index] for index in budgets]
        drafts = self._drafts(name, proposer, works, list(budgets.values()))
        seconds = self._clock() - started
        step.query_s += seconds
        made: dict[int, Draft] = {}
        for index, work, draft in zip(budgets, works, drafts, strict=True):
            if draft:
                draft = pruned(draft, work.sequence)
            elif self.assignments.has_failed(name, work.sequence):
                step.reasons[index].append(FAILED)
            made[index] = draft
            if draft:
                step.made.setdefault(index, {})[name] = draft
        mine = [index for index in budgets if step.assigned[index].adaptive]
        if mine:  # the controller learns from those that were its decision
            some, nodes = [step.works[index] for index in mine], [budgets[index] for index in mine]
            raw, own_s = [made[index] for index in mine], seconds * len(mine) / len(budgets)
            known = self._controlled(lambda c: c.observe_query(candidate, some, nodes, raw, own_s))
            made.update(zip(mine, known or (), strict=False))
        for index, draft in made.items():
            if draft:
                step.proposed.setdefault(index, {})[name] = draft

    def _budgets(self, name: str, candidate: Candidate, step: _Step) -> dict[int, int]:
        """How many nodes a proposer drafts, by index of the works that it drafts for."""
        budgets: dict[int, int] = {}
        mine: list[int] = []
        for index, (work, assignment) in enumerate(step.items()):
            if not work.num_lookahead_tokens or name not in assignment.names:
                continue
            if self.assignments.has_failed(name, work.sequence):
                step.reasons[index].append(FAILED)
            elif not assignment.adaptive:
                budgets[index] = work.num_lookahead_tokens
            elif self.controller is not None:
                mine.append(index)
        if mine:
            chances = [_chance_of_next(step.proposed.get(index, {}).values()) for index in mine]
            some, load = [step.works[index] for index in mine], step.load
            decided = self._controlled(lambda c: c.budgets(candidate, some, chances, load))
            for index, (budget, reason) in zip(mine, decided or [(0, CONTROLLER_FAILED)] * len(mine), strict=True):
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
        """A proposer's drafts, if they are such that the target can run them."""
        drafts = proposer.propose([work.sequence for work in works], budgets)
        if len(drafts) != len(works):
            raise ValueError(f"{len(drafts)} drafts were proposed for {len(works)} sequences")
        for draft, budget in zip(drafts, budgets, strict=True):
            if not draft:
                continue
            if len(draft) > budget:
                raise ValueError(f"{len(draft)} tokens were drafted, but the budget is {budget}")
            if not 0 <= min(draft.tokens) <= max(draft.tokens) < self._vocab_size:
                raise ValueError(f"a draft token is not in the target's vocabulary of {self._vocab_size}")
            if not all(0 < score <= 1 for score in draft.scores):
                raise ValueError(f"scores must be probabilities above 0, not {draft.scores}")
            if draft.q is not None:
                self._check_q(draft)
        return drafts

    def _check_q(self, draft: Draft) -> None:
        """Rules that trust q would accept any token under a q that is no distribution."""
        if tuple(draft.q.shape) != (len(draft), self._vocab_size):
            raise ValueError(f"q has the shape {tuple(draft.q.shape)}, not {(len(draft), self._vocab_size)}")
        drawn = draft.q[list(range(len(draft))), list(draft.tokens)]
        if not (drawn > 0).all() or not (draft.q >= 0).all() or not ((draft.q.sum(-1) - 1).abs() < 1e-3).all():
            raise ValueError("q is no distribution from which these tokens can have been drawn")

    def _merged(self, work: Work, drafts: dict[str, Draft]) -> Work:
        """The work with the drafts of all its proposers, in the order in which the request names them."""
        names = self.assignments[work.sequence].names
        return work.with_draft(merge([drafts[name] for name in names if name in drafts], work.num_lookahead_tokens))

    def _chosen(self, works: list[Work], step: _Step) -> list[Work]:
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


def _chance_of_next(drafts: Collection[Draft]) -> float:
    """How probable it is that drafts at hand have the next token."""
    if not drafts:
        return 0.0
    roots = [[score for score, parent in zip(draft.scores, draft.parents) if parent < 0] for draft in drafts]
    return min(1.0, max(map(sum, roots), default=0.0))


def _without_controller(drafts: list[Draft | None], reason: str) -> tuple[list[Draft], list[str]]:
    """Nothing is verified, but for drafts that were sampled: dropping those after looking at them would bias the
    output."""
    kept = [draft if draft is not None and draft.q is not None else NO_DRAFT for draft in drafts]
    return kept, [reason] * len(kept)
