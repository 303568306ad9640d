"""docs/benchmarks.md and README's figures are what docs/results/ says, all of this version, and change when a result
changes."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import foredraft
from foredraft.control.economics import VerifyCurve

ROOT = Path(__file__).parents[2]
FILES = sorted((ROOT / "docs/results").glob("*.json"))
PARTS = {"plain", "exactness", "auto", "batch", "acceptance"}
SCRIPTS = ("acceptance", "machine", "machine_parts", "pages", "page_sections", "peers", "plain", "published")


@pytest.fixture
def scripts(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    yield
    for name in SCRIPTS:
        sys.modules.pop(name, None)


@pytest.fixture
def pages(scripts: None) -> ModuleType:
    import pages

    return pages


@pytest.fixture
def machine(scripts: None) -> ModuleType:
    import machine

    return machine


@pytest.fixture
def records(pages: ModuleType) -> list[dict[str, Any]]:
    return pages.read_records()


@pytest.fixture
def whole(records: list[dict[str, Any]]) -> dict[str, Any]:
    """One with all parts, and with llama.cpp beside it."""
    return next(each for each in records if set(each) >= PARTS and each["plain"]["plain"]["llama.cpp"])


def test_regenerating_changes_nothing() -> None:
    done = subprocess.run([sys.executable, ROOT / "benchmarks/pages.py", "--check"], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, ""), done.stdout + done.stderr


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_every_result_is_of_this_version(file: Path) -> None:
    record = json.loads(file.read_text(encoding="utf-8"))
    assert record["version"] == foredraft.__version__, f"measure it again: {record['command']}"
    for commit in (record["commit"], *record.get("earlier", {}).values()):
        assert re.fullmatch("[0-9a-f]{7,40}", commit), "measure a commit, without changes"
    assert record["command"].startswith("make ") and "/" not in record["command"], (
        "where files lie is nobody's business"
    )
    assert record["machine"]["name"] and record["machine"]["threads"] > 0 and record["date"] and record["versions"]
    assert record["kind"] in ("machine", "peers")


def test_there_is_a_machine_with_all_parts() -> None:
    assert any(set(json.loads(file.read_text())) >= PARTS for file in FILES)


def test_a_result_of_another_version_is_an_error_that_names_the_command(pages: ModuleType, tmp_path: Path) -> None:
    old = {"version": "0.0.1", "command": "make figures-machine ARGS='--threads 7'"}
    (tmp_path / "old.json").write_text(json.dumps(old))
    with pytest.raises(
        SystemExit, match=r"old.json was measured with 0.0.1, .* make figures-machine ARGS='--threads 7'"
    ):
        pages.read_records(tmp_path)


def changed(value: Any, path: tuple[str, ...], new: Any) -> Any:
    """A copy of nested dicts with one value replaced."""
    value = deepcopy(value)
    inner = value
    for key in path[:-1]:
        inner = inner[key]
    assert path[-1] in inner
    inner[path[-1]] = new
    return value


ALL_AUTO = ("kinds", "all", "specs", "auto", "ratio_to_off")


@pytest.mark.parametrize(
    ("path", "new", "on_page", "on_readme"),
    [
        (("plain", "plain", "foredraft"), 7777.0, "| 7,777 |", "| 7,777 |"),
        (("plain", "plain", "llama.cpp"), 7777.0, "| 7,777 |", "| 7,777 |"),
        (("plain", "plain", "llama.cpp"), None, "| – | – |", "| – |"),
        (("plain", "memory_mb"), 77777, "| 77,777 MB |", None),
        (("exactness", "price", "latency"), 1.777, "| +77.7 % |", "one request (+77.7 % time)"),
        (("exactness", "price", "throughput"), 0.777, "| −22.3 % |", "at once (−22.3 % time)"),
        (("auto", "suites", "suite", *ALL_AUTO), 7.777, "| 7.78× (", "| 7.78× ("),
        (("auto", "suites", "functions", *ALL_AUTO), 7.777, "| 7.78× (", "| 7.78× ("),
        (("auto", "suites", "functions", "same_text"), False, "TEXTS DIFFERED", "| NO |"),
        (("batch", "batches", "8", "specs", "auto", "ratio_to_off"), 7.777, "| 7.78× |", None),
        (("batch", "flip", "planned"), 77, "| 77 |", None),
        (("acceptance", "suites", "functions", "temperatures", "0.8", "eagle:nodes=16", "tokens_per_run"), 7.777,
         "| 7.78 |", None),
        (("commit",), "777777777777", "Commit 777777777777;", None),
    ],
)  # fmt: skip
def test_a_changed_result_is_noticed(
    pages: ModuleType, whole: dict[str, Any], path: tuple[str, ...], new: Any, on_page: str, on_readme: str | None
) -> None:
    assert on_page not in pages.benchmarks_page([whole])
    assert on_page in pages.benchmarks_page([changed(whole, path, new)])
    if on_readme:
        assert on_readme not in pages.headline([whole])
        assert on_readme in pages.headline([changed(whole, path, new)])


def test_the_readme_tells_how_many_prompts_a_speed_rests_on(pages: ModuleType, whole: dict[str, Any]) -> None:
    for count, told in ((1, "× (1 prompt) |"), (777, "× (777 prompts) |")):
        assert told not in pages.headline([whole])
        assert told in pages.headline([changed(whole, ("auto", "suites", "suite", "prompts"), count)])


def test_parts_of_an_earlier_commit_name_it(pages: ModuleType, whole: dict[str, Any]) -> None:
    assert "(plain: 777777777777); " in pages.benchmarks_page([{**whole, "earlier": {"plain": "777777777777"}}])


def test_the_best_fixed_setting_is_bold(pages: ModuleType, whole: dict[str, Any]) -> None:
    (suite, *_) = whole["auto"]["suites"]
    path = ("auto", "suites", suite, "kinds", "all", "specs", "suffix", "ratio_to_off")
    assert "**9.99×** (" in pages.benchmarks_page([changed(whole, path, 9.99)])


class TestParts:
    """What machine.py measures of a model, and when it writes it."""

    @pytest.fixture
    def measured(self, machine: ModuleType, monkeypatch: pytest.MonkeyPatch) -> list[str]:
        """The names of parts, as they are measured; `batch` fails the first time."""
        log: list[str] = []

        def part(name: str) -> Any:
            def measure(subject: Any, seconds: float) -> dict[str, Any]:
                log.append(name)
                if name == "batch" and log.count(name) == 1:
                    raise KeyboardInterrupt
                return {"seconds": seconds}

            return type(machine.PARTS["plain"])(measure, 0.2)

        for name in machine.PARTS:
            monkeypatch.setitem(machine.PARTS, name, part(name))
        return log

    def record(self, commit: str, command: str = "make it") -> dict[str, Any]:
        return {"version": "1", "commit": commit, "command": command, "model": {"name": "m", "dtype": "int4"}}

    def subject(self, head: bool = True) -> Any:
        return type("Subject", (), {"seconds": 100.0, "has_head": head})

    def test_a_call_goes_on_with_what_is_missing(
        self, machine: ModuleType, measured: list[str], tmp_path: Path
    ) -> None:
        file, parts = tmp_path / "m-int4.json", list(machine.PARTS)
        with pytest.raises(KeyboardInterrupt):
            machine.measure_model(self.subject(), self.record("a"), file, parts)
        assert measured == ["plain", "exactness", "auto", "batch"]
        assert set(json.loads(file.read_text())) >= {"plain", "exactness", "auto"}, "it keeps what it has"
        machine.measure_model(self.subject(), self.record("a", "make more"), file, parts)
        assert measured[4:] == ["batch", "acceptance"]
        assert json.loads(file.read_text())["command"] == "make it\nmake more"
        assert json.loads(file.read_text())["batch"]["seconds"] == pytest.approx(50, abs=1), "of what is missing"
        machine.measure_model(self.subject(), self.record("a"), file, parts)
        assert len(measured) == 6

    def test_what_another_commit_measured_stays_and_names_it(
        self, machine: ModuleType, measured: list[str], tmp_path: Path
    ) -> None:
        file, parts = tmp_path / "m-int4.json", ["plain", "auto"]
        machine.measure_model(self.subject(), self.record("a"), file, parts)
        machine.measure_model(self.subject(), self.record("b", "make more"), file, ["plain"])
        found = json.loads(file.read_text())
        assert measured == [*parts, "plain"] and set(found) >= set(parts)
        assert found["commit"] == "b" and found["earlier"] == {"auto": "a"}
        assert found["command"] == "make it\nmake more"
        machine.measure_model(self.subject(), self.record("c"), file, ["exactness"])
        assert json.loads(file.read_text())["earlier"] == {"plain": "b", "auto": "a"}
        machine.measure_model(self.subject(), self.record("c", "all"), file, parts)
        found = json.loads(file.read_text())
        assert measured[4:] == parts and "earlier" not in found
        machine.measure_model(self.subject(), self.record("c") | {"version": "2"}, file, ["plain"])
        assert not {"auto", "exactness", "earlier"} & set(json.loads(file.read_text())), "one version only"

    def test_a_model_without_a_head_has_no_acceptance(
        self, machine: ModuleType, measured: list[str], tmp_path: Path
    ) -> None:
        measured.append("batch")
        machine.measure_model(self.subject(head=False), self.record("a"), tmp_path / "m.json", list(machine.PARTS))
        assert measured[1:] == ["plain", "exactness", "auto", "batch"]

    def test_the_command_does_not_tell_where_files_lie(self, machine: ModuleType, tmp_path: Path) -> None:
        (tmp_path / "c.gguf").touch()
        words = ["--model", f"Coder 1.5B={tmp_path}/c.gguf", "--suite", str(tmp_path / "c.gguf")]
        assert machine.command(words) == """make figures-machine ARGS='--model "Coder 1.5B=c.gguf" --suite c.gguf'"""


def test_prompts_fit_into_the_time(machine: ModuleType) -> None:
    from machine_parts import Subject

    class Question:
        def encoded(self, llm: object) -> list[int]:
            return [1] * 100

    known = {"_pace": (0.01, 0.1), "curve": VerifyCurve((1, 8), (1.0, 2.0)), "max_tokens": 20, "llm": None}
    subject = type("Subject", (), {**known, "fitting": Subject.fitting})()
    questions = [Question() for _ in range(10)]  # three seconds each, one and a half of eight at once
    assert [len(subject.fitting(questions, seconds, 2)) for seconds in (0, 6, 13, 1000)] == [1, 1, 2, 10]
    assert len(subject.fitting(questions, 13, 2, batch=8)) == 4


def test_a_comparison_is_condensed_to_medians_and_ratios(pages: ModuleType) -> None:
    from page_sections import CHAT, COPY, peers_body
    from peers import FOREDRAFT, LLAMA, PEERS, Results, peers_record

    results = Results(about={"llama.cpp": {"version": "1", "settings": "its own lookup"}})
    for peer in PEERS:
        for mode in peer.modes:
            fast = peer is FOREDRAFT and mode == "auto"
            for kind in (COPY, CHAT):
                results.rates[peer.name, mode, kind] = [30.0, 30.0, 900.0] if fast else [20.0]
            results.texts[peer.name, mode] = [[1, 2, 3], [4]]
        results.prefill[peer.name] = [100.0]
    results.texts[LLAMA.name, "lookup-2"] = [[1, 9, 3], [4]]
    settings = {"file": "f.gguf", "model": "f", "threads": 2, "rounds": 3, "max_tokens": 9, "leave_out": []}
    record = peers_record(results, settings | {"prompts": {COPY: 1, CHAT: 1}}, {"name": "a CPU"}, "abc")
    assert json.loads(json.dumps(record)) == record
    text = peers_body(record)
    assert "| Foredraft int4, auto | 30.0 | 1.50× | 30.0 | 1.50× | yes |  |" in text
    assert "no: 1 of 2 texts differ, the earliest at token 2" in text
    assert "| llama.cpp, prompt lookup, 5 draft tokens | 20.0 | 1.00× |" in text
