"""The speculative part of a step: whose proposers are queried, what is merged and verified, and what it cost."""

from __future__ import annotations

import logging
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Items
from functools import partial
from math import inf
from typing import Protocol, TypeVar

from foredraft.control.controller import Controller, Offer
from foredraft.control.costs import Calibration, Costs, Load
from foredraft.control.economics import VerifyCurve
from foredraft.control.reasons import DRAFTED, MEASURING, PROBE
from foredraft.engine.assignments import Assignment, Assignments
from foredraft.engine.guarded import Guarded
from foredraft.proposers.base import Proposer
from foredraft.proposers.merge import merge, pruned
from foredraft.proposers.registry import ProposerChoice, Spec
from foredraft.types import NO_DRAFT, Commit, Draft, Sequence, Work

log = logging.getLogger(__name__)

FAILED = "proposer failed"
CONTROLLER_FAILED = "controller failed"

_T = TypeVar("_T")


class Calibrates(Protocol):
    """What finds out the cost of runs: the engine's `Calibrator`, or a simulation that knows it."""

    def cached(self) -> Calibration | None:
        """An earlier calibration of this model on this machine."""

    def step(self, max_run_s: float = inf) -> Calibration | None:
        """Make one run; returns the calibration with the last."""


class _Step:
    """What one step remembers until its commits are known, by index of the works."""

    def __init__(self, works: list[Work], assigned: list[Assignment]) -> None:
        self.works = works  # without drafts
        self.assigned = assigned
        self.any_adaptive = any(assignment.adaptive for assignment in assigned)
        # What runs without the controller's drafts; of no interest where it decides about nobody.
        self.load = Load.of(works) if self.any_adaptive else Load(0, 0, 0)
        self.offers: dict[int, dict[str, Offer]] = {}  # by name of the proposer
        self.reasons: defaultdict[int, list[str]] = defaultdict(list)
        self.query_s = 0.0
        self.controlled_s = 0.0  # of that, for sequences of the controller


