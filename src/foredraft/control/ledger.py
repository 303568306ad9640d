"""The ledger of one proposer: what it may lose, how far behind it is, and what is decided about it for a stretch."""

from __future__ import annotations

from collections.abc import Collection
from collections.abc import Sequence as Items
from dataclasses import dataclass
from math import inf

from foredraft.budget import Budget
from foredraft.control.costs import Costs
from foredraft.control.worth import Candidate, Worth
from foredraft.types import Sequence, Work

PACE_MEMORY = 0.98  # the share that is kept after one more step: what a token takes is over about fifty
_UP_TO_DATE = 16  # tokens that a proposer runs together with its next draft, at no cost of their own

Decision = tuple[Budget, str]  # nodes that a proposer may draft for a sequence, and why
NOTHING = Budget(0)
UNDECIDED: Decision = (Budget(-1), "")


@dataclass
class Behind:
    """How much of a sequence a proposer has run, and what it has spent on the rest since its last draft for it."""

    preemptions: int = 0  # of the sequence by then; after one more, all must be run again
    computed: int = 0
    spent_s: float = 0.0

    def num_missing(self, sequence: Sequence) -> int:
        computed = self.computed if self.preemptions == sequence.counters.preemptions else 0
        return missing if (missing := sequence.num_tokens - computed) > _UP_TO_DATE else 0


NOTHING_RUN = Behind()


class Pace:
    """The time of a token in units of plain decoding, over about the last fifty steps. Steps count that had no draft,
    or one of this proposer alone. While another copies long passages, tokens take next to no time, but that makes the
    tokens between the copies no cheaper."""

    def __init__(self, name: str, plain_s: float) -> None:
        self._name = name
        self._spent_s = self._plain_s = plain_s

    def count(self, drafted: Collection[str], spent_s: float, plain_s: float) -> None:
        """A step with drafts of these proposers took so long, and plain decoding would have for its tokens."""
        if not drafted or (len(drafted) == 1 and self._name in drafted):
            self._spent_s = PACE_MEMORY * self._spent_s + spent_s
            self._plain_s = PACE_MEMORY * self._plain_s + plain_s

    @property
    def share(self) -> float:
        """The time of a token, of that in plain steps."""
        return min(1.0, self._spent_s / self._plain_s)


class Ledger:
    """Starts with an allowance, from which a proposer's losses are paid. It holds at most `most_s`, so that old gains
    do not pay for ever."""

    def __init__(self, candidate: Candidate, allowance_s: float, most_s: float) -> None:
        self.worth = Worth(candidate)
        self.pace = Pace(candidate.name, allowance_s)
        self.balance_s = self.saved_s = allowance_s  # catching up is paid from all savings, which have no cap
        self.most_s = most_s
        self.queried_s = 0.0  # when it was last queried
        self.is_probed = False  # whether it was last queried although that did not pay
        self.behind: dict[int, Behind] = {}  # by sequence
        self.forget_decisions()

    def forget_decisions(self) -> None:
        """Decide anew with the next step."""
        self.decisions: dict[int, Decision] = {}  # those that stand, by sequence
        self.decided_for = (0, 0, 0)  # most nodes, sequences and rows, about: they stand for these
        self.decided_until_s = inf  # then they are made anew: a query is due, or has been repeated often enough

    def stands_until_s(self, works: Items[Work]) -> float:
        """Until when decisions stand about all of these works; -inf where they do not."""
        return self.decided_until_s if all(work.sequence.id in self.decisions for work in works) else -inf

    def catch_up_s(self, candidate: Candidate, sequence: Sequence, costs: Costs) -> float:
        """What is still to be spent before the proposer can draft for a sequence."""
        missing = 0 if candidate.is_free else self.behind.get(sequence.id, NOTHING_RUN).num_missing(sequence)
        return costs.catch_up(candidate.name, missing) if missing else 0.0

    def book(self, seconds: float) -> None:
        self.saved_s += seconds
        self.balance_s = min(self.most_s, self.balance_s + seconds)
