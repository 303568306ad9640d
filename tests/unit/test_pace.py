"""What a token is worth: as much as it takes at present."""

from __future__ import annotations

import pytest

from foredraft.control.controller import Controller, Offer
from foredraft.types import TARGET, Commit, Work
from tests.unit.controller_calls import Model, asked, chain, prices_of, ready, sequence_of
from tests.unit.controller_world import NARROW


def stepped(controller: Controller, work: Work, tokens: int, run_s: float) -> None:
    """Steps that bring so many tokens each, and take so long."""
    commit = Commit(work.sequence, (7,) * tokens, (TARGET,) * tokens, (None,) * tokens)
    for _ in range(400):
        controller.observe([work], {}, [commit], prices_of(controller, [work]), 0.0, run_s)


def kept(controller: Controller, model: Model, work: Work) -> int:
    """How many nodes of one draft are verified."""
    prices, draft = prices_of(controller, [work]), chain(8, 0.9, "model")
    asked(controller, model, [work], [draft], 1e-4)
    (cut,), _ = controller.choose([Offer(draft, draft.scores)], prices)
    return len(cut)


def test_rows_must_be_more_probable_where_tokens_come_sooner() -> None:
    controller, model, work, step_s = ready(NARROW), Model(), Work(sequence_of(9), 1, 8), NARROW.curve.seconds_at(1)
    stepped(controller, work, 1, step_s)
    assert controller.pace == pytest.approx(1.0, rel=0.01)
    before = kept(controller, model, work)
    stepped(controller, work, 2, step_s)
    assert controller.pace == pytest.approx(0.5, rel=0.01)
    assert 0 < kept(controller, model, work) < before


def test_a_token_is_never_worth_more_than_in_plain_decoding() -> None:
    """Neither where steps go wrong, nor beside prompts, which take time and bring no token."""
    controller, work, step_s = ready(NARROW), Work(sequence_of(9), 1, 8), NARROW.curve.seconds_at(1)
    stepped(controller, work, 2, step_s)
    prompt = Work(sequence_of(40, 2), 32, 0)
    commits = [Commit(each.sequence, (7,), (TARGET,), (None,)) for each in (work, prompt)]
    for _ in range(400):
        controller.observe([work, prompt], {}, commits, prices_of(controller, [work, prompt]), 0.0, 40 * step_s)
    assert controller.pace < 1
    stepped(controller, work, 1, 2 * step_s)
    assert 0.99 < controller.pace <= 1
