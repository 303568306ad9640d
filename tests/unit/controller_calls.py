"""The controller called by hand: what tests ask it about a sequence or two."""

from __future__ import annotations

from typing import Any

from foredraft.control.controller import Controller, Offer, Prices
from foredraft.control.costs import Calibration, Costs, Load
from foredraft.control.reasons import DRAFTED, PROBE
from foredraft.params import SamplingParams
from foredraft.types import Draft, Sequence, Work
from tests.unit.controller_world import CHEAP, Player, constant


def chain(size: int, score: float = 0.8, origin: str = "test") -> Draft:
    scores = tuple(score**depth for depth in range(1, size + 1))
    return Draft((7,) * size, tuple(range(-1, size - 1)), scores, (origin,) * size)


def sequence_of(num_tokens: int, sequence_id: int = 1, temperature: float = 0.0) -> Sequence:
    params = SamplingParams(temperature=temperature).resolved({})
    sequence = Sequence(sequence_id, "", 0, [1] * num_tokens, num_tokens, params, 0, 999)
    sequence.num_computed_tokens = num_tokens - 1
    return sequence


class Model(Player):
    """A proposer that is told how far behind it is."""

    def __init__(self, name: str = "model", most: int = 4, missing: int = 0) -> None:
        super().__init__(name, constant(0.0), free=False, num_lookahead_tokens=most)
        self.missing = missing

    def num_missing(self, sequence: Sequence) -> int:
        return self.missing


def ready(truth: Calibration = CHEAP) -> Controller:
    """A controller that knows what plain steps take, alone and for some sequences together."""
    controller = Controller(Costs(truth))
    for rows in (1, 2, 4, 8):
        for _ in range(16):
            controller.costs.observe(rows, 9 * rows, truth.curve.seconds_at(rows), True)
    return controller


def prices_of(controller: Controller, works: list[Work]) -> Prices:
    return controller.prices(Load.of(works), 16)


def record_of(controller: Controller, model: Player, work: Work) -> Any:
    """The record by which a proposer is judged for a work."""
    controller.wants(model, [work], [None], prices_of(controller, [work]))
    return controller._requests[model.name][work.sequence.id].record


def observed(
    controller: Controller, model: Player, works: list[Work], drafts: list[Draft], prices: Prices, seconds: float
) -> list[Offer | None]:
    """Let the controller learn from a query; returns what it offers."""
    offers = controller.offers(model, works, drafts)
    controller.observe_query(model, works, offers, prices, seconds)
    return offers


def asked(controller: Controller, model: Player, works: list[Work], drafts: list[Draft], seconds: float) -> list[str]:
    """Ask the controller, and let the proposer answer where it wants that."""
    prices = prices_of(controller, works)
    reasons = controller.wants(model, works, [None] * len(works), prices)
    chosen = [place for place, reason in enumerate(reasons) if reason in (DRAFTED, PROBE)]
    if chosen:
        some = [works[place] for place in chosen]
        observed(controller, model, some, [drafts[place] for place in chosen], prices, seconds)
    return reasons


def credit_of(controller: Controller, name: str = "model", kind: int = 0) -> float:
    return controller._records[name, kind].credit_s
