"""What a request teaches about a proposer's confidence: much for itself, a little for others."""

from __future__ import annotations

from foredraft.control.controller import Controller
from foredraft.types import TARGET, Commit, Work
from tests.unit.controller_calls import Model, asked, chain, observed, prices_of, ready, sequence_of


def survival(controller: Controller, model: Model, work: Work) -> float:
    """Of a first token in which the proposer has a confidence of a half."""
    asked(controller, model, [work], [chain(1, 0.5, "model")], 1e-4)
    (offer,) = controller.offers(model, [work], [chain(1, 0.5, "model")])
    assert offer is not None
    return offer.survivals[0]


def write(controller: Controller, model: Model, work: Work, token: int, steps: int) -> None:
    """Steps in which the draft is right (7) or wrong."""
    prices, draft = prices_of(controller, [work]), chain(1, 0.5, "model")
    commit = Commit(work.sequence, (token, 8), (TARGET,) * 2, (None,) * 2)
    for _ in range(steps):
        controller.wants(model, [work], [None], prices)
        offers = [offer for offer in observed(controller, model, [work], [draft], prices, 1e-4) if offer is not None]
        controller.observe([work.with_draft(draft)], {0: offers}, [commit], prices, 1e-4, 0.01)


def test_a_request_is_judged_by_its_own_drafts() -> None:
    """One that copies makes a proposer sure of itself; in the next one, which does not, that is soon over."""
    controller, model = ready(), Model()
    copying, other = (Work(sequence_of(9, number), 1, 4) for number in (1, 2))
    write(controller, model, copying, 7, 100)
    sure = survival(controller, model, copying)
    fresh = survival(controller, model, other)
    assert sure > 0.9, "it was right a hundred times"
    assert 0.5 < fresh < 0.85, "the first drafts of the other count for this one too, and no more"
    write(controller, model, other, 6, 12)
    assert survival(controller, model, other) < 0.4
    assert survival(controller, model, copying) > 0.9
