"""A controller that does not depend on the clock, for tests in which it has to draft."""

from __future__ import annotations

from foredraft.control.controller import Controller, Load
from foredraft.control.costs import Calibration, Costs
from foredraft.control.economics import VerifyCurve


class SteadyCosts(Costs):
    """Those of a machine on which rows are nearly free, whatever the clock says."""

    def __init__(self) -> None:
        super().__init__(Calibration(VerifyCurve((1, 64), (1.0, 1.01)), context=16, seconds_per_key=0.0))

    def is_known(self, rows: int) -> bool:
        return True

    def draft(self, proposer: str) -> float:
        return 0.01

    def observe_run(self, rows: int, keys: int, seconds: float) -> None:
        """Nothing changes."""


class SteadyController(Controller):
    """Queries free proposers in every step: on a busy machine that may seem to take too long."""

    def __init__(self) -> None:
        super().__init__(SteadyCosts())

    def may_query(self, load: Load) -> bool:
        return True
