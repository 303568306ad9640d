"""What one step remembers of its drafts until its commits are known."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from math import inf
from typing import NamedTuple

from foredraft.budget import Budget
from foredraft.control.costs import StepTimes
from foredraft.control.reasons import NOTHING_PROPOSED
from foredraft.control.worth import Candidate, Load
from foredraft.engine.assignments import Assignment
from foredraft.proposers.base import Proposer
from foredraft.types import Draft, Work


class Query(NamedTuple):
    """A query of a proposer."""

    proposer: Proposer
    candidate: Candidate
    budgets: dict[int, Budget]  # nodes, by index of the works that it drafts for
    drafts: dict[int, Draft]  # of those works
    seconds: float


class StepRecord:
    """Most works of most steps have no drafts: what is kept by index of the works has entries only for those that
    do."""

    def __init__(self, works: list[Work], assigned: list[Assignment]) -> None:
        self.works = works  # without drafts
        self.assigned = assigned  # of each work
        self.queries: dict[str, Query] = {}  # by name of the proposer
        self.made: dict[int, dict[str, Draft]] = {}  # by work and proposer, as they were made; none is empty
        self.proposed: dict[int, dict[str, Draft]] = {}  # as they are merged: the controller corrects the scores
        self.reasons: defaultdict[int, list[str]] = defaultdict(list)
        self.query_s = 0.0
        self.controlled_s = 0.0  # of that, for sequences of the controller
        self.deciding_s = 0.0  # what it took beside the queries
        self.decided: dict[str, int] = {}  # by proposer: works and nodes that the controller had to decide about
        self.stands_until_s = -inf  # how long steps like it may do the same, on the controller's clock
        self.named = {name for assignment in assigned for name in assignment.names}
        self.any_adaptive = any(assignment.adaptive for assignment in assigned)
        # What runs without the controller's drafts; of no interest where it decides about nobody.
        self.load = Load.of(works) if self.any_adaptive else Load(0, 0, 0)
        self._sequence_ids = [work.sequence.id for work in works]

    def items(self) -> Iterable[tuple[Work, Assignment]]:
        return zip(self.works, self.assigned, strict=True)

    def is_like(self, works: list[Work]) -> bool:
        """Whether these works are of the same sequences and have slots for what may be drafted."""
        if [work.sequence.id for work in works] != self._sequence_ids:
            return False
        return not self.queries or all(work.num_lookahead_tokens for work in works)

    def times(self, run_s: float) -> StepTimes:
        """What the step took, as the controller counts it, with a run of so many seconds."""
        return StepTimes(run_s, self.controlled_s, self.deciding_s, self.decided)

    def repeat(self, works: list[Work], query_s: float, deciding_s: float) -> None:
        """Become the record of a step like it, with the same decisions, whose queries have brought nothing."""
        self.works, self.load, self.query_s, self.deciding_s = works, Load.of(works), query_s, deciding_s
        self.controlled_s = query_s
        if self.made:
            self.made, self.proposed = {}, {}
            self.decided = dict.fromkeys(self.decided, len(works))
            for reasons in self.reasons.values():
                reasons[-1] = NOTHING_PROPOSED  # instead of what became of the draft
