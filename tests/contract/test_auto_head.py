"""`auto` uses the model's best head beside `suffix`, and the text stays that of plain decoding."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from foredraft.control.economics import VerifyCurve
from foredraft.engine import loading
from foredraft.engine.best_head import DraftTimes, HeadTimer, best_head
from foredraft.heads.base import HeadConfig
from foredraft.heads.files import HeadFiles
from foredraft.llm import LLM
from foredraft.params import SamplingParams
from foredraft.proposers.base import Proposer
from foredraft.proposers.registry import ProposerChoice, parse_spec
from tests.steady_controller import SteadyController
from tests.tiny_heads import random_head, save_head, tiny_config
from tests.tiny_models import random_model, save_model
from tests.unit.head_configs import head_config

PROMPTS = [[3, 1, 4, 1, 5], [9, 2, 6, 5, 3, 5], [8, 9, 7]]
PARAMS = SamplingParams(max_tokens=40, temperature=0.8, seed=4, ignore_eos=True)


@pytest.fixture(autouse=True)
def no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafts of a tiny head take longer than its tiny target; here they seem to take none."""
    monkeypatch.setattr(loading, "HeadTimer", lambda *arguments: lambda config: DraftTimes(1e-9, 1e-9, 2))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(random_model("llama"), tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def head(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    config = tiny_config("eagle", folder, acceptance=(0.7, 0.7))
    return str(save_head(random_head(config), tmp_path_factory.mktemp("head")))


def files_of(folder: Path, config: HeadConfig) -> HeadFiles:
    """A head that is not read."""
    return HeadFiles(folder, config, dict)


@pytest.mark.parametrize("acceptance", ["match", "rejection"])
def test_auto_drafts_with_the_head_and_changes_no_text(folder: Path, head: str, acceptance: str) -> None:
    llm = LLM(str(folder), head=head)
    llm.engine.speculation.controller = SteadyController()
    params = replace(PARAMS, acceptance=acceptance, temperature=0.8 if acceptance == "match" else 0.0)
    plain = llm.generate(PROMPTS, params, spec="off")
    outputs = llm.generate(PROMPTS, params, spec="auto")
    assert [output.token_ids for output in outputs] == [output.token_ids for output in plain]
    assert sum(output.metrics.drafted_by_origin.get("eagle", 0) for output in outputs) > 0
    assert all(any(reason.startswith("eagle: ") for reason in output.metrics.decisions) for output in outputs)


def test_auto_without_a_head_is_what_every_model_has(folder: Path) -> None:
    assignments = LLM(str(folder)).engine.speculation.assignments
    assert [str(choice) for choice in assignments.choices(parse_spec("auto"))] == ["prediction", "suffix", "grammar"]


def test_only_auto_itself_leaves_the_head_open(folder: Path, head: str) -> None:
    assignments = LLM(str(folder), head=head).engine.speculation.assignments
    assert [str(choice) for choice in assignments.choices(parse_spec("auto"))] == [
        "prediction",
        "suffix",
        "grammar",
        "eagle",
    ]
    assert [str(choice) for choice in assignments.choices(parse_spec("auto(suffix)"))] == ["suffix"]


FLAT, STEEP, LINEAR = (VerifyCurve((1, 16), (1.0, 1.0 + 15 * row)) for row in (0.0, 0.4, 1.0))
FAST, SLOW = DraftTimes(0.2, 0.2, 4), DraftTimes(0.2, 0.8, 4)


@pytest.mark.parametrize(
    ("curve", "times", "best"),
    [
        (FLAT, {"eagle": SLOW, "dflash": FAST}, "dflash"),
        (FLAT, {"eagle": FAST, "dflash": SLOW}, "eagle"),
        (STEEP, {"eagle": SLOW, "dflash": DraftTimes(0.4, 0.4, 4)}, "eagle"),  # short drafts pay, and its are faster
        (FLAT, {"eagle": DraftTimes(2.0, 2.0, 4), "dflash": DraftTimes(3.0, 3.0, 4)}, None),
        (FLAT, {"medusa": FAST}, "medusa"),
        (FLAT, {"eagle": DraftTimes(0.1, 0.1, 0), "dflash": SLOW}, "dflash"),  # the first drafted nothing
        (LINEAR, {"eagle": FAST, "dflash": FAST}, None),
    ],
)
def test_the_machine_decides_which_head_is_best(
    tmp_path: Path, curve: VerifyCurve, times: dict[str, DraftTimes], best: str | None
) -> None:
    heads = {kind: files_of(tmp_path, head_config(kind, acceptance=(0.7,) * 4)) for kind in times}
    assert best_head(heads, lambda config: times[config.kind], curve) == (best and ProposerChoice(best))


def test_a_head_that_accepts_more_may_take_more_time(tmp_path: Path) -> None:
    def chosen(rate: float) -> ProposerChoice | None:
        rates = {"eagle": 0.7, "draft_model": rate}
        heads = {kind: files_of(tmp_path, head_config(kind, acceptance=(r,) * 4)) for kind, r in rates.items()}
        return best_head(heads, lambda config: SLOW if config.kind == "draft_model" else FAST, FLAT)

    assert chosen(0.95) == ProposerChoice("draft_model")
    assert chosen(0.72) == ProposerChoice("eagle")


def test_a_head_without_a_measured_acceptance_is_tried(tmp_path: Path) -> None:
    heads = {"medusa": files_of(tmp_path, head_config("medusa", acceptance=()))}
    assert best_head(heads, lambda config: FAST, FLAT) == ProposerChoice("medusa")
    assert best_head({}, lambda config: FAST, FLAT) is None


def test_a_head_that_cannot_pay_is_not_timed(tmp_path: Path) -> None:
    def timed(config: HeadConfig) -> DraftTimes:
        raise AssertionError("rows are too dear for any draft")

    heads = {"eagle": files_of(tmp_path, head_config("eagle", acceptance=(0.7,) * 4))}
    assert best_head(heads, timed, LINEAR) is None


def test_drafts_are_timed_once_for_a_machine(
    folder: Path, head: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In blocks that are given back, and the text that follows is the same."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    llm = LLM(str(folder), head=head, spec="off")
    pool, target = llm.engine.scheduler.pool, llm.engine.runner
    plain = llm.generate(PROMPTS, PARAMS, spec="off")
    make = llm.engine.speculation.assignments.make_proposer
    timer = HeadTimer(make, target, pool, llm.engine.max_model_len, "float32", tmp_path / "costs.json")
    config = HeadConfig.read(Path(head))
    free = pool.num_free_blocks
    times = timer(config)
    assert times is not None and times.depth > 1 and times.first > 0 and times.whole > 0
    assert pool.num_free_blocks == free
    outputs = llm.generate(PROMPTS, PARAMS, spec="eagle")
    assert [output.token_ids for output in outputs] == [output.token_ids for output in plain]
    again = HeadTimer(_unwanted, target, pool, llm.engine.max_model_len, "float32", tmp_path / "costs.json")
    assert again(config) == times


def _unwanted(choice: ProposerChoice) -> Proposer:
    raise AssertionError(f"{choice} was timed before")


def test_a_head_is_loaded_by_the_first_request_that_may_use_it(folder: Path, head: str) -> None:
    llm = LLM(str(folder), head=head)
    proposers = llm.engine.speculation.assignments.proposers
    llm.generate(PROMPTS, PARAMS, spec="off")
    llm.generate(PROMPTS, PARAMS, spec="auto(suffix)")
    assert "eagle" not in proposers
    llm.generate(PROMPTS, PARAMS, spec="auto")
    assert "eagle" in proposers
