"""The command `foredraft bench`: what it prints where, what it leaves behind, and how it ends."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from foredraft.bench import measure
from foredraft.bench.cells import Cell
from foredraft.cli import main
from foredraft.control.economics import VerifyCurve
from tests.tiny_models import random_model, save_model
from tests.unit.timed_llm import TimedLLM

PROMISED = {
    *("spec", "category", "batch", "temperature", "dtype", "prompts", "tokens_per_s"),
    *("ratio_to_off", "tokens_per_run", "acceptance_rate", "same_text"),
}
COST = VerifyCurve((1, 2, 4), (0.010, 0.012, 0.020))
Command = Callable[..., tuple[int, str, str]]


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Command:
    """Runs `foredraft bench ARGUMENTS...`; results go to `out` in the test's folder."""

    def run(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["foredraft", "bench", "--out", str(tmp_path / "out"), *arguments])
        with pytest.raises(SystemExit) as ended:
            main.run()
        assert isinstance(ended.value.code, int)
        return ended.value.code, *capsys.readouterr()

    return run


@pytest.fixture
def llm(monkeypatch: pytest.MonkeyPatch) -> Any:
    fake = TimedLLM()
    monkeypatch.setattr(measure, "time", SimpleNamespace(perf_counter=lambda: fake.clock))
    return fake


class TestCommand:
    @pytest.fixture(autouse=True)
    def stand_in(self, monkeypatch: pytest.MonkeyPatch, llm: TimedLLM) -> None:
        module = ModuleType("foredraft.llm")

        def open_llm(model: str, **options: Any) -> TimedLLM:
            llm.options = options
            return llm

        llm.max_model_len = 10_000
        module.LLM = open_llm  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "foredraft.llm", module)
        monkeypatch.setattr("foredraft.bench.measure.verify_curve", lambda llm: COST)

    def test_json_has_one_cell_a_line(self, call: Command, llm: TimedLLM, tmp_path: Path) -> None:
        code, out, _ = call("--json", "--limit", "6", "--batch", "2,1", "--spec", "ngram", "--repeats", "1")
        cells = [json.loads(line) for line in out.splitlines()]
        assert code == 0
        assert len(cells) == 2 * 2 * 7
        assert all(set(cell) >= PROMISED for cell in cells)
        assert [cell["batch"] for cell in cells] == [1] * 14 + [2] * 14
        assert all(cell["group_sizes"] == [cell["batch"]] * len(cell["group_sizes"]) for cell in cells)
        assert llm.options["prefix_caching"] is False
        results = json.loads((tmp_path / "out" / "results.json").read_text())
        assert {"machine", "versions", "cells", "runs", "verify_cost", "model", "settings"} == set(results)
        assert results["cells"] == cells
        assert results["verify_cost"] == {"rows": [1, 2, 4], "seconds": [0.010, 0.012, 0.020]}

    def test_without_a_terminal_it_prints_plain_lines(self, call: Command) -> None:
        code, out, _ = call("--limit", "6", "--repeats", "1")
        lines = out.splitlines()
        assert (code, len(lines)) == (0, 1 + 5 * 7)
        assert lines[-1].split() == ["ngram+suffix", "all", "1", "0", "6.0", "2.00x", "1.01x", "0.00", "1.50", "yes"]
        assert "\x1b" not in out

    def test_a_text_that_differs_exits_1(self, call: Command, llm: TimedLLM) -> None:
        llm.liars = ("suffix",)
        code, _, err = call("--limit", "6", "--repeats", "1", "--json")
        assert code == 1
        assert err.endswith("suffix: the texts are not those of plain decoding.\n")

    def test_a_restless_machine_is_told(self, call: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        told = "The machine was not quiet: in 1 of 4 cases plain runs of the same prompts differ by more than a fifth."
        assert told not in call("--limit", "2", "--spec", "ngram")[2]
        monkeypatch.setattr("foredraft.bench.report.unrest", lambda runs: (4, 1))
        assert told in call("--limit", "2", "--spec", "ngram")[2]
        assert told in (tmp_path / "out" / "report.html").read_text()

    def test_a_failed_request_is_told_and_exits_1(self, call: Command, llm: TimedLLM) -> None:
        llm.error = "The logits are not numbers."
        code, _, err = call("--limit", "1", "--spec", "ngram")
        assert code == 1
        assert err.count("Prompt 0, ngram: The logits are not numbers.\n") == 1

    @pytest.mark.parametrize(
        ("arguments", "sentence"),
        [
            (["--spec", "nonsense"], "nonsense"),
            (["--suite", "nowhere.jsonl"], "nowhere.jsonl cannot be read: No such file or directory."),
            (["--batch", "1,many"], "--batch '1,many' must be whole numbers"),
            (["--batch", "0"], "batch=0 must be a whole number from 1 to 256."),
            (["--batch", ""], "--batch '' must be whole numbers"),
            (["--temperature", "-1"], "temperature=-1.0"),
            (["--temperature", "nan"], "temperature=nan"),
            (["--max-tokens", "0"], "max_tokens=0"),
            (["--seed", "-1"], "seed=-1"),
            (["--limit", "0"], "--limit"),
            (["--repeats", "0"], "--repeats"),
            (["--out", __file__], "cannot be made"),
        ],
    )
    def test_bad_arguments_end_with_one_sentence_before_the_model_is_opened(
        self, call: Command, llm: TimedLLM, arguments: list[str], sentence: str
    ) -> None:
        code, out, err = call(*arguments)
        assert (code, out, err.count("\n")) == (2, "", 1)
        assert sentence in err
        assert llm.options == {}


def test_from_end_to_end_on_a_tiny_model(call: Command, tmp_path: Path) -> None:
    folder = save_model(random_model("llama"), tmp_path / "model")
    suite = tmp_path / "suite.jsonl"
    lines = [{"question_id": n, "category": "ab"[n % 2], "turns": [f"{n} one two one two"]} for n in range(6)]
    suite.write_text("\n".join(map(json.dumps, lines)))
    code, out, err = call(
        *f"--model {folder} --suite {suite} --spec off --spec ngram --spec suffix --batch 1,2".split(),
        *"--temperature 0 --temperature 0.8 --max-tokens 12 --repeats 1 --threads 1 --json".split(),
    )
    assert code == 0, err
    cells = [Cell(**json.loads(line)) for line in out.splitlines()]
    assert len(cells) == 2 * 2 * 3 * 3  # temperatures, batches, categories with all, settings
    assert all(cell.same_text and cell.ratio_to_off > 0 and cell.predicted_ratio > 0 for cell in cells)
    assert {tuple(cell.group_sizes) for cell in cells if cell.batch == 2} == {(2, 2), (2, 2, 2, 2)}
    assert any(cell.drafted_per_run > 0 for cell in cells)
    results = json.loads((tmp_path / "out" / "results.json").read_text())
    assert results["verify_cost"]["rows"][:4] == [1, 2, 3, 4]
    assert len(results["runs"]) == (6 + 8) * 2 * 3  # a batch of 2 takes one of three prompts twice
    assert (tmp_path / "out" / "report.html").read_text().count("<svg") >= 5
