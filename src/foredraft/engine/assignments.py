"""Who proposes for which sequence: the proposers by name, what each request chose, and who has failed for whom."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Items
from dataclasses import dataclass
from typing import Any, TypeVar

from foredraft.proposers.base import Proposer
from foredraft.proposers.registry import ProposerChoice, Spec
from foredraft.types import Sequence, Work

log = logging.getLogger(__name__)

_MOST_IDLE = 8  # proposers that no sequence uses and that are kept for the next request
_MOST_FAILURES = 3  # in a row, after which a proposer is given up for all sequences

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Assignment:
    """What a request chose: these proposers in its own order, and whether the controller decides about them."""

    names: tuple[str, ...]
    adaptive: bool


class Assignments:
    """Proposers are made when a request first names them, and closed when no request has used them for a while.

    A proposer that fails for a sequence proposes no more for that sequence. If the same call, for instance `propose`,
    fails several times in a row, the proposer is given up for all. Other calls that succeed in between do not help it.
    """

    def __init__(self, make_proposer: Callable[[ProposerChoice], Proposer]) -> None:
        self.make_proposer = make_proposer
        self.head: ProposerChoice | None = None  # the model's best one, once it is known that it could pay
        self.proposers: dict[str, Proposer] = {}  # the one that was named last comes last
        self._sequences: dict[int, Assignment] = {}
        self._failures: Counter[tuple[str, str]] = Counter()  # by proposer and call, since that call's last success
        self._given_up: set[str] = set()
        self._failed_for: set[tuple[str, int]] = set()  # proposer and sequence

    def __getitem__(self, sequence: Sequence) -> Assignment:
        return self._sequences[sequence.id]

    def of(self, works: Items[Work]) -> list[Assignment]:
        """What the request of every work chose."""
        chosen = self._sequences
        return [chosen[work.sequence.id] for work in works]

    def choices(self, spec: Spec) -> tuple[ProposerChoice, ...]:
        """The proposers that a request chooses, the model's head among them where it leaves that open."""
        return (*spec.choices, self.head) if spec.with_head and self.head else spec.choices

    def missing(self, spec: Spec) -> list[ProposerChoice]:
        """The proposers that a request would need and that are not there yet."""
        return [choice for choice in self.choices(spec) if str(choice) not in self.proposers]

    def install(self, choice: ProposerChoice, proposer: Proposer) -> None:
        """Take in a proposer that `make_proposer` has made, on whatever thread. Of two for one choice, the first
        stays."""
        if str(choice) in self.proposers:
            self.guarded(str(choice), proposer.close)
        else:
            self.proposers[str(choice)] = proposer

    def prepare(self, spec: Spec) -> int:
        """Make what a request needs and is missing; returns how many slots its drafts may take."""
        for choice in self.missing(spec):
            self.install(choice, self.make_proposer(choice))
        names = [str(choice) for choice in self.choices(spec)]
        for name in names:
            self.proposers[name] = self.proposers.pop(name)
        self.close_idle(keep=names)
        return max((self.proposers[name].num_lookahead_tokens for name in names), default=0)

    def register(self, sequence: Sequence, spec: Spec) -> None:
        names = dict.fromkeys(map(str, self.choices(spec)))
        if sequence.constraint is None:
            names = {name: None for name in names if not getattr(self.proposers[name], "needs_grammar", False)}
        if spec.adaptive:  # a token that several draft counts for one that takes no time
            names = dict.fromkeys(sorted(names, key=lambda name: not self.proposers[name].free))
        self._sequences[sequence.id] = Assignment(tuple(names), spec.adaptive)

    def release(self, sequence_ids: Iterable[int]) -> None:
        """Forget finished sequences. A proposer that has failed may still hold them, so it is told too."""
        ids = set(sequence_ids)
        for sequence_id in ids:
            self._sequences.pop(sequence_id, None)
        for name, proposer in self.proposers.items():
            self.guarded(name, lambda proposer=proposer: proposer.release(list(ids)))  # type: ignore[misc]
        self._failed_for = {pair for pair in self._failed_for if pair[1] not in ids}
        self.close_idle()

    def has_failed(self, name: str, sequence: Sequence) -> bool:
        if not self._given_up and not self._failed_for:
            return False  # as in nearly all steps, for every sequence and proposer
        return name in self._given_up or (name, sequence.id) in self._failed_for

    def attempt(
        self, name: str, call: str, sequence: Sequence, action: Callable[..., _T], *arguments: Any
    ) -> _T | None:
        """Let a proposer do something for a sequence; None where it fails, and the sequence goes on without it."""
        try:
            result = action(*arguments)
        except Exception as error:
            self._failed_for.add((name, sequence.id))
            self.count_failure(name, call, "failed; the sequence it failed for goes on without it.", error)
            return None
        self.count_success(name, call)
        return result

    def guarded(self, name: str, action: Callable[[], None]) -> None:
        """Let a proposer do something that no sequence waits for. A failure is logged and does not count."""
        try:
            action()
        except Exception as error:
            log.error("The proposer %s failed to clean up.", name, exc_info=error)

    def count_success(self, name: str, call: str) -> None:
        if self._failures:
            del self._failures[name, call]

    def count_failure(self, name: str, call: str, what: str, error: Exception) -> None:
        """Log a failure. After several of the same call in a row the proposer is given up for all sequences."""
        log.error("The proposer %s %s", name, what, exc_info=error)
        self._failures[name, call] += 1
        if self._failures[name, call] >= _MOST_FAILURES and name not in self._given_up:
            self._given_up.add(name)
            log.error("The proposer %s failed %d times in a row and is given up.", name, _MOST_FAILURES)

    def close_idle(self, keep: Iterable[str] = ()) -> None:
        """Keep only a few of the proposers that no sequence uses: those that were named last, and those of `keep`."""
        if len(self.proposers) <= _MOST_IDLE:
            return
        used = {name for assignment in self._sequences.values() for name in assignment.names}
        used.update(keep)
        for name in [name for name in self.proposers if name not in used][:-_MOST_IDLE]:
            self.guarded(name, self.proposers.pop(name).close)
            self._failures = Counter({key: count for key, count in self._failures.items() if key[0] != name})
            self._given_up.discard(name)
