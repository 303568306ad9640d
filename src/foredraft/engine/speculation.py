"""The speculative part of a step: whose proposers are queried, what is merged and verified, and what it cost."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Items
from functools import cache, partial
from math import inf
from typing import NamedTuple, Protocol

from foredraft.control.controller import Controller, Offer, Prices
from foredraft.control.costs import Calibration, Costs, Load
from foredraft.control.economics import VerifyCurve
from foredraft.control.reasons import (
    CONTROLLER_FAILED,
    DRAFTED,
    FAILED,
    MEASURING,
    NOTHING_PROPOSED,
    PROBE,
    RESTING,
)
from foredraft.engine.assignments import Assignment, Assignments, in_turn
from foredraft.engine.guarded import Guarded
from foredraft.engine.head_fit import HeadFit
from foredraft.proposers.base import Proposer
from foredraft.proposers.merge import merge, pruned
from foredraft.proposers.registry import ProposerChoice, Spec
from foredraft.types import NO_DRAFT, Commit, Sequence, Work

log = logging.getLogger(__name__)


class Calibrates(Protocol):
    """What finds out the cost of runs: the engine's `Calibrator`, or a simulation that knows it."""

    def cached(self) -> Calibration | None:
        """An earlier calibration of this model on this machine."""

    def step(self, max_run_s: float = inf) -> Calibration | None:
        """Make one run; returns the calibration with the last."""


class _Query(NamedTuple):
    """A query that the controller decided about, and the seconds that it took."""

    proposer: Proposer
    works: list[Work]
    offers: list[Offer | None]
    seconds: float


class _Step:
    """What one step remembers until it was learnt from, by index of the works."""

    __slots__ = ("assigned", "controlled_s", "looking_s", "offers", "prices", "queries", "query_s", "reasons", "works")

    def __init__(self, works: list[Work], assigned: list[Assignment], reasons: list[list[str]]) -> None:
        self.works = works  # without drafts
        self.assigned = assigned
        self.reasons = reasons
        self.prices: Prices | None = None  # of what runs without the controller's drafts, where it decides
        self.offers: dict[int, dict[str, Offer]] = {}  # by name of the proposer
        self.query_s = 0.0
        self.controlled_s = 0.0  # of that, for sequences of the controller
        self.queries: list[_Query] = []  # those that are still to be learnt from
        self.looking_s = 0.0  # what it took beside queries and the run; 0 where nobody was looked at


