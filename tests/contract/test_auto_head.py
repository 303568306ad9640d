"""`auto` uses the model's best head beside `suffix`, and the text stays that of plain decoding."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from foredraft.config import ModelConfig
from foredraft.control.economics import VerifyCurve
from foredraft.heads.catalog import HeadFiles
from foredraft.llm import LLM
from foredraft.params import SamplingParams
from foredraft.proposers.best_head import best_head
from foredraft.proposers.registry import ProposerChoice, parse_spec
from tests.steady_controller import SteadyController
from tests.tiny_heads import random_head, save_head, tiny_config
from tests.tiny_models import random_model, save_model
from tests.unit.head_configs import head_config

PROMPTS = [[3, 1, 4, 1, 5], [9, 2, 6, 5, 3, 5], [8, 9, 7]]
PARAMS = SamplingParams(max_tokens=40, temperature=0.8, seed=4, ignore_eos=True)
TARGET = ModelConfig("llama", 50, 32, 48, 4, 4, 2, 8, 512)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(random_model("llama"), tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def head(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    config = tiny_config("eagle", folder, acceptance=(0.7, 0.7))
    return str(save_head(random_head(config), tmp_path_factory.mktemp("head")))


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


def test_auto_without_a_head_is_suffix_and_grammar(folder: Path) -> None:
    assignments = LLM(str(folder)).engine.speculation.assignments
    assert [str(choice) for choice in assignments.choices(parse_spec("auto"))] == ["suffix", "grammar"]


def test_auto_uses_no_head_where_torch_serves(folder: Path, head: str) -> None:
    llm = LLM(str(folder), head=head, backend="torch")
    choices = llm.engine.speculation.assignments.choices(parse_spec("auto"))
    assert [str(choice) for choice in choices] == ["suffix", "grammar"]
    llm.generate(PROMPTS, PARAMS, spec="eagle")  # who names it gets it
    assert "eagle" in llm.engine.speculation.assignments.proposers


def test_only_auto_itself_leaves_the_head_open(folder: Path, head: str) -> None:
    assignments = LLM(str(folder), head=head).engine.speculation.assignments
    assert [str(choice) for choice in assignments.choices(parse_spec("auto"))] == ["suffix", "grammar", "eagle"]
    assert [str(choice) for choice in assignments.choices(parse_spec("auto(suffix)"))] == ["suffix"]


FLAT, STEEP, LINEAR = (VerifyCurve((1, 16), (1.0, 1.0 + 15 * row)) for row in (0.0, 0.4, 1.0))


@pytest.mark.parametrize(
    ("curve", "least_s", "best"),
    [
        (FLAT, {}, "dflash"),  # an EAGLE head runs once per token
        (STEEP, {}, "eagle"),  # and one row each time
        (LINEAR, {}, None),
        (FLAT, {"eagle": 0.5, "dflash": 0.5}, "dflash"),
        (FLAT, {"eagle": 0.2, "dflash": 1.4}, "eagle"),
        (FLAT, {"medusa": 1.4, "eagle": 0.2}, "eagle"),  # what was not measured is taken to be as slow as the slowest
        (FLAT, {"eagle": 2.0}, None),  # a draft takes two plain steps, whatever it reads
    ],
)
def test_the_machine_decides_which_head_is_best(
    tmp_path: Path, curve: VerifyCurve, least_s: dict[str, float], best: str | None
) -> None:
    rates = {"eagle": 0.7, "medusa": 0.2, "dflash": 0.7}
    heads = {
        kind: HeadFiles(tmp_path, head_config(kind, acceptance=(rate,) * 4, block=4, draft_vocab_size=1))
        for kind, rate in rates.items()
    }
    assert best_head(heads, TARGET, least_s, curve) == (best and ProposerChoice(best))


def test_a_correction_takes_time_on_a_cpu(tmp_path: Path) -> None:
    def block(**correction: Any) -> HeadFiles:
        return HeadFiles(
            tmp_path,
            head_config("dflash", acceptance=(0.7,) * 2, block=2, num_layers=1, draft_vocab_size=1, **correction),
        )

    eagle = HeadFiles(tmp_path, head_config("eagle", acceptance=(0.71,) * 2, draft_vocab_size=1))
    plain, corrected = block(), block(correction="refiner", rank=4)
    assert best_head({"eagle": eagle, "dflash": plain}, TARGET, {}, FLAT) == ProposerChoice("dflash")
    assert best_head({"eagle": eagle, "dflash": corrected}, TARGET, {}, FLAT) == ProposerChoice("eagle")


def test_a_draft_model_is_one_of_them(tmp_path: Path) -> None:
    def config(kind: str, rate: float) -> HeadFiles:
        return HeadFiles(tmp_path, head_config(kind, acceptance=(rate,) * 4, draft_vocab_size=1, num_layers=1))

    heads = {"eagle": config("eagle", 0.7), "draft_model": config("draft_model", 0.85)}
    assert best_head(heads, TARGET, {}, FLAT) == ProposerChoice("draft_model")
    heads["draft_model"] = config("draft_model", 0.68)
    assert best_head(heads, TARGET, {}, FLAT) == ProposerChoice("eagle")


def test_a_head_without_a_measured_acceptance_is_tried(tmp_path: Path) -> None:
    heads = {"medusa": HeadFiles(tmp_path, head_config("medusa", acceptance=()))}
    assert best_head(heads, TARGET, {}, FLAT) == ProposerChoice("medusa")
    assert best_head({}, TARGET, {}, FLAT) is None


def test_a_head_is_loaded_by_the_first_request_that_may_use_it(folder: Path, head: str) -> None:
    llm = LLM(str(folder), head=head)
    proposers = llm.engine.speculation.assignments.proposers
    llm.generate(PROMPTS, PARAMS, spec="off")
    llm.generate(PROMPTS, PARAMS, spec="auto(suffix)")
    assert "eagle" not in proposers
    llm.generate(PROMPTS, PARAMS, spec="auto")
    assert "eagle" in proposers
