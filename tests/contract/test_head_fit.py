"""A head whose first tokens are hardly ever right is named, once, in the log and in the metrics."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

from foredraft.engine.head_fit import HeadFit
from foredraft.llm import LLM
from foredraft.params import SamplingParams
from foredraft.proposers.registry import ProposerChoice
from foredraft.server.metrics import Metrics
from foredraft.types import Commit, Draft, Sequence
from tests.published.layouts import LAYOUTS
from tests.published.shapes import TargetShape
from tests.tiny_models import VOCAB, random_model, save_model

LAYERS = 8
FEW = dict.fromkeys(range(6), 9.0)  # so that a head that knows nothing is sometimes right
NAMED = "head does not seem to belong to this model"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(random_model("llama", num_hidden_layers=LAYERS), tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def head(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One that others have published, for another model of the same sizes."""
    place, config = tmp_path_factory.mktemp("head"), random_model("llama", num_hidden_layers=LAYERS).config
    shape = TargetShape(
        hidden=config.hidden_size,
        vocab=VOCAB,
        layers=LAYERS,
        heads=config.num_attention_heads,
        head_dim=config.head_dim,
    )
    LAYOUTS["eagle3/specforge"].write(place, shape, 7)
    return place


@pytest.mark.parametrize(("spec", "bias", "misfits"), [("eagle", None, ("eagle",)), ("eagle", FEW, ())])
def test_a_head_of_another_model_is_named_once(
    folder: Path,
    head: Path,
    spec: str,
    bias: Any,
    misfits: tuple[str, ...],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """And what was measured is kept for the next time that the head is loaded."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    llm = LLM(str(folder), head=str(head), spec="off")
    assert llm.engine.speculation.assignments.make_proposer(ProposerChoice("eagle")).acceptance == ()
    prompts = [[(7 * seed + 3 * place) % VOCAB for place in range(9)] for seed in range(8)]
    params = SamplingParams(max_tokens=100, temperature=0, ignore_eos=True, logit_bias=bias)
    with caplog.at_level(logging.WARNING):
        llm.generate(prompts, params, spec=spec)
    assert sum(NAMED in record.message for record in caplog.records) == len(misfits)
    assert llm.engine.stats().misfit_heads == misfits
    (rate, *_) = (
        LLM(str(folder), head=str(head))
        .engine.speculation.assignments.make_proposer(ProposerChoice("eagle"))
        .acceptance
    )
    assert (rate < 0.05) == bool(misfits)
    page = Metrics("tiny", llm.engine.stats).render().decode()
    assert f'foredraft:misfit_heads{{engine="0",model_name="tiny"}} {float(len(misfits))}' in page


def steps(fit: HeadFit, count: int, right: int) -> None:
    """So many steps in which a sequence had a draft, the first `right` of them with the right first token."""
    sequence = Sequence(1, "", 0, [1, 2], 2, SamplingParams().resolved({}), seed=0, max_tokens=9)
    draft = Draft((5, 6), (-1, 0), (0.5, 0.5), ("eagle",) * 2)
    for index in range(count):
        fit.propose("eagle", [sequence], [draft])
        tokens = (5, 9) if index < right else (4, 5)
        fit.observe([Commit(sequence, tokens, ("eagle", ""), (None, None))])


@pytest.mark.parametrize(("right", "misfits"), [(0, ["eagle"]), (14, ["eagle"]), (15, []), (150, [])])
def test_a_twentieth_of_the_first_tokens_is_enough(right: int, misfits: list[str]) -> None:
    kept: list[Any] = []
    fit = HeadFit(lambda *told: kept.append(told))
    steps(fit, 299, right)
    assert fit.misfits == [] and kept == []
    steps(fit, 1, 0)
    assert fit.misfits == misfits
    steps(fit, 600, 0)  # it is judged once
    assert fit.misfits == misfits
    # Of second tokens none was right; so few as 15 say nothing.
    assert kept == [("eagle", (right / 300, 0.0) if right >= 30 else (right / 300,))]


def test_a_step_that_commits_nothing_of_a_sequence_does_not_count() -> None:
    fit = HeadFit()
    sequence = Sequence(1, "", 0, [1, 2], 2, SamplingParams().resolved({}), seed=0, max_tokens=9)
    draft = Draft((5,), (-1,), (0.5,), ("eagle",))
    for _ in range(400):
        fit.propose("eagle", [sequence], [draft])
        fit.observe([])
    steps(fit, 300, 300)
    assert fit.misfits == []
