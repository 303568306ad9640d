"""A controller that does not depend on the clock, for tests in which it has to draft."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Items

from foredraft.control.controller import Controller
from foredraft.control.costs import Calibration, Costs, StepTimes
from foredraft.control.economics import VerifyCurve
from foredraft.control.worth import Candidate, Load
from foredraft.types import Commit, Draft, Work


class SteadyCosts(Costs):
    """Those of a machine on which rows are nearly free, whatever the clock says."""

    def __init__(self) -> None:
        super().__init__(Calibration(VerifyCurve((1, 64), (1.0, 1.01)), context=16, seconds_per_key=0.0))

    def is_known(self, rows: int) -> bool:
        return True

    def draft(self, proposer: str, nodes: int, sequences: int) -> float:
        return 0.01 * nodes

    def catch_up(self, proposer: str, tokens: int) -> float:
        return 0.0

    def observe_runs(self, rows: int, keys: int, times: Items[float]) -> None:
        """Nothing changes."""

    def observe_deciding(self, proposer: str, sequences: int, seconds: float) -> None:
        """Nothing changes."""


class SteadyController(Controller):
    """Books every step and every query with the time that it is expected to take: on a busy machine drafts may seem to
    take too long."""

    def __init__(self) -> None:
        super().__init__(SteadyCosts())

    def observe_query(
        self, candidate: Candidate, works: Items[Work], budgets: Items[int], drafts: Items[Draft], seconds: float
    ) -> list[Draft]:
        return super().observe_query(candidate, works, budgets, drafts, seconds=0.0)

    def observe(
        self,
        works: Items[Work],
        drafts: Items[Mapping[str, Draft] | None],
        commits: Items[Commit],
        load: Load,
        times: StepTimes,
    ) -> None:
        run = Load.of(works)
        super().observe(works, drafts, commits, load, StepTimes(self.costs.run(run.rows, run.keys)))

    def observe_plain(self, load: Load, times: StepTimes) -> None:
        super().observe_plain(load, StepTimes(self.costs.run(load.rows, load.keys)))
