"""Training from nothing on a toy target: every kind learns, and a run that was interrupted ends where one that was not
does."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from foredraft.cli.main import command_app
from foredraft.errors import InvalidModel
from foredraft.heads.base import HeadConfig
from foredraft.heads.catalog import find_heads
from foredraft.heads.engines import Engine
from foredraft.heads.export import export
from foredraft.heads.files import read_tensors
from foredraft.llm import LLM
from foredraft.models.catalog import open_checkpoint
from foredraft.params import SamplingParams
from foredraft.train.kinds import parse_kind
from foredraft.train.loop import Report
from foredraft.train.run import TrainingRun, TrainOptions
from foredraft.train.shards import num_answer_tokens, read_shard, shard_files
from foredraft.train.text import TextPlan, TextWriter
from foredraft.types import Work
from tests.toy_target import save_toy_target, write_prompts


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> TrainOptions:
    """Options for a target that has written its text already."""
    folder = tmp_path_factory.mktemp("toy")
    options = TrainOptions(
        model=str(save_toy_target(folder / "model")),
        out=folder / "out",
        text=folder / "text",
        plan=TextPlan((write_prompts(folder / "prompts.jsonl", 300),), max_tokens=24),
        tokens=3000,
        batch_tokens=1024,
        rate=5.0,
        threads=1,
    )
    assert TrainingRun(options).write_text(seconds=None) >= 3000
    return options


MASKED = "dflash:input=masked,correction=markov"


def quiet(_: Report) -> None:
    """Nobody watches."""


def test_what_takes_long_at_the_start_is_shown(toy: TrainOptions, tmp_path: Path) -> None:
    """Finding the model, loading it to write text, and loading it to train: each for itself, so that nothing is drawn
    between the lines of text and training."""
    told: list[str] = []

    @contextmanager
    def shown() -> Iterator[Callable[[str, int, int], None]]:
        told.append("begin")
        yield lambda stage, done, total: told.append(stage)
        told.append("end")

    run = TrainingRun(replace(toy, out=tmp_path, text=None, tokens=100, kinds=(parse_kind("medusa"),), steps=1), shown)
    assert told == ["begin", "end"]
    run.write_text(None, lambda *_: told.append("text"))
    first, last = told.index("load"), told.index("text")
    assert "end" in told[first:last] and told.count("begin") == told.count("end") == 2
    del told[:]
    run.train(lambda _: told.append("step"))
    assert told[0] == "begin" and told[1] == "load" and told.index("end") < told.index("step")


@pytest.mark.parametrize(
    ("kind", "steps"),
    [
        ("eagle", 40),
        ("medusa", 100),
        ("mtp", 40),
        ("dflash", 30),
        pytest.param("dflash:correction=markov", 30, marks=pytest.mark.slow),  # MASKED has the correction too
        (MASKED, 40),
        pytest.param("draft", 60, marks=pytest.mark.slow),  # one of fewer layers learns below
    ],
)
def test_every_kind_learns(kind: str, steps: int, toy: TrainOptions, tmp_path: Path) -> None:
    options = replace(toy, out=tmp_path, kinds=(parse_kind(kind),), steps=steps)
    (found,) = TrainingRun(options).train(quiet).values()
    assert found.acceptance[0] > 0.5  # chance is 1 of 320
    assert found.tokens_per_run > 1.8
    if kind != "draft":
        config = HeadConfig.read(tmp_path)
        read_tensors(tmp_path, config)
        assert config.acceptance == tuple(round(rate, 4) for rate in found.acceptance)
        assert config.provenance["steps"] == steps and config.provenance["text_answer_tokens"]
    if kind in ("eagle", "medusa", MASKED):
        export(tmp_path, Engine.vllm, tmp_path / "vllm", open_checkpoint(Path(toy.model)), "org/toy")


def test_a_trained_mtp_layer_drafts_inside_its_model(toy: TrainOptions, tmp_path: Path) -> None:
    """In both layouts, with what was measured beside it."""
    options = replace(toy, out=tmp_path / "head", kinds=(parse_kind("mtp"),), steps=40)
    (found,) = TrainingRun(options).train(quiet).values()
    params, prompts = SamplingParams(max_tokens=24, temperature=0), ["abc", "q7x"]
    for engine in (Engine.deepseek, Engine.qwen):
        copy = tmp_path / engine
        export(tmp_path / "head", engine, copy, open_checkpoint(Path(toy.model)), "org/toy")
        files = find_heads("auto", open_checkpoint(copy))["mtp"]
        assert files.config.acceptance == tuple(round(rate, 4) for rate in found.acceptance)
        llm = LLM(str(copy), threads=1)
        off, on = (llm.generate(prompts, params, spec=spec) for spec in ("off", "mtp:k=3,tree=chain"))
        assert [each.token_ids for each in on] == [each.token_ids for each in off]
        assert all(each.metrics.tokens_per_run > 1.8 for each in on)


def test_the_distilled_draft_drafts_for_its_target(toy: TrainOptions, tmp_path: Path) -> None:
    options = replace(toy, out=tmp_path, kinds=(parse_kind("draft:layers=1"),), steps=60)
    (found,) = TrainingRun(options).train(quiet).values()
    assert found.acceptance[0] > 0.5 and found.tokens_per_run > 1.8
    llm = LLM(toy.model, threads=1)
    params = SamplingParams(max_tokens=24, temperature=0)
    prompts = ["abc", "q7x"]
    off = llm.generate(prompts, params, spec="off")
    on = llm.generate(prompts, params, spec=f"draft_model:model={tmp_path},k=4")
    assert [each.token_ids for each in on] == [each.token_ids for each in off]
    assert all(each.metrics.tokens_per_run > 1.5 for each in on)


def test_an_interrupted_run_ends_where_an_uninterrupted_one_does(toy: TrainOptions, tmp_path: Path) -> None:
    kinds = (parse_kind("eagle"), parse_kind("dflash:layers=1"))
    straight = replace(toy, out=tmp_path / "straight", kinds=kinds, steps=10)
    TrainingRun(straight).train(quiet)

    def interrupt(line: Report) -> None:
        if line.step >= 4:
            raise KeyboardInterrupt

    broken = replace(straight, out=tmp_path / "broken")
    with pytest.raises(KeyboardInterrupt):
        TrainingRun(broken).train(interrupt)
    steps: list[int] = []
    TrainingRun(broken).train(lambda line: steps.append(line.step))
    assert steps[0] == 5
    for kind in kinds:
        mine, theirs = broken.folder_of(kind), straight.folder_of(kind)
        expected = read_tensors(theirs, HeadConfig.read(theirs))
        found = read_tensors(mine, HeadConfig.read(mine))
        assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


def test_a_head_without_a_state_is_trained_on(toy: TrainOptions, tmp_path: Path) -> None:
    options = replace(toy, out=tmp_path, kinds=(parse_kind("medusa"),), steps=40)
    (first,) = TrainingRun(options).train(quiet).values()
    (tmp_path / "training" / "medusa.safetensors").unlink()
    (second,) = TrainingRun(replace(options, steps=60)).train(quiet).values()
    assert second.tokens_per_run > first.tokens_per_run
    (tmp_path / "training" / "medusa.safetensors").unlink()
    other = replace(options, kinds=(parse_kind("medusa:offsets=2"),))
    with pytest.raises(InvalidModel, match="holds another head than the one to be trained"):
        TrainingRun(other).train(quiet)


def test_the_command_trains_and_reports(toy: TrainOptions, tmp_path: Path) -> None:
    words = f"train medusa dflash --out {tmp_path} --text {toy.text} --tokens 100 --steps 2 --batch-tokens 512 --json"
    result = CliRunner().invoke(command_app("train"), [*words.split()[1:], "--model", toy.model, "--threads", "1"])
    assert result.exit_code == 0, result.output
    assert '"kind": "medusa"' in result.stdout and '"seconds_left"' in result.stdout
    assert HeadConfig.read(tmp_path / "dflash").correction == "refiner"
    for bad, sentence in {
        "train hydra": "'hydra' cannot be trained; use eagle, medusa, dflash, mtp, draft",
        "train eagle eagle": "named twice",
        "train dflash:layers=0": "must be a whole number",
        "train dflash:rows=3": "has no option 'rows'; it has layers, block, correction, input",
        "train eagle --minutes -1": "must be a number above 0",
    }.items():
        result = CliRunner().invoke(
            command_app("train"), [*bad.split()[1:], "--out", str(tmp_path), "--model", toy.model]
        )
        assert result.exit_code and sentence in str(result.exception), bad


def test_text_is_continued_and_told_as_it_grows(tmp_path: Path, toy: TrainOptions) -> None:
    """A folder keeps its chunks, and missing ones are written; whoever waits is told of every answer."""
    told: list[int] = []
    options = replace(toy, out=tmp_path / "out", text=tmp_path / "text", tokens=600, text_batch=8)
    assert TrainingRun(options).write_text(0.0) == 0, "no time"
    have = TrainingRun(options).write_text(None, lambda tokens, seconds: told.append(tokens))
    assert 600 <= have < 600 + 24 and told[0] == 0 and told[-1] == have
    assert told == sorted(told) and len(set(told)) > 20
    before = {file: file.read_bytes() for file in shard_files(tmp_path / "text")}
    more = TrainingRun(replace(options, tokens=2 * have)).write_text(None)
    assert more >= 2 * have and more == num_answer_tokens(tmp_path / "text")
    assert before.items() <= {file: file.read_bytes() for file in shard_files(tmp_path / "text")}.items()
    assert TrainingRun(options).write_text(None, lambda *_: pytest.fail("there is enough")) == more


def test_text_keeps_the_batch_full_from_chunk_to_chunk(
    tmp_path: Path, toy: TrainOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The prompts of a chunk enter while the last answers of the one before it are written. Its text is what it would
    be without those."""
    llm = LLM(toy.model, spec="off", max_num_seqs=8, max_model_len=16, threads=1)  # answers of many lengths
    writer = TextWriter(replace(toy.plan, chunk_prompts=20), llm, "toy", "digest")
    scheduler, sizes = llm.engine.scheduler, list[int]()
    schedule = scheduler.schedule

    def watched(*limits: Any) -> list[Work]:
        works = schedule(*limits)
        sizes.append(len(works))
        return works

    monkeypatch.setattr(scheduler, "schedule", watched)
    have = writer.write(tmp_path, 1800)
    second = shard_files(tmp_path)[1]
    assert len(shard_files(tmp_path)) >= 4 and len(sizes) > 150
    assert sizes.count(8) > 0.9 * len(sizes), sizes
    before = answers(second)
    second.unlink()
    assert writer.write(tmp_path, have + 1) > have
    assert answers(second) == before and len(before) == 20


def answers(shard: Path) -> set[tuple[int, ...]]:
    text = read_shard(shard)[1]
    return {tuple(text.tokens[start:end].tolist()) for start, end in pairwise(text.starts.tolist())}
