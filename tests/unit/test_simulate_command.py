"""`foredraft simulate`: its files, its answers, its report, and what it refuses."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from foredraft.cli import main
from foredraft.errors import InvalidParameter
from foredraft.simulate.fleet import Slo
from foredraft.simulate.machine_file import read_machine, write_machine
from foredraft.simulate.traffic import ANY, MIXES, read_trace
from tests.unit.test_simulate import LINEAR

QUICK = ["--requests", "200", "--max-num-seqs", "2"]


@pytest.fixture
def machine(tmp_path: Path) -> str:
    file = tmp_path / "machine.json"
    write_machine(LINEAR, file)
    return str(file)


@pytest.fixture
def bare(tmp_path: Path) -> str:
    """The same machine without proposers: every command is quick."""
    file = tmp_path / "bare.json"
    write_machine(replace(LINEAR, proposers={}), file)
    return str(file)


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["foredraft", "simulate", *arguments])
    with pytest.raises(SystemExit) as ended:
        main.run()
    code = ended.value.code
    assert isinstance(code, int)
    return code


class TestCommand:
    def test_three_mixes_and_a_report(
        self, bare: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        pytest.importorskip("matplotlib")
        out = tmp_path / "report"
        options = ["--slo", "ttft=9,itl=0.1", "--attain", "0.8", "--json", "--out", str(out), *QUICK]
        assert run(monkeypatch, "--from", bare, "--poisson", "0.2", *options) == 0
        record = json.loads(capsys.readouterr().out)
        assert [each["traffic"] for each in record["answers"]] == list(MIXES)
        for each in record["answers"]:
            (plain,) = each["settings"]
            assert plain["spec"] == "off" and plain["replicas_needed"] >= 1
            assert len(plain["sweep"]) == len(each["rates"])
        page = (out / "report.html").read_text()
        assert page.count("<svg") == 4 and "http" not in page
        assert page.index("with plain decoding.") < page.index("Simulated: 1 machine as in"), "the answer comes first"
        assert {file.name for file in out.glob("*.svg")} == {"goodput.svg", "token_time.svg", "ttft.svg", "itl.svg"}

    def test_an_assumed_head_says_what_it_saves(
        self, bare: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        head = ["--assume", "medusa:alpha=0.9,cost=0.01,k=3", "--slo", "ttft=9,itl=0.011", "--attain", "0.9"]
        assert run(monkeypatch, "--from", bare, "--poisson", "3", "--mix", "chat", *head, *QUICK) == 0
        assert "medusa saves" in capsys.readouterr().out

    def test_step_mode_answers_one_rate(
        self, machine: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        arguments = [
            "--from",
            machine,
            "--poisson",
            "0.2",
            "--mix",
            "chat",
            "--step-mode",
            "--requests",
            "12",
            "--json",
        ]
        assert run(monkeypatch, *arguments) == 0
        outcomes = json.loads(capsys.readouterr().out)["outcomes"]
        assert [each["spec"] for each in outcomes] == ["off", "suffix", "auto"]

    def test_a_trace_runs_at_its_own_rate(
        self, machine: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        trace = tmp_path / "trace.jsonl"
        rows = [{"arrival_s": 2.0 * n, "prompt_tokens": 20, "output_tokens": 10, "kind": "copy"} for n in range(40)]
        trace.write_text("\n".join(map(json.dumps, rows)))
        assert run(monkeypatch, "--from", machine, "--trace", str(trace), "--json", *QUICK) == 0
        record = json.loads(capsys.readouterr().out)
        assert record["qps"] == pytest.approx(0.5)
        (answer,) = record["answers"]
        assert answer["traffic"] == "trace.jsonl"
        assert [setting["spec"] for setting in answer["settings"]] == ["off", "suffix", "auto"]

    @pytest.mark.parametrize(
        "arguments",
        [
            [],
            ["--poisson", "1", "--trace", "x.jsonl"],
            ["--poisson", "0"],
            ["--poisson", "1", "--mix", "nothing"],
            ["--poisson", "1", "--slo", "ttft=0"],
            ["--poisson", "1", "--slo", "speed=1"],
            ["--poisson", "1", "--spec", "ngram"],
            ["--poisson", "1", "--assume", "eagle"],
            ["--poisson", "1", "--step-mode", "--out", "x"],
            ["--poisson", "1", "--out", "/dev/null/x"],
            ["--trace", "missing.jsonl"],
        ],
    )
    def test_bad_arguments_get_one_sentence(
        self, machine: str, arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert run(monkeypatch, "--from", machine, *arguments) == 2
        assert len(capsys.readouterr().err.strip().splitlines()) == 1

    def test_a_folder_that_cannot_be_made_is_told_before_anything_is_measured_or_simulated(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.setattr("foredraft.cli.simulate._machine", lambda *_: pytest.fail("it went on"))
        assert run(monkeypatch, "--poisson", "1", "--out", "/dev/null/x") == 2
        assert capsys.readouterr().err == "--out /dev/null/x cannot be made: Not a directory.\n"


class TestFiles:
    def test_a_machine_survives_its_file(self, machine: str) -> None:
        assert read_machine(Path(machine)) == LINEAR

    def test_a_benchmark_is_a_machine(self, tmp_path: Path) -> None:
        cell = {"batch": 1, "ratio_to_off": 1.2, "acceptance_rate": 0.5, "drafted_per_run": 2.0}
        cell |= {"acceptance_per_depth": [0.7, 0.3], "draft_time_per_run_s": 0.001}
        cells = [
            {**cell, "spec": spec, "category": kind} for spec in ("off", "ngram:k=2", "auto") for kind in ("x", "all")
        ]
        file = tmp_path / "results.json"
        file.write_text(json.dumps({"cells": cells, "verify_cost": {"rows": [1, 2], "seconds": [0.01, 0.02]}}))
        found = read_machine(file)
        assert list(found.proposers) == ["ngram:k=2"]
        assert found.proposers["ngram:k=2"].profile("x").tokens_per_run == pytest.approx(2.0)
        assert found.proposers["ngram:k=2"].seconds == pytest.approx(0.001)
        assert found.run_s(2, 1000) == pytest.approx(0.02)

    @pytest.mark.parametrize("content", ["{}", "nonsense", '{"kind": "machine"}', '{"cells": [], "kind": "x"}'])
    def test_what_is_no_machine_is_refused(self, content: str, tmp_path: Path) -> None:
        file = tmp_path / "x.json"
        file.write_text(content)
        with pytest.raises(InvalidParameter):
            read_machine(file)

    def test_an_azure_trace(self, tmp_path: Path) -> None:
        file = tmp_path / "azure.csv"
        lines = ["2023-11-16 18:17:04.5000000,374,44", "2023-11-16 18:17:03.5000000,396,109"]
        file.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n" + "\n".join(lines))
        first, second = read_trace(file).recorded
        assert first == (0.0, ANY, 396, 109)
        assert second == (1.0, ANY, 374, 44)

    @pytest.mark.parametrize("content", ["", "{}", '{"arrival_s": -1, "prompt_tokens": 1, "output_tokens": 1}', "[1]"])
    def test_what_is_no_trace_is_refused(self, content: str, tmp_path: Path) -> None:
        file = tmp_path / "x.jsonl"
        file.write_text(content)
        with pytest.raises(InvalidParameter):
            read_trace(file)


def test_an_objective_is_read() -> None:
    assert Slo.parse("itl=0.1") == Slo(itl=0.1)
    assert Slo.parse("ttft=1,itl=0.1") == Slo(1.0, 0.1)
