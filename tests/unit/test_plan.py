"""`foredraft plan`: its numbers are those of the formulas, its words fit the numbers, and bad input ends with one
sentence."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from foredraft.control.economics import VerifyCurve
from foredraft.plan.inputs import chain_spec
from foredraft.plan.words import rows_cost
from tests.tiny_models import random_model, save_model
from tests.unit.plan_command import CURVE, Command, cell, fails_with_one_sentence, plan_command, results, written


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    return plan_command(monkeypatch, capsys)


@pytest.fixture
def curve(tmp_path: Path) -> str:
    return written(tmp_path / "verify.json", CURVE)


class TestFigures:
    @pytest.mark.parametrize("alpha, cost", [(0.3, 0.4), (0.4, 0.3), (0.8, 0.05), (0.9, 0.01), (0.55, 0.2)])
    def test_json_is_the_formula(self, command: Command, alpha: float, cost: float) -> None:
        record = command("--alpha", str(alpha), "--cost", str(cost), "--json").record
        rates = [(1 - alpha ** (k + 1)) / (1 - alpha) / (1 + k * cost) for k in range(17)]
        assert [row["speedup"] for row in record["table"]] == pytest.approx(rates)
        assert [row["k"] for row in record["table"]] == list(range(17))
        assert all(set(row) == {"k", "expected_tokens", "speedup"} for row in record["table"])
        assert record["best_k"] == rates.index(max(rates))
        assert record["speedup"] == pytest.approx(max(rates))
        assert record["expected_tokens"] == record["table"][record["best_k"]]["expected_tokens"]
        assert record["break_even_alpha"] == pytest.approx(cost)
        assert record["break_even_cost"] == pytest.approx(alpha)
        assert record["flip_batch"] is None

    def test_k_max_bounds_the_table(self, command: Command) -> None:
        record = command("--alpha", "0.9", "--cost", "0.01", "--k-max", "3", "--json").record
        assert (record["best_k"], len(record["table"])) == (3, 4)
        assert "larger --k-max" in record["recommendation"]
        assert "larger --k-max" not in command("--alpha", "0.8", "--cost", "0.05").out

    def test_a_loss_is_advised_against(self, command: Command) -> None:
        out = command("--alpha", "0.3", "--cost", "0.4").out
        assert "Leave it off: no draft of up to 16 tokens is faster" in out
        assert "once more than 40.0 % of the draft tokens are accepted" in out
        assert "once a draft token costs less than 0.3 plain steps" in out
        assert "Draft" not in out

    def test_a_hopeless_cost_is_called_so(self, command: Command) -> None:
        assert "not pay even if every draft token were accepted" in command("--alpha", "0.9", "--cost", "1.5").out

    def test_a_small_gain_is_called_small(self, command: Command) -> None:
        out = command("--alpha", "0.4", "--cost", "0.3").out
        assert "Draft 1 token per run: it gains only 7.7 %, so leave it off unless" in out
        assert "fewer than 30.0 % of the draft tokens" in out

    def test_a_gain_is_recommended(self, command: Command) -> None:
        out = command("--alpha", "0.8", "--cost", "0.05").out
        assert "Draft 8 tokens per run: 3.09 times as fast as plain decoding." in out
        assert "only" not in out

    def test_rows_and_bars_follow_the_speedup(self, command: Command) -> None:
        result = command("--alpha", "0.8", "--cost", "0.05", "--k-max", "10")
        assert (result.code, result.err) == (0, "")
        assert "\x1b" not in result.out
        rows = [line.split() for line in result.out.splitlines() if line.endswith(tuple("▏▎▍▌▋▊▉█"))]
        assert [row[0] for row in rows] == [str(k) for k in range(11)]
        assert rows[1][1:3] == ["1.80", "1.71x"]
        bars = [len(row[3]) for row in rows]
        assert bars.index(max(bars)) in (6, 7, 8)  # k = 8 is best, the others are as good as equal
        assert bars[:5] == sorted(set(bars[:5]))

    def test_on_a_terminal_the_best_is_coloured(self, command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("TERM", "xterm-256color")
        monkeypatch.setenv("FORCE_COLOR", "1")
        monkeypatch.setattr("sys.stdout.isatty", lambda: True)
        coloured = [
            line for line in command("--alpha", "0.8", "--cost", "0.05").out.splitlines() if "\x1b[1;32m" in line
        ]
        assert len(coloured) == 1 and "3.09x" in coloured[0]


class TestVerifyCost:
    def test_the_measured_cost_enters_the_speedup(self, command: Command, curve: str) -> None:
        record = command("--alpha", "0.8", "--cost", "0.02", "--verify-cost", curve, "--json").record
        tokens = record["table"][3]["expected_tokens"]
        assert record["table"][3]["speedup"] == pytest.approx(tokens / (0.06 + 0.013 / 0.012))
        assert record["best_k"] == 6

    def test_the_flip_is_told(self, command: Command, curve: str) -> None:
        arguments = ["--alpha", "0.8", "--cost", "0.02", "--verify-cost", curve]
        record = command(*arguments, "--json").record
        assert record["flip_batch"] == 17
        by_batch = {each["batch"]: each["best_k"] for each in record["batches"]}
        assert by_batch[16] > 0 and by_batch[17] == 0 and by_batch[256] == 0
        out = command(*arguments).out
        assert "Turn it off above 16 concurrent requests." in out
        assert "extrapolated" not in out

    def test_no_flip_within_the_limit(self, command: Command, curve: str) -> None:
        arguments = ["--alpha", "0.8", "--cost", "0.02", "--verify-cost", curve, "--batch-max", "16"]
        assert command(*arguments, "--json").record["flip_batch"] is None
        assert "It still pays at 16 concurrent requests" in command(*arguments).out

    def test_extrapolation_is_admitted(self, command: Command, tmp_path: Path) -> None:
        short = written(tmp_path / "short.json", {"rows": [1, 8], "seconds": [0.01, 0.02]})
        out = command("--alpha", "0.5", "--cost", "0.05", "--verify-cost", short).out
        assert "Turn it off above 4 concurrent requests." in out  # five with one draft token each make ten rows
        assert "Runs of more than 8 rows were not measured" in out

    def test_a_gain_that_returns_is_told(self, command: Command, tmp_path: Path) -> None:
        """Runs in tiles of eight rows: five sequences pay double for double their rows, nine only half more."""
        rows = [1, 8, 9, 16, 17, 24]
        tiles = written(tmp_path / "tiles.json", {"rows": rows, "seconds": [1, 1, 2, 2, 3, 3]})
        arguments = ["--alpha", "0.6", "--cost", "0", "--k-max", "1", "--verify-cost", tiles, "--batch-max", "10"]
        out = command(*arguments).out
        assert "Turn it off above 4 concurrent requests." in out
        assert "At 9 concurrent requests it pays again." in out

    def test_results_of_a_bench_hold_a_curve_too(self, command: Command, tmp_path: Path, curve: str) -> None:
        arguments = ["--alpha", "0.8", "--cost", "0.02", "--json", "--verify-cost"]
        assert command(*arguments, results(tmp_path)).record == command(*arguments, curve).record


@pytest.mark.parametrize(
    ("spec", "measured"),
    [
        ("eagle", "eagle:tree=chain"),
        ("suffix+dflash:tree=static,k=3", "suffix:tree=chain+dflash:k=3,tree=chain"),
        ("ngram:k=6", "ngram:k=6"),
        ("auto(eagle)", "auto(eagle)"),
        ("off", "off"),
    ],
)
def test_proposers_of_trees_are_measured_with_chains(spec: str, measured: str) -> None:
    assert chain_spec(spec) == measured


@pytest.mark.parametrize(("has_experts", "end"), [(False, "."), (True, ": further rows wake further experts.")])
def test_what_rows_cost_is_told(has_experts: bool, end: str) -> None:
    told = rows_cost(VerifyCurve(tuple(CURVE["rows"]), tuple(CURVE["seconds"])), has_experts)
    assert told == "On this model 2 rows cost 1.04 and 8 rows 1.33 plain steps" + end


class TestPlot:
    @pytest.mark.parametrize("suffix, start", [("png", b"\x89PNG"), ("svg", b"<?xml")])
    def test_is_written(self, command: Command, tmp_path: Path, suffix: str, start: bytes) -> None:
        pytest.importorskip("matplotlib")
        file = tmp_path / f"plot.{suffix}"
        assert command("--alpha", "0.8", "--cost", "0.05", "--plot", str(file), "--json").record["best_k"] == 8
        assert file.read_bytes().startswith(start)

    def test_is_drawn_from_a_file_too(self, command: Command, tmp_path: Path) -> None:
        pytest.importorskip("matplotlib")
        picture = tmp_path / "plot.svg"
        assert command("--from", results(tmp_path, cell("ngram", 1.2)), "--plot", str(picture)).code == 0
        assert picture.read_bytes().startswith(b"<?xml")

    def test_without_matplotlib_one_sentence_says_how_to_get_it(
        self, command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setitem(sys.modules, "matplotlib", None)
        monkeypatch.delitem(sys.modules, "matplotlib.figure", raising=False)
        result = command("--alpha", "0.8", "--cost", "0.05", "--plot", str(tmp_path / "plot.png"))
        assert fails_with_one_sentence(result), result
        assert "pip install matplotlib" in result.err

    def test_a_place_that_cannot_be_written_is_named(self, command: Command, tmp_path: Path) -> None:
        pytest.importorskip("matplotlib")
        result = command("--alpha", "0.8", "--cost", "0.05", "--plot", str(tmp_path / "missing" / "plot.png"))
        assert fails_with_one_sentence(result), result
        assert "cannot be written: No such file or directory" in result.err


class TestBadArguments:
    @pytest.mark.parametrize(
        ("arguments", "sentence"),
        [
            ("", "Give --alpha and --cost, or --measure, or --from"),
            ("--alpha 0.5", "Give --alpha and --cost"),
            ("--cost 0.5", "Give --alpha and --cost"),
            ("--alpha 1.1 --cost 0.5", "alpha=1.1 must be a number from 0 to 1."),
            ("--alpha nan --cost 0.5", "alpha=nan"),
            ("--alpha 0.5 --cost -0.1", "cost=-0.1 must be a number of at least 0"),
            ("--alpha 0.5 --cost inf", "cost=inf"),
            ("--alpha many --cost 0.1", "--alpha"),
            ("--alpha 0.5 --cost 0.1 --k-max 0", "--k-max"),
            ("--alpha 0.5 --cost 0.1 --k-max 1001", "--k-max"),
            ("--alpha 0.5 --cost 0.1 --batch-max 8", "--batch-max needs --verify-cost"),
            ("--alpha 0.5 --cost 0.1 --verify-cost nowhere.json", "nowhere.json cannot be read: No such file"),
            ("--alpha 0.5 --cost 0.1 --plot picture.gif", "picture.gif must end in .png or .svg."),
            ("--from nowhere.json", "nowhere.json cannot be read: No such file"),
            ("--from nowhere.json --alpha 0.5", "--from takes every figure from its file"),
            ("--from nowhere.json --measure", "--from takes every figure from its file"),
            ("--measure --model nowhere --plot picture.gif", "picture.gif must end in .png or .svg."),
            ("--nonsense", "--nonsense"),
        ],
    )
    def test_end_with_one_sentence(self, command: Command, arguments: str, sentence: str) -> None:
        result = command(*arguments.split())
        assert fails_with_one_sentence(result), result
        assert sentence in result.err

    @pytest.mark.parametrize("content", [b"", b"{", b"\xff", b"[" * 100_000, b"[]", b"7", b"{}"])
    @pytest.mark.parametrize("option", ["--verify-cost", "--from"])
    def test_files_that_hold_something_else(
        self, command: Command, tmp_path: Path, content: bytes, option: str
    ) -> None:
        file = tmp_path / "other.json"
        file.write_bytes(content)
        figures = ["--alpha", "0.5", "--cost", "0.1"] if option == "--verify-cost" else []
        result = command(*figures, option, str(file))
        assert fails_with_one_sentence(result), result
        assert str(file) in result.err

    @pytest.mark.parametrize(
        "content",
        [
            {"rows": [1, 2], "seconds": [0.1]},
            {"rows": [2, 4], "seconds": [0.1, 0.2]},
            {"rows": [1, 2.5], "seconds": [0.1, 0.2]},
            {"rows": [1, True], "seconds": [0.1, 0.2]},
            {"rows": [1, 10**400], "seconds": [0.1, 0.2]},
            {"rows": [1, 2], "seconds": [0.1, 10**400]},
            {"rows": [1, 2], "seconds": [0.1, None]},
            {"rows": [1, 2], "seconds": [0.0, 0.1]},
            {"rows": 1, "seconds": 0.1},
        ],
    )
    def test_curves_that_are_none(self, command: Command, tmp_path: Path, content: Any) -> None:
        file = written(tmp_path / "verify.json", content)
        result = command("--alpha", "0.5", "--cost", "0.1", "--verify-cost", file)
        assert fails_with_one_sentence(result), result


def test_the_command_takes_a_model_and_json(command: Command) -> None:
    help_text = command("--help").out
    assert "--model" in help_text and "--json" in help_text
    assert command("--model", "any", "--alpha", "0.3", "--cost", "0.4", "--json").record["best_k"] == 0


def test_nothing_slow_is_loaded_by_the_module() -> None:
    slow = "{'torch', 'rich', 'numpy', 'matplotlib'}"
    program = f"import sys, foredraft.cli.plan\nprint(sorted({slow} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_the_page_shows_what_the_command_prints(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = (Path(__file__).parents[2] / "docs" / "economics.md").read_text(encoding="utf-8")
    (measured,) = re.findall(r"```json\n(.*?)```", page, re.DOTALL)
    (tmp_path / "verify.json").write_text(measured, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    shown = re.findall(r"```\n\$ foredraft plan (.*?)\n(.*?)```", page, re.DOTALL)
    assert len(shown) == 2
    for arguments, output in shown:
        assert command(*arguments.split()).out == output


def test_measure_finds_the_figures_itself(command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    told: list[tuple[int, int]] = []
    monkeypatch.setattr("foredraft.cli.progress.CountingProgress.to", lambda bar, *now: told.append(now))
    folder = str(save_model(random_model("llama"), tmp_path))
    picture = tmp_path / "plot.svg"
    queried = ["--spec", "early_exit:layers=3,k=3", "--k-max", "4", "--plot", str(picture), "--json"]
    result = command("--measure", "--model", folder, *queried)
    assert result.code == 0, result.err
    assert picture.read_bytes().startswith(b"<?xml")
    assert [done for done, _ in told] == list(range(1, told[-1][1] + 1)), "the bar goes to its end, one by one"
    assert result.record["table"][1]["expected_tokens"] == pytest.approx(2.0, abs=0.05), (
        "a model that drafts for itself is always right"
    )
    for arguments, complaint in (
        (["--spec", "auto"], "name a proposer"),
        (["--alpha", "0.5"], "itself"),
        (["--spec", "quantised", "--dtype", "int4"], "the model itself has no more (int4)"),
        (["--spec", "ngram+quantised:bits=8", "--dtype", "int8"], "the model itself has no more (int8)"),
    ):
        refused = command("--measure", "--model", folder, *arguments)
        assert refused.code == 2 and complaint in refused.err


def test_measure_says_that_rows_wake_experts(command: Command, tmp_path: Path) -> None:
    folder = str(save_model(random_model("qwen3-moe"), tmp_path))
    out = command("--measure", "--model", folder, "--spec", "early_exit:layers=3,k=3").out
    told, premise = out.splitlines()[:2]
    assert re.fullmatch(r"On this model 2 rows cost \d+\.\d\d and 8 rows .* steps: further rows wake .*\.", told)
    assert premise.startswith("Measured here for early_exit")