class Speculation:
    """Drafts for every step, from the proposers that its requests chose, cut by the controller where they left that to
    it. The controller may fail without harm, as proposers may: sequences go on without it."""

    def __init__(
        self,
        make_proposer: Callable[[ProposerChoice], Proposer],
        calibrator: Calibrates,
        vocab_size: int,
        choose_head: Callable[[VerifyCurve], ProposerChoice | None] = lambda curve: None,
        clock: Callable[[], float] = time.perf_counter,  # in seconds; a simulation has its own
    ) -> None:
        self.assignments = Assignments(make_proposer, vocab_size, clock)
        self._choose_head = choose_head
        self._calibrator = calibrator
        self.controller: Controller | None = None  # none before the machine was measured
        self._controller_wanted = False
        self._controller_failed = False
        self._step = _Step([], [])

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
        step = self._step = _Step(works, [self.assignments[work.sequence] for work in works])
        named = {name for assignment in set(step.assigned) for name in assignment.names}
        if not named and not step.any_adaptive:
            return works
        for is_free in (True, False):
            for name, guarded in self.assignments.proposers.items():
                if name in named and guarded.proposer.free is is_free:
                    self._query(guarded, step)
        merged = {index: self._merged(index, offers) for index, offers in step.offers.items()}
        chosen = list(works)
        for index, offer in merged.items():
            if not step.assigned[index].adaptive:
                chosen[index] = works[index].with_draft(offer.draft)
        mine = [index for index, of in enumerate(step.assigned) if of.adaptive and works[index].num_lookahead_tokens]
        if mine:
            if len(mine) < len(works) and merged:  # fixed drafts run in any case
                step.load = Load.of(chosen)
            drafts, reasons = self._chosen([works[i] for i in mine], [merged.get(i) for i in mine], step.load)
            for index, draft, reason in zip(mine, drafts, reasons, strict=True):
                step.reasons[index].append(reason)
                if draft.tokens:
                    chosen[index] = works[index].with_draft(draft)
        return chosen

    def _query(self, guarded: Guarded, step: _Step) -> None:
        """Query a proposer for the works that named it, and for which it is worth it if that is for the controller to
        say."""
        fixed: list[int] = []
        mine: list[int] = []
        for index, (work, of) in enumerate(zip(step.works, step.assigned, strict=True)):
            if work.num_lookahead_tokens and guarded.name in of.names:
                if guarded.has_failed(work.sequence):
                    step.reasons[index].append(FAILED)
                else:
                    (mine if of.adaptive else fixed).append(index)
        proposer, min_score = guarded.proposer, 0.0
        if mine and self.controller is not None:
            mine = self._wanted(proposer, mine, step)
            if mine and not fixed:
                first = step.works[mine[0]]
                min_score = self._controlled(lambda c: c.min_score(proposer, first, step.load)) or 0.0
        asked = [*fixed, *mine] if self.controller is not None else fixed
        if not asked:
            return
        works = [step.works[index] for index in asked]
        drafts, seconds = guarded.propose(
            [work.sequence for work in works], [work.num_lookahead_tokens for work in works], min_score
        )
        step.query_s += seconds
        for place, (work, draft) in enumerate(zip(works, drafts, strict=True)):
            if draft.tokens and work.sequence.constraint is not None:
                drafts[place] = pruned(draft, work.sequence)
            elif not draft.tokens and guarded.has_failed(work.sequence):
                step.reasons[asked[place]].append(FAILED)
        offers = [Offer(draft, draft.scores) if draft.tokens else None for draft in drafts[: len(fixed)]]
        if mine:  # the controller learns from those that were its decision
            own_s = seconds * len(mine) / len(asked)
            step.controlled_s += own_s
            offers += self._controlled(
                lambda c: c.observe_query(proposer, works[len(fixed) :], drafts[len(fixed) :], step.load, own_s)
            ) or [Offer(draft, draft.scores) if draft.tokens else None for draft in drafts[len(fixed) :]]
        for index, offer in zip(asked, offers, strict=True):
            if offer is not None:
                step.offers.setdefault(index, {})[guarded.name] = offer

    def _wanted(self, proposer: Proposer, mine: list[int], step: _Step) -> list[int]:
        """Of these works, those for which the controller wants the proposer to be queried."""
        works = [step.works[index] for index in mine]
        at_hand = [max(step.offers[i].values(), key=_root) if i in step.offers else None for i in mine]
        reasons = self._controlled(lambda c: c.wants(proposer, works, at_hand, step.load))
        wanted: list[int] = []
        for index, reason in zip(mine, reasons or [CONTROLLER_FAILED] * len(mine), strict=True):
            step.reasons[index].append(f"{proposer.name}: {reason}")
            if reason is DRAFTED or reason is PROBE:
                wanted.append(index)
        return wanted

    def _merged(self, index: int, offers: dict[str, Offer]) -> Offer:
        """The drafts of all proposers of a work, in the order in which the request names them."""
        if len(offers) == 1:
            (offer,) = offers.values()
            return offer
        names = [name for name in self._step.assigned[index].names if name in offers]
        drafts = [offers[name].draft.with_scores(offers[name].survivals) for name in names]
        draft = merge(drafts, self._step.works[index].num_lookahead_tokens)
        return Offer(draft, draft.scores)

    def _chosen(self, works: list[Work], offers: list[Offer | None], load: Load) -> tuple[list[Draft], list[str]]:
        """What the controller lets pass. Without one, nothing is verified but sampled drafts: to drop those after
        looking at them would bias the output."""
        chosen = self._controlled(lambda c: c.choose(works, offers, load))
        if chosen is not None:
            return chosen
        reason = CONTROLLER_FAILED if self._controller_failed else MEASURING
        kept = [offer.draft if offer is not None and offer.draft.q is not None else NO_DRAFT for offer in offers]
        return kept, [reason] * len(kept)

    @property
    def any_wants_target_argmax(self) -> bool:
        return any(guarded.proposer.wants_target_argmax for guarded in self.assignments.proposers.values())

    def wants_target_argmax(self, sequence: Sequence) -> bool:
        """Whether a proposer of the sequence wants to know the target's argmax after every draft token."""
        of = self.assignments
        return any(of.proposers[name].proposer.wants_target_argmax for name in of[sequence].names)

    def reasons(self, index: int) -> tuple[str, ...]:
        """Why a sequence of the last step, by its place there, got the draft that it got, or none."""
        return tuple(self._step.reasons.get(index, ()))

    def observe(self, works: Items[Work], commits: Items[Commit], run_s: float) -> None:
        """Proposers and controller learn from a step, which took `run_s` after `propose`."""
        for guarded in self.assignments.proposers.values():
            guarded.observe(commits)
        step = self._step
        for index, reasons in step.reasons.items():
            decisions = works[index].sequence.counters.decisions
            for reason in reasons:
                decisions[reason] += 1
        if self.controller is None:
            return
        if step.offers:
            self._count_savings(works, commits, step.query_s + run_s)
        if step.any_adaptive:
            mine = [
                (step.offers[index].values() if index in step.offers else ()) if of.adaptive else None
                for index, of in enumerate(step.assigned)
            ]
            self._controlled(lambda c: c.observe(works, mine, commits, step.load, step.controlled_s, run_s))

    def _count_savings(self, works: Items[Work], commits: Items[Commit], step_s: float) -> None:
        """What each sequence with a draft gained on as many plain steps of this batch as it got tokens."""
        assert self.controller is not None
        load = Load.of(self._step.works)
        plain_s = self.controller.costs.run(load.rows, load.keys)
        for work, commit in zip(works, commits, strict=True):
            if work.draft.tokens:
                work.sequence.counters.saved_s += len(commit.tokens) * plain_s - step_s

    def release(self, sequence_ids: Iterable[int]) -> None:
        ids = list(sequence_ids)
        self.assignments.release(ids)
        self._controlled(lambda c: c.release(ids))

    def clear(self) -> None:
        """Clear what proposers have learnt from finished sequences, so that the next run starts cold."""
        for guarded in self.assignments.proposers.values():
            guarded.clear()

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


def _root(offer: Offer) -> float:
    """How probable the best first token of a draft is."""
    return offer.survivals[0]
