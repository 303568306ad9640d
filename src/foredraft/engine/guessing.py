"""All of a step that has to do with guessing: who guesses for which sequence, how much is verified, what it took."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Items
from dataclasses import dataclass, field, replace
from functools import partial

from foredraft.control.controller import Controller, Load, StepTimes
from foredraft.proposers.base import Proposer
from foredraft.proposers.merge import merge
from foredraft.proposers.registry import ProposerChoice, Spec
from foredraft.types import NO_DRAFT, Commit, Draft, Sequence, Work

log = logging.getLogger(__name__)

FAILED = "proposer failed"


@dataclass(frozen=True)
class _Guessed:
    """What a sequence's request asked for: these proposers, and whether the controller decides about them."""

    names: tuple[str, ...]
    adaptive: bool


@dataclass
class _Step:
    """What is remembered of a step until its commits are known."""

    load: Load  # what ran in any case
    drafts: list[Draft | None]  # of the controller's sequences, before anything was cut from them
    draft_s: float = 0.0  # spent on proposers that take time
    reasons: list[list[str]] = field(default_factory=list)


class Guesser:
    """The proposers by name, made when they are first asked for, and the controller, made with the first request that
    leaves the choice to it."""

    def __init__(
        self, make_proposer: Callable[[ProposerChoice], Proposer], make_controller: Callable[[], Controller]
    ) -> None:
        self.make_proposer = make_proposer
        self._make_controller = make_controller
        self.proposers: dict[str, Proposer] = {}
        self.controller: Controller | None = None
        self._texts: dict[int, _Guessed] = {}
        self._failed: set[str] = set()
        self._step: _Step | None = None

    def prepare(self, spec: Spec) -> int:
        """Make what a request will need, before it is admitted; returns how many slots its drafts may take."""
        if spec.adaptive and self.controller is None:
            self.controller = self._make_controller()
        made = [self._proposer(choice) for choice in spec.choices]
        return max((proposer.num_lookahead_tokens for proposer in made), default=0)

    def enter(self, sequence: Sequence, spec: Spec) -> None:
        self._texts[sequence.id] = _Guessed(tuple(map(str, spec.choices)), spec.adaptive)

    def guess(self, works: list[Work]) -> list[Work]:
        """Give every work that has slots for one a draft, merged from the guesses of its proposers."""
        step = self._step = _Step(Load.of(works), [None] * len(works), reasons=[[] for _ in works])
        guesses: list[list[Draft]] = [[] for _ in works]
        for name, proposer in self.proposers.items():
            asked, budgets = self._budgets(name, proposer, works, step)
            if asked:
                drafts = self._ask(name, proposer, [works[index] for index in asked], budgets, step)
                for index, draft in zip(asked, drafts, strict=True):
                    if draft:
                        guesses[index].append(draft)
        if any(guesses):
            works = [
                replace(work, draft=merge(drafts, work.num_lookahead_tokens)) if drafts else work
                for work, drafts in zip(works, guesses, strict=True)
            ]
        return self._chosen(works, step)

    def wants_said(self, sequence: Sequence) -> bool:
        """Whether somebody who guesses for the sequence wants to hear what the target says after every guess."""
        return any(self.proposers[name].wants_said for name in self._texts[sequence.id].names)

    def observe(self, works: Items[Work], commits: Items[Commit], run_s: float, overhead_s: float) -> None:
        """Everybody learns what the texts really said, and the controller what it took."""
        for name, proposer in self.proposers.items():
            self._guarded(name, partial(proposer.observe, commits))
        step = self._step
        assert step is not None
        for work, reasons in zip(works, step.reasons, strict=True):
            work.sequence.counters.decisions.update(reasons)
        if self.controller is not None:
            times = StepTimes(step.draft_s, run_s, overhead_s)
            self.controller.observe(works, step.drafts, commits, step.load, times)

    def release(self, sequence_ids: Iterable[int]) -> None:
        ids = list(sequence_ids)
        for sequence_id in ids:
            self._texts.pop(sequence_id, None)
        for name, proposer in self.proposers.items():
            self._guarded(name, partial(proposer.release, ids))
        if self.controller is not None:
            self.controller.release(ids)

    def forget(self) -> None:
        """Clear what proposers have learnt from finished texts, so that the next run starts cold."""
        for proposer in self.proposers.values():
            proposer.clear()

    def _proposer(self, choice: ProposerChoice) -> Proposer:
        key = str(choice)
        if key not in self.proposers:
            self.proposers[key] = self.make_proposer(choice)
        return self.proposers[key]

    def _budgets(self, name: str, proposer: Proposer, works: list[Work], step: _Step) -> tuple[list[int], list[int]]:
        """Which works a proposer guesses for, and with how many nodes each."""
        asked: list[int] = []
        budgets: list[int] = []
        for index, work in enumerate(works):
            text = self._texts[work.sequence.id]
            if not work.num_lookahead_tokens or name not in text.names:
                continue
            if name in self._failed:
                step.reasons[index].append(FAILED)
                continue
            budget = work.num_lookahead_tokens
            if text.adaptive and not proposer.free:
                assert self.controller is not None
                most = min(budget, proposer.num_lookahead_tokens)
                budget, reason = self.controller.ask(work, name, proposer.name, most, step.load)
                step.reasons[index].append(f"{proposer.name}: {reason}")
            if budget:
                asked.append(index)
                budgets.append(budget)
        return asked, budgets

    def _ask(self, name: str, proposer: Proposer, works: list[Work], budgets: list[int], step: _Step) -> list[Draft]:
        """One proposer's drafts; none from one that fails, which is not asked again."""
        started = time.perf_counter()
        drafts: list[Draft] = []
        self._guarded(name, lambda: drafts.extend(proposer.propose([work.sequence for work in works], budgets)))
        if len(drafts) != len(works):
            return [NO_DRAFT] * len(works)
        seconds = time.perf_counter() - started
        if self.controller is not None and not proposer.free:
            decided = sum(self._texts[work.sequence.id].adaptive for work in works)
            step.draft_s += seconds * decided / len(works)  # what a request asked for itself is not the controller's
            self.controller.costs.observe_draft(name, sum(map(len, drafts)), seconds)
        return drafts

    def _chosen(self, works: list[Work], step: _Step) -> list[Work]:
        """The works with what the controller lets pass of the drafts that are its to decide about."""
        mine = [self._texts[work.sequence.id].adaptive and work.num_lookahead_tokens > 0 for work in works]
        if self.controller is None or not any(mine):
            step.load = Load.of(works) if any(work.draft for work in works) else step.load
            return works
        step.drafts = [work.draft if is_mine else None for work, is_mine in zip(works, mine, strict=True)]
        if any(work.draft for work, is_mine in zip(works, mine, strict=True) if not is_mine):
            step.load = Load.of(
                [replace(work, draft=NO_DRAFT) if is_mine else work for work, is_mine in zip(works, mine, strict=True)]
            )
        chosen, reasons = self.controller.choose(works, step.drafts, step.load)
        decided: list[Work] = []
        for work, is_mine, draft, reason, told in zip(works, mine, chosen, reasons, step.reasons, strict=True):
            if is_mine:
                told.append(reason)
            decided.append(replace(work, draft=draft) if is_mine and draft is not work.draft else work)
        return decided

    def _guarded(self, name: str, action: Callable[[], None]) -> None:
        """A proposer may fail without harm: nothing more is asked of it, and the texts go on without its guesses."""
        if name in self._failed:
            return
        try:
            action()
        except Exception:
            self._failed.add(name)
            log.exception("The proposer %s failed and is not asked any more; texts go on without its guesses.", name)
