"""Who proposes for which sequence: the proposers by name, what each request chose, and who has failed for whom."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TypeVar

from foredraft.proposers.base import Proposer
from foredraft.proposers.registry import ProposerChoice, Spec
from foredraft.types import Sequence

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

    A proposer that fails for a sequence proposes no more for that sequence. Several failures in a row, with no success
    in between, end it for all.
    """

    def __init__(
        self,
        make_proposer: Callable[[ProposerChoice], Proposer],
        on_close: Callable[[str], None] = lambda name: None,  # told the name of every proposer that is closed
    ) -> None:
        self.make_proposer = make_proposer
        self._on_close = on_close
        self.proposers: dict[str, Proposer] = {}  # the one that was named last comes last
        self._sequences: dict[int, Assignment] = {}
        self._failures: Counter[str] = Counter()  # by proposer, since its last success
        self._failed_for: set[tuple[str, int]] = set()  # proposer and sequence

    def __getitem__(self, sequence: Sequence) -> Assignment:
        return self._sequences[sequence.id]

    def missing(self, spec: Spec) -> list[ProposerChoice]:
        """The proposers that a request would need and that are not there yet."""
        return [choice for choice in spec.choices if str(choice) not in self.proposers]

    def install(self, choice: ProposerChoice, proposer: Proposer) -> None:
        """Take in a proposer that `make_proposer` has made, on whatever thread. Of two for one choice, the first
        stays."""
        if str(choice) in self.proposers:
            self.guarded(str(choice), (), proposer.close)
        else:
            self.proposers[str(choice)] = proposer

    def prepare(self, spec: Spec) -> int:
        """Make what a request needs and is missing; returns how many slots its drafts may take."""
        for choice in self.missing(spec):
            self.install(choice, self.make_proposer(choice))
        for choice in spec.choices:
            self.proposers[str(choice)] = self.proposers.pop(str(choice))
        self.close_idle(keep=spec)
        return max((self.proposers[str(choice)].num_lookahead_tokens for choice in spec.choices), default=0)

    def register(self, sequence: Sequence, spec: Spec) -> None:
        self._sequences[sequence.id] = Assignment(tuple(dict.fromkeys(map(str, spec.choices))), spec.adaptive)

    def release(self, sequence_ids: Iterable[int]) -> None:
        """Forget finished sequences. A proposer that has failed may still hold them, so it is told too."""
        ids = set(sequence_ids)
        for sequence_id in ids:
            self._sequences.pop(sequence_id, None)
        for name, proposer in self.proposers.items():
            self.guarded(name, (), lambda proposer=proposer: proposer.release(list(ids)))  # type: ignore[misc]
        self._failed_for = {pair for pair in self._failed_for if pair[1] not in ids}
        self.close_idle()

    def has_failed(self, name: str, sequence: Sequence) -> bool:
        return self._failures[name] >= _MOST_FAILURES or (name, sequence.id) in self._failed_for

    def is_given_up(self, name: str) -> bool:
        return self._failures[name] >= _MOST_FAILURES

    def guarded(self, name: str, sequences: Iterable[Sequence], action: Callable[[], _T]) -> _T | None:
        """Let a proposer do something for these sequences; None where it fails."""
        try:
            result = action()
        except Exception:
            log.exception("The proposer %s failed; the sequences it failed for go on without it.", name)
            self._failures[name] += 1
            self._failed_for.update((name, sequence.id) for sequence in sequences)
            if self._failures[name] == _MOST_FAILURES:
                log.error("The proposer %s failed %d times in a row and is given up.", name, _MOST_FAILURES)
            return None
        if not self.is_given_up(name):
            self._failures[name] = 0
        return result

    def close_idle(self, keep: Spec | None = None) -> None:
        """Keep only a few of the proposers that no sequence uses: those that were named last, and those of `keep`."""
        if len(self.proposers) <= _MOST_IDLE:
            return
        used = {name for assignment in self._sequences.values() for name in assignment.names}
        used.update(map(str, keep.choices) if keep else ())
        for name in [name for name in self.proposers if name not in used][:-_MOST_IDLE]:
            self.guarded(name, (), self.proposers.pop(name).close)
            del self._failures[name]
            self._on_close(name)
