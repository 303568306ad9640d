"""A controller that does not depend on the clock, for tests in which it has to draft."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from collections.abc import Sequence as Items

from foredraft.control.controller import Candidate, Controller, Offer, Prices
from foredraft.control.costs import Calibration, Costs, Load
from foredraft.control.economics import VerifyCurve
from foredraft.types import Commit, Work


class SteadyCosts(Costs):
    """Those of a machine on which rows are nearly free, whatever the clock says."""

    def __init__(self) -> None:
        super().__init__(Calibration(VerifyCurve((1, 64), (1.0, 1.01)), context=16, seconds_per_key=0.0))

    def is_known(self, rows: int) -> bool:
        return True

    def observe(self, rows: int, keys: int, seconds: float, is_plain: bool) -> None:
        """Nothing changes."""


class SteadyController(Controller):
    """Books every step with the time that it is expected to take, and queries with none: on a busy machine drafts may
    seem to take too long."""

    def __init__(self) -> None:
        super().__init__(SteadyCosts())

    def observe_query(
        self, candidate: Candidate, works: Items[Work], offers: Items[Offer | None], prices: Prices, seconds: float
    ) -> None:
        super().observe_query(candidate, works, offers, prices, seconds=0.0)

    def observe(
        self,
        works: Items[Work],
        offers: Mapping[int, Collection[Offer]],
        commits: Items[Commit],
        prices: Prices,
        query_s: float,
        run_s: float,
        looking_s: float = 0.0,
    ) -> None:
        run = Load.of(works)
        super().observe(works, offers, commits, prices, 0.0, self.costs.run(run.rows, run.keys))
