"""A batch rests where looking at it is not worth the time: nobody is looked at, and drafts get no slots."""

from __future__ import annotations

import pytest

from foredraft.control.costs import Calibration
from foredraft.control.reasons import DRAFTED, LEDGER, PROBE
from foredraft.types import NO_DRAFT, TARGET, Commit, Work
from tests.unit.controller_calls import Model, asked, chain, credit_of, observed, prices_of, ready, sequence_of
from tests.unit.controller_world import CHEAP, DEAR, NARROW


def test_a_batch_rests_where_looking_takes_longer_than_queries_gain() -> None:
    """Four tokens that are always right gain some three steps."""
    controller, model, work = ready(), Model(), Work(sequence_of(9), 1, 4)
    prices, draft, step_s = prices_of(controller, [work]), chain(4, 0.99, "model"), CHEAP.curve.seconds_at(1)
    commit = Commit(work.sequence, (7, 7, 7, 7, 8), (*("model",) * 4, TARGET), (None,) * 5)
    verified, work.sequence.num_lookahead_tokens = work.with_draft(draft), 4

    def step(looking_s: float) -> None:
        reasons = controller.wants(model, [work], [None], prices)
        made = observed(controller, model, [work], [draft], prices, 0.001) if reasons[0] in (DRAFTED, PROBE) else []
        offers = {0: [offer for offer in made if offer is not None]} if made else {}
        controller.observe([verified if made else work], offers, [commit], prices, 0.001, step_s, looking_s)

    assert not controller.rests([work.sequence], prices.load), "it is new"
    for _ in range(40):
        step(1e-5)
    assert not controller.rests([work.sequence], prices.load)
    for _ in range(8):
        step(1.5 * step_s)
    assert not controller.rests([work.sequence], prices.load)
    for _ in range(8):
        step(3.9 * step_s)
    assert controller.rests([work.sequence], prices.load), "though its credit would allow a query"
    assert credit_of(controller) > 4 * step_s


def test_looking_is_paid_by_who_has_most() -> None:
    controller, model, work = ready(), Model(), Work(sequence_of(9), 1, 4)
    prices = prices_of(controller, [work])
    asked(controller, model, [work], [NO_DRAFT], 0.0)
    before = credit_of(controller)
    commit = Commit(work.sequence, (8,), (TARGET,), (None,))
    controller.observe([work], {}, [commit], prices, 0.0, 0.01, looking_s=0.002)
    assert credit_of(controller) == pytest.approx(before - 0.002 + 0.005 * 0.01)


@pytest.mark.parametrize(("truth", "query_s"), [(NARROW, 0.0004), (CHEAP, 0.002), (CHEAP, 0.02), (DEAR, 0.02)])
def test_what_rests_is_what_would_not_be_queried(truth: Calibration, query_s: float) -> None:
    """Where a batch does not rest, somebody is queried; where it rests, nobody would be."""
    controller, model = ready(truth), Model()
    works = [Work(sequence_of(9, number), 1, 4) for number in range(8)]
    for work in works:
        work.sequence.num_lookahead_tokens = 4
    prices, draft = prices_of(controller, works), chain(4, 0.6, "model")
    commits = [Commit(work.sequence, (8,), (TARGET,), (None,)) for work in works]
    rested = 0
    for step in range(2000):
        rests = controller.rests([work.sequence for work in works], prices.load)
        rested += rests
        reasons = asked(controller.copy() if rests else controller, model, works, [draft] * 8, query_s)
        queried = any(reason in (DRAFTED, PROBE) for reason in reasons)
        assert step == 0 or queried != rests
        controller.observe(works, {}, commits, prices, query_s * queried, truth.curve.seconds_at(8))
    assert 1000 < rested < 2000


def test_a_batch_rests_while_nobody_can_afford_to_catch_up() -> None:
    controller, model = ready(), Model()
    works = [Work(sequence_of(2000, number), 1, 4) for number in range(8)]
    for work in works:
        work.sequence.num_lookahead_tokens = 4
    sequences, prices = [work.sequence for work in works], prices_of(controller, works)
    model.missing = 2000
    assert DRAFTED in controller.wants(model, works, [None] * 8, prices), "what it takes is not known"
    model.missing = 0
    observed(controller, model, works[:1], [chain(4, origin="model")], prices, 1.0)
    model.missing = 2000
    for work in works[1:]:
        controller.release([work.sequence.id])
    controller.release([works[0].sequence.id])
    assert not controller.rests(sequences, prices.load), "they are new"
    assert set(controller.wants(model, works, [None] * 8, prices)) == {LEDGER}
    assert controller.rests(sequences, prices.load)
