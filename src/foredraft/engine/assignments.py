"""Who proposes for which sequence: the proposers by name, and what each request chose."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from collections.abc import Sequence as Items
from dataclasses import dataclass

from foredraft.engine.guarded import Guarded
from foredraft.proposers.base import Proposer
from foredraft.proposers.registry import ProposerChoice, Spec
from foredraft.types import Sequence, Work

_MOST_IDLE = 8  # proposers that no sequence uses and that are kept for the next request


@dataclass(frozen=True, slots=True, eq=False)
class Assignment:
    """What requests chose: these proposers in their own order, and whether the controller decides about them. Requests
    that chose the same share one object: a step tells them apart by identity."""

    proposers: dict[str, Guarded]
    adaptive: bool


def in_turn(assignments: Collection[Assignment]) -> Iterable[Guarded]:
    """The proposers of all of these, each once. Those that take next to no time are queried first."""
    if len(assignments) == 1:  # as in nearly every step; where it matters, they are in that order
        return next(iter(assignments)).proposers.values()
    proposers = {guarded for each in assignments for guarded in each.proposers.values()}
    return sorted(proposers, key=lambda guarded: (not guarded.proposer.free, guarded.name))


class Assignments:
    """Proposers are made when a request first names them, and closed when no request has used them for a while."""

    def __init__(
        self,
        make_proposer: Callable[[ProposerChoice], Proposer],
        vocab_size: int,
        clock: Callable[[], float],
    ) -> None:
        self.make_proposer = make_proposer
        self.head: ProposerChoice | None = None  # the model's best one, once it is known that it could pay
        self.proposers: dict[str, Guarded] = {}  # the one that was named last comes last
        self._vocab_size = vocab_size
        self._clock = clock
        self._sequences: dict[int, Assignment] = {}

    def __getitem__(self, sequence: Sequence) -> Assignment:
        return self._sequences[sequence.id]

    def of(self, works: Items[Work]) -> list[Assignment]:
        """What the request of every work chose."""
        sequences = self._sequences
        return [sequences[work.sequence.id] for work in works]

    def choices(self, spec: Spec) -> tuple[ProposerChoice, ...]:
        """The proposers that a request chooses, the model's head among them where it leaves that open."""
        return (*spec.choices, self.head) if spec.with_head and self.head else spec.choices

    def missing(self, spec: Spec) -> list[ProposerChoice]:
        """The proposers that a request would need and that are not there yet."""
        return [choice for choice in self.choices(spec) if str(choice) not in self.proposers]

    def install(self, choice: ProposerChoice, proposer: Proposer) -> None:
        """Take in a proposer that `make_proposer` has made, on whatever thread. Of two for one choice, the first
        stays."""
        guarded = Guarded(str(choice), proposer, self._vocab_size, self._clock)
        if self.proposers.setdefault(guarded.name, guarded) is not guarded:
            guarded.close()

    def prepare(self, spec: Spec) -> int:
        """Make what a request needs and is missing; returns how many slots its drafts may take."""
        for choice in self.missing(spec):
            self.install(choice, self.make_proposer(choice))
        names = [str(choice) for choice in self.choices(spec)]
        for name in names:
            self.proposers[name] = self.proposers.pop(name)
        self._close_idle(keep=names)
        return max((self.proposers[name].proposer.num_lookahead_tokens for name in names), default=0)

    def register(self, sequence: Sequence, spec: Spec) -> None:
        named = [self.proposers[name] for name in dict.fromkeys(map(str, self.choices(spec)))]
        chosen = [each for each in named if _has(sequence, each.proposer.needs)]
        if spec.adaptive:  # a token that several draft counts for one that takes no time
            chosen.sort(key=lambda each: not each.proposer.free)
        for alike in self._sequences.values():
            if (list(alike.proposers.values()), alike.adaptive) == (chosen, spec.adaptive):
                self._sequences[sequence.id] = alike
                return
        self._sequences[sequence.id] = Assignment({each.name: each for each in chosen}, spec.adaptive)

    def release(self, sequence_ids: Iterable[int]) -> None:
        ids = list(sequence_ids)
        for sequence_id in ids:
            self._sequences.pop(sequence_id, None)
        for guarded in self.proposers.values():
            guarded.release(ids)
        self._close_idle()

    def _close_idle(self, keep: Iterable[str] = ()) -> None:
        """Keep only a few of the proposers that no sequence uses: those that were named last, and those of `keep`."""
        if len(self.proposers) <= _MOST_IDLE:
            return
        used = {name for assignment in self._sequences.values() for name in assignment.proposers}
        used.update(keep)
        for name in [name for name in self.proposers if name not in used][:-_MOST_IDLE]:
            self.proposers.pop(name).close()


def _has(sequence: Sequence, needed: str | None) -> bool:
    """Whether a request has the field that a proposer drafts from."""
    return needed is None or getattr(sequence.params, needed) is not None