class _Outcome(NamedTuple):
    """What became of a step: its works with their drafts, what was committed, and how long the run took."""

    step: _Step
    works: Items[Work]
    commits: Items[Commit]
    run_s: float


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
        head_fit: HeadFit | None = None,
    ) -> None:
        self.assignments = Assignments(make_proposer, vocab_size, clock)
        self.head_fit = head_fit or HeadFit()
        self._choose_head = choose_head
        self._clock = clock
        self._calibrator = calibrator
        self.controller: Controller | None = None  # none before the machine was measured
        self._controller_wanted = False
        self._controller_failed = False
        self._step = _Step([], [], [])
        self._outcome: _Outcome | None = None  # of the last step, until it was learnt from
        self._is_resting = False  # in the present step

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

    def rests(self, running: Items[Sequence]) -> bool:
        """Whether it is known before a step that these sequences get no drafts: then nobody is looked at, and drafts
        need no slots."""
        self._is_resting = False
        if self.controller is not None and self._step.prices is not None:
            try:
                self._is_resting = self.controller.rests(running, self._step.prices.load)
            except Exception:
                self._give_controller_up()
        return self._is_resting

    def propose(self, works: list[Work]) -> list[Work]:
        """Give every work that has slots for one a draft, merged from those of its proposers. Those that take time are
        queried last: what the others have found decides whether it is worth it."""
        if self._is_resting and self.controller is not None:
            return self._rested(works, self.controller)
        started = self._clock()
        step = self._step = _Step(works, self.assignments.of(works), [[] for _ in works])
        distinct = set(step.assigned)
        is_adaptive = any(of.adaptive for of in distinct)
        controller = self.controller if is_adaptive else None
        try:
            if controller is not None:
                step.prices = controller.prices(Load.of(works), max([work.num_lookahead_tokens for work in works]))
                for work, of in zip(works, step.assigned, strict=True):
                    if of.adaptive and not work.num_lookahead_tokens and work.reaches_end:
                        controller.pass_over(work.sequence, step.prices.load)
            for guarded in in_turn(distinct):
                self._query(guarded, step, controller)
            works = self._with_fixed_drafts(step)
            if is_adaptive:
                works = self._with_chosen_drafts(works, step, controller)
                step.looking_s = self._clock() - started - step.query_s
            return works
        except Exception:
            if controller is None:
                raise
            self._give_controller_up()
            return self._with_chosen_drafts(self._with_fixed_drafts(step), step, None)

    def _rested(self, works: list[Work], controller: Controller) -> list[Work]:
        """A step in which nobody is looked at. Who has a fixed setting has only just come, and is told nothing."""
        assigned = self.assignments.of(works)
        reasons = [[RESTING] if of.adaptive and of.proposers else [] for of in assigned]
        self._step = _Step(works, [], reasons)
        self._step.prices = controller.prices(Load.of(works), 0)
        return works

    def _query(self, guarded: Guarded, step: _Step, controller: Controller | None) -> None:
        """Query a proposer for the works that named it, and for which it is worth it if that is for the controller to
        say."""
        fixed: list[int] = []
        mine: list[int] = []
        for index, (work, of) in enumerate(zip(step.works, step.assigned, strict=True)):
            if work.num_lookahead_tokens and guarded.name in of.proposers:
                if guarded.has_failed(work.sequence):
                    step.reasons[index].append(FAILED)
                else:
                    (mine if of.adaptive else fixed).append(index)
        proposer, prices, min_score = guarded.proposer, step.prices, 0.0
        if controller is None or prices is None:
            mine = []  # until the machine was measured
        elif mine:
            works = [step.works[index] for index in mine]
            at_hand = [max(step.offers[i].values(), key=_root) if i in step.offers else None for i in mine]
            reasons = controller.wants(proposer, works, at_hand, prices)
            for index, reason in zip(mine, reasons, strict=True):
                step.reasons[index].append(_about(proposer.name, reason))
            mine = [index for index, reason in zip(mine, reasons, strict=True) if reason is DRAFTED or reason is PROBE]
            if mine and not fixed and not proposer.free:
                min_score = controller.min_score(proposer, works[0], prices)
        if not fixed and not mine:
            return
        asked, size = [*fixed, *mine], len(fixed)
        works = [step.works[index] for index in asked]
        drafts, seconds = guarded.propose(
            [work.sequence for work in works], [work.num_lookahead_tokens for work in works], min_score
        )
        step.query_s += seconds
        if proposer.is_head:
            self.head_fit.propose(proposer.name, [work.sequence for work in works], drafts)
        for place, (work, draft) in enumerate(zip(works, drafts, strict=True)):
            if draft.tokens:
                if work.sequence.constraint is not None:
                    drafts[place] = draft = pruned(draft, work.sequence)
                if draft.tokens:
                    step.offers.setdefault(asked[place], {})[guarded.name] = Offer(draft, draft.scores)
            elif guarded.has_failed(work.sequence):
                step.reasons[asked[place]].append(FAILED)
        if mine and controller is not None and prices is not None:  # it learns from those that were its decision
            offers = controller.offers(proposer, works[size:], drafts[size:])
            own_s = seconds * len(mine) / len(asked)
            step.controlled_s += own_s
            step.queries.append(_Query(proposer, works[size:], offers, own_s))
            for index, offer in zip(mine, offers, strict=True):
                if offer is not None:
                    step.offers[index][guarded.name] = offer

    def _with_fixed_drafts(self, step: _Step) -> list[Work]:
        """The works, with their drafts where the controller has no say."""
        works = list(step.works) if step.offers else step.works
        for index in step.offers:
            if not step.assigned[index].adaptive:
                works[index] = works[index].with_draft(self._merged(step, index).draft)
        return works

    def _with_chosen_drafts(self, works: list[Work], step: _Step, controller: Controller | None) -> list[Work]:
        """The works with what the controller lets pass of the drafts that are its to decide about. Without one, nothing
        is verified but sampled drafts: to drop those after looking at them would bias the output."""
        mine = [i for i, of in enumerate(step.assigned) if of.adaptive and works[i].num_lookahead_tokens]
        if not step.offers and controller is not None:  # as in most steps of most texts
            for index in mine:
                step.reasons[index].append(NOTHING_PROPOSED)
            return works
        offers = [self._merged(step, index) if index in step.offers else None for index in mine]
        if controller is not None and step.prices is not None:
            if len(mine) < len(works) and step.offers:  # fixed drafts run in any case
                step.prices = controller.prices(Load.of(works), 1)
            drafts, reasons = controller.choose(offers, step.prices)
        else:
            drafts = [offer.draft if offer is not None and offer.draft.q is not None else NO_DRAFT for offer in offers]
            reasons = [CONTROLLER_FAILED if self._controller_failed else MEASURING] * len(mine)
        for index, draft, reason in zip(mine, drafts, reasons, strict=True):
            step.reasons[index].append(reason)
            if draft.tokens:
                works[index] = works[index].with_draft(draft)
        return works

    def _merged(self, step: _Step, index: int) -> Offer:
        """The drafts of all proposers of a work, in the order in which the request names them."""
        offers = step.offers[index]
        if len(offers) == 1:
            (offer,) = offers.values()
            return offer
        names = [name for name in step.assigned[index].proposers if name in offers]
        drafts = [offers[name].draft.with_scores(offers[name].survivals) for name in names]
        draft = merge(drafts, step.works[index].num_lookahead_tokens)
        return Offer(draft, draft.scores)

    @property
    def any_wants_target_argmax(self) -> bool:
        return any(guarded.proposer.wants_target_argmax for guarded in self.assignments.proposers.values())

    def wants_target_argmax(self, sequence: Sequence) -> bool:
        """Whether a proposer of the sequence wants to know the target's argmax after every draft token."""
        proposers = self.assignments[sequence].proposers.values()
        return any(guarded.proposer.wants_target_argmax for guarded in proposers)

    def reasons(self, index: int) -> tuple[str, ...]:
        """Why a sequence of the last step, by its place there, got the draft that it got, or none."""
        return tuple(self._step.reasons[index])

    def observe(self, works: Items[Work], commits: Items[Commit], run_s: float, learning_s: float) -> None:
        """Proposers learn from a step: its run took `run_s`, and had to wait for `learning_s` in `learn`. The
        controller learns when `learn` is called next."""
        for guarded in self.assignments.proposers.values():
            guarded.observe(commits)
        self.head_fit.observe(commits)
        step = self._step
        if step.assigned:
            step.looking_s += learning_s
        self._outcome = _Outcome(step, works, commits, run_s)

    def learn(self) -> None:
        """The controller learns from what became of the last step, and from the queries of the present one. A draft
        never waits for that: a device runs meanwhile."""
        controller, step, outcome, self._outcome = self.controller, self._step, self._outcome, None
        if controller is None:
            return
        try:
            if outcome is not None:
                self._learn_outcome(outcome, controller)
            if step.prices is not None:
                queries, step.queries = step.queries, []
                for proposer, works, offers, seconds in queries:
                    controller.observe_query(proposer, works, offers, step.prices, seconds)
        except Exception:
            self._give_controller_up()

    def _learn_outcome(self, outcome: _Outcome, controller: Controller) -> None:
        step, works, commits, run_s = outcome
        load = step.prices.load if step.prices is not None else Load.of(step.works)
        if step.offers:  # what each sequence gained on as many plain steps of this batch as it got tokens
            plain_s = controller.costs.run(load.rows, load.keys)
            for work, commit in zip(works, commits, strict=True):
                if work.draft.tokens:
                    work.sequence.counters.saved_s += len(commit.tokens) * plain_s - step.query_s - run_s
        if step.prices is not None:
            mine = {index: made.values() for index, made in step.offers.items() if step.assigned[index].adaptive}
            controller.observe(works, mine, commits, step.prices, step.controlled_s, run_s, step.looking_s)

    def release(self, sequence_ids: Iterable[int]) -> None:
        self.learn()  # from what they did last
        ids = list(sequence_ids)
        self.assignments.release(ids)
        if self.controller is not None:
            try:
                self.controller.release(ids)
            except Exception:
                self._give_controller_up()

    def clear(self) -> None:
        """Clear what proposers have learnt from finished sequences, so that the next run starts cold."""
        for guarded in self.assignments.proposers.values():
            guarded.clear()

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


@cache
def _about(name: str, reason: str) -> str:
    """Why a proposer was queried or not."""
    return f"{name}: {reason}"


def _root(offer: Offer) -> float:
    """How probable the best first token of a draft is."""
    return offer.survivals[0]
