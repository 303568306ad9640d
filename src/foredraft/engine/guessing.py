"""All of a step that has to do with guessing: who guesses for which sequence, how much is verified, what it took."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Items
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

from foredraft.control.controller import Controller, Load, StepTimes
from foredraft.proposers.base import Proposer
from foredraft.proposers.merge import merge
from foredraft.proposers.registry import ProposerChoice, Spec
from foredraft.types import NO_DRAFT, Commit, Draft, Sequence, Work

log = logging.getLogger(__name__)

FAILED = "proposer failed"
CONTROLLER_FAILED = "controller failed"
NOT_ASKED = "not asked"  # because nothing that it could say would pay, or because nothing that it said did

_MOST_IDLE = 8  # proposers that no text uses, but that may be asked for again

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class _Guessed:
    """What a sequence's request asked for: these proposers in its own order, and whether the controller decides about
    them."""

    names: tuple[str, ...]
    adaptive: bool


@dataclass(slots=True)
class _Step:
    """What is remembered of a step until its commits are known."""

    load: Load  # what ran in any case
    drafts: list[Draft | None]  # of the controller's sequences, before anything was cut from them
    may_ask: bool | None = None  # proposers that take next to no time, for those sequences
    draft_s: float = 0.0  # spent on proposers that take time
    asking_s: float = 0.0  # and on those that take next to none
    waking_s: float = 0.0  # and on reading texts that they had not followed
    reasons: list[list[str]] = field(default_factory=list)


class Guesser:
    """The proposers by name, made when they are first asked for, and the controller, made with the first request that
    leaves the choice to it. Both may fail without harm: nothing more is asked of them, and texts go on without."""

    def __init__(
        self,
        make_proposer: Callable[[ProposerChoice], Proposer],
        make_controller: Callable[[], Controller],
        vocab_size: int,
    ) -> None:
        self.make_proposer = make_proposer
        self._make_controller = make_controller
        self._vocab_size = vocab_size  # of the target's logits
        self.proposers: dict[str, Proposer] = {}  # the one that was asked for last comes last
        self.controller: Controller | None = None
        self._controller_failed = False
        self._texts: dict[int, _Guessed] = {}
        self._failed: set[str] = set()
        self._step: _Step | None = None

    def prepare(self, spec: Spec) -> int:
        """Make what a request will need, before it is admitted; returns how many slots its drafts may take."""
        self._let_idle_ones_go()
        if spec.adaptive and self.controller is None and not self._controller_failed:
            try:
                self.controller = self._make_controller()
            except Exception:
                self._give_controller_up()
        made = [self._proposer(choice) for choice in spec.choices]
        return max((proposer.num_lookahead_tokens for proposer in made), default=0)

    def enter(self, sequence: Sequence, spec: Spec) -> None:
        self._texts[sequence.id] = _Guessed(tuple(dict.fromkeys(map(str, spec.choices))), spec.adaptive)

    def guess(self, works: list[Work]) -> list[Work]:
        """Give every work that has slots for one a draft, merged from the guesses of its proposers."""
        step = self._step = _Step(Load.of(works), [None] * len(works), reasons=[[] for _ in works])
        guesses: list[dict[str, Draft]] = [{} for _ in works]
        for name, proposer in self.proposers.items():
            asked, budgets = self._budgets(name, proposer, works, step)
            if asked:
                drafts = self._ask(name, proposer, [works[index] for index in asked], budgets, step)
                for index, draft in zip(asked, drafts, strict=True):
                    if draft:
                        guesses[index][name] = draft
                    elif name in self._failed:
                        step.reasons[index].append(FAILED)
        if any(guesses):
            works = [
                self._merged(work, drafts) if drafts else work for work, drafts in zip(works, guesses, strict=True)
            ]
        return self._chosen(works, step)

    def wants_said(self, sequence: Sequence) -> bool:
        """Whether somebody who guesses for the sequence wants to hear what the target says after every guess."""
        return any(self.proposers[name].wants_said for name in self._texts[sequence.id].names)

    def observe(self, works: Items[Work], commits: Items[Commit], run_s: float, overhead_s: float) -> None:
        """Everybody learns what the texts really said, and the controller what it took."""
        for name, proposer in self.proposers.items():
            if name not in self._failed:
                self._guarded(name, partial(proposer.observe, commits))
        step = self._step
        assert step is not None
        adaptive = False
        for work, reasons in zip(works, step.reasons, strict=True):
            adaptive |= self._texts[work.sequence.id].adaptive
            for reason in reasons:
                work.sequence.counters.decisions[reason] += 1
        if not adaptive:
            return  # nobody here left the choice to the controller, so nobody waits for it to learn
        times = StepTimes(step.draft_s, run_s, overhead_s, step.waking_s, step.asking_s)
        self._controlled(lambda controller: controller.observe(works, step.drafts, commits, step.load, times))

    def release(self, sequence_ids: Iterable[int]) -> None:
        ids = list(sequence_ids)
        for sequence_id in ids:
            self._texts.pop(sequence_id, None)
        for name, proposer in self.proposers.items():
            self._guarded(name, partial(proposer.release, ids))  # one that has failed may still hold them
        self._controlled(lambda controller: controller.release(ids))
        self._let_idle_ones_go()

    def forget(self) -> None:
        """Clear what proposers have learnt from finished texts, so that the next run starts cold."""
        for name, proposer in self.proposers.items():
            self._guarded(name, proposer.clear)

    def _proposer(self, choice: ProposerChoice) -> Proposer:
        key = str(choice)
        proposer = self.proposers.pop(key) if key in self.proposers else self.make_proposer(choice)
        self.proposers[key] = proposer
        return proposer

    def _let_idle_ones_go(self) -> None:
        """Keep only a few of the proposers that no text uses, those that were asked for last. What they hold goes with
        them, a model that they alone guess with too."""
        if len(self.proposers) <= _MOST_IDLE:
            return
        used = {name for text in self._texts.values() for name in text.names}
        for name in [name for name in self.proposers if name not in used][:-_MOST_IDLE]:
            del self.proposers[name]
            self._failed.discard(name)

    def _budgets(self, name: str, proposer: Proposer, works: list[Work], step: _Step) -> tuple[list[int], list[int]]:
        """Which works a proposer guesses for, and with how many nodes each."""
        asked: list[int] = []
        budgets: list[int] = []
        for index, work in enumerate(works):
            text = self._texts[work.sequence.id]
            if not work.num_lookahead_tokens or name not in text.names:
                continue
            if text.adaptive and self.controller is None:
                continue
            if name in self._failed:
                step.reasons[index].append(FAILED)
                continue
            budget = work.num_lookahead_tokens
            if text.adaptive and proposer.free:
                if step.may_ask is None:
                    step.may_ask = self._controlled(lambda controller: controller.may_ask(step.load))
                if not step.may_ask:
                    step.reasons[index].append(f"{proposer.name}: {NOT_ASKED}")
                    continue
            if text.adaptive and not proposer.free:
                ask = partial(_ask_controller, work, name, proposer, step.load)
                budget, reason = self._controlled(ask) or (0, CONTROLLER_FAILED)
                step.reasons[index].append(f"{proposer.name}: {reason}")
            if budget:
                asked.append(index)
                budgets.append(budget)
        return asked, budgets

    def _ask(self, name: str, proposer: Proposer, works: list[Work], budgets: list[int], step: _Step) -> list[Draft]:
        """One proposer's drafts; none from one that fails, which is not asked again."""
        started = time.perf_counter()
        drafts = self._guarded(name, lambda: self._checked(proposer, works, budgets))
        if drafts is None:
            return [NO_DRAFT] * len(works)
        seconds = time.perf_counter() - started
        # what a request asked for itself is not the controller's
        share = sum(self._texts[work.sequence.id].adaptive for work in works) / len(works)
        if proposer.free:
            step.asking_s += seconds * share
        elif share:
            nodes = sum(map(len, drafts))
            waking_s = self._controlled(lambda controller: controller.observe_draft(name, nodes, seconds)) or 0.0
            step.waking_s += waking_s * share
            step.draft_s += (seconds - waking_s) * share
        return drafts

    def _checked(self, proposer: Proposer, works: list[Work], budgets: list[int]) -> list[Draft]:
        """A proposer's drafts, if they are such that the target can run them."""
        drafts = proposer.propose([work.sequence for work in works], budgets)
        if len(drafts) != len(works):
            raise ValueError(f"{len(drafts)} drafts were guessed for {len(works)} texts")
        for draft, budget in zip(drafts, budgets, strict=True):
            if len(draft) > budget:
                raise ValueError(f"{len(draft)} tokens were guessed where {budget} were asked for")
            if draft and not 0 <= min(draft.tokens) <= max(draft.tokens) < self._vocab_size:
                raise ValueError(f"tokens were guessed that the target does not have; it has {self._vocab_size}")
            if not all(0 < score <= 1 for score in draft.scores):
                raise ValueError(f"scores are probabilities above 0, not {draft.scores}")
            if draft.q is not None:
                self._check_law(draft)
        return drafts

    def _check_law(self, draft: Draft) -> None:
        """Rules that trust q would keep whatever comes with one that is none."""
        if tuple(draft.q.shape) != (len(draft), self._vocab_size):
            raise ValueError(f"q has the shape {tuple(draft.q.shape)}, not {(len(draft), self._vocab_size)}")
        drawn = draft.q[list(range(len(draft))), list(draft.tokens)]
        if not (drawn > 0).all() or not (draft.q >= 0).all() or not ((draft.q.sum(-1) - 1).abs() < 1e-3).all():
            raise ValueError("q is no distribution from which these tokens can have been drawn")

    def _merged(self, work: Work, drafts: dict[str, Draft]) -> Work:
        """The work with the guesses of all its proposers, in the order in which the request names them."""
        names = self._texts[work.sequence.id].names
        return work.with_draft(merge([drafts[name] for name in names if name in drafts], work.num_lookahead_tokens))

    def _chosen(self, works: list[Work], step: _Step) -> list[Work]:
        """The works with what the controller lets pass of the drafts that are its to decide about."""
        mine = [self._texts[work.sequence.id].adaptive and work.num_lookahead_tokens > 0 for work in works]
        if not all(mine) and any(work.draft for work in works):  # what others have guessed runs in any case
            step.load = Load.of(
                [work.with_draft(NO_DRAFT) if is_mine else work for work, is_mine in zip(works, mine, strict=True)]
            )
        if not any(mine):
            return works
        step.drafts = [work.draft if is_mine else None for work, is_mine in zip(works, mine, strict=True)]
        chosen, reasons = self._controlled(
            lambda controller: controller.choose(works, step.drafts, step.load)
        ) or _without_controller(step.drafts)
        decided: list[Work] = []
        for work, is_mine, draft, reason, told in zip(works, mine, chosen, reasons, step.reasons, strict=True):
            if is_mine:
                told.append(reason)
            decided.append(work.with_draft(draft) if is_mine and draft is not work.draft else work)
        return decided

    def _guarded(self, name: str, action: Callable[[], _T]) -> _T | None:
        """Let a proposer do something; None where it fails."""
        try:
            return action()
        except Exception:
            if name not in self._failed:
                self._failed.add(name)
                log.exception("The proposer %s failed and is not asked any more; texts go on without it.", name)
            return None

    def _controlled(self, action: Callable[[Controller], _T]) -> _T | None:
        """Let the controller do something; None where there is none, or where it fails."""
        if self.controller is None:
            return None
        try:
            return action(self.controller)
        except Exception:
            self._give_controller_up()
            return None

    def _give_controller_up(self) -> None:
        self.controller, self._controller_failed = None, True
        log.exception("The controller failed; nothing is guessed any more for texts that leave the choice to it.")


def _ask_controller(work: Work, name: str, proposer: Proposer, load: Load, controller: Controller) -> tuple[int, str]:
    most = min(work.num_lookahead_tokens, proposer.num_lookahead_tokens)
    return controller.ask(work, name, proposer.name, most, load)


def _without_controller(drafts: list[Draft | None]) -> tuple[list[Draft], list[str]]:
    """Nothing is verified, but for drafts that were sampled: to drop those after looking at them would bias the
    text."""
    kept = [draft if draft is not None and draft.q is not None else NO_DRAFT for draft in drafts]
    return kept, [CONTROLLER_FAILED] * len(kept)
