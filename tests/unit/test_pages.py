"""docs/benchmarks.md and README's table are what docs/results/ says, and change when a result changes."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
SCRIPTS = ("pages", "page_sections", "peers", "plain", "published")


@pytest.fixture
def pages(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    import pages

    yield pages
    for name in SCRIPTS:
        sys.modules.pop(name, None)


@pytest.fixture
def records(pages: ModuleType) -> list[dict[str, Any]]:
    return pages.read_records()


def test_regenerating_changes_nothing() -> None:
    done = subprocess.run([sys.executable, ROOT / "benchmarks/pages.py", "--check"], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, ""), done.stdout + done.stderr


def test_every_result_says_where_when_and_how(records: list[dict[str, Any]]) -> None:
    assert {"auto", "mixed", "peers", "proposers", "acceptance"} <= {record["kind"] for record in records}
    for record in records:
        assert record["machine"]["name"] and record["machine"]["threads"] > 0
        assert record["date"] >= "2026-11" and record["versions"] and record["command"]


def test_a_changed_result_is_noticed(pages: ModuleType, records: list[dict[str, Any]]) -> None:
    page, table = pages.benchmarks_page(records), pages.headline_table(records)
    record = next(record for record in records if record["kind"] == "auto")
    record["ratios_to_off"]["all"]["auto"] = 7.777
    assert "7.777" not in page and "7.777" in pages.benchmarks_page(records)
    assert "7.78×" not in table and "7.78×" in pages.headline_table(records)


def bench_results(cpu: str, system: str, cores: int, **ratios: float) -> dict[str, Any]:
    """A results.json with one cell per spec."""
    return {
        "machine": {"cpu": cpu, "system": system, "cores": cores, "threads": 2},
        "versions": {"foredraft": "9"},
        "model": {"name": "smollm2-135m", "dtype": "bfloat16"},
        "settings": {
            "suite": "builtin", "prompts": 4, "batches": [1], "max_tokens": 5, "repeats": 1,
            "specs": ["off", *ratios], "measured_on": "2030-01-02T03:04:05+00:00",
        },
        "cells": [
            {"spec": spec, "category": "all", "ratio_to_off": ratio, "same_text": True}
            for spec, ratio in {"off": 1.0, **ratios}.items()
        ],
    }  # fmt: skip


def test_a_bench_is_condensed_to_auto_and_the_best_fixed_setting(pages: ModuleType) -> None:
    record = pages.auto_record(bench_results("a CPU", "Plan9 mips", 77, auto=1.5, ngram=1.25, suffix=1.75))
    assert record["ratios_to_off"] == {"all": {"auto": 1.5, "best_fixed": 1.75, "best_fixed_spec": "suffix"}}
    assert (record["date"], record["batch"]) == ("2030-01-02", 1)
    assert "--spec auto --spec ngram --spec suffix" in record["command"]
    assert (record["machine"]["system"], record["machine"]["cores"]) == ("Plan9 mips", 77), "where it was measured"


def test_a_bench_may_have_no_fixed_setting(pages: ModuleType) -> None:
    record = pages.auto_record(bench_results("a CPU", "Plan9 mips", 77, auto=1.5))
    assert record["ratios_to_off"] == {"all": {"auto": 1.5}}
    assert "| all | 1.500 |" in pages.benchmarks_page([record])


def test_a_machine_that_is_measured_again_keeps_its_name_and_its_file(pages: ModuleType, tmp_path: Path) -> None:
    """Also where a person has given both."""
    for file in (ROOT / "docs/results").glob("auto-*.json"):
        (tmp_path / file.name).write_bytes(file.read_bytes())
    before = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    known = json.loads(before["auto-xeon-bfloat16-batch-1.json"])["machine"]
    again = bench_results(known["cpu"], known["system"], known["cores"], auto=1.5, ngram=1.25)
    for _ in range(2):
        pages.publish(pages.auto_record(again), "auto any name", tmp_path)
    after = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    assert [name for name in after if after[name] != before.get(name)] == ["auto-xeon-bfloat16-batch-1.json"]
    assert json.loads(after["auto-xeon-bfloat16-batch-1.json"])["machine"]["name"] == "Xeon with AMX"
    other = pages.auto_record(bench_results("another CPU", "Linux x86_64", 16, auto=1.5))
    assert pages.publish(other, "auto another CPU", tmp_path).name == "auto-another-cpu.json"


def test_plain_figures_have_their_section(pages: ModuleType, records: list[dict[str, Any]]) -> None:
    from plain import Round, Settings, plain_record

    ours = [Round(plain, 300.0, {1: 0.010, 2: two}) for plain, two in ((100, 0.011), (200, 0.012), (150, 0.030))]
    theirs = [Round(plain, 100.0, {}) for plain in (100, 100, 50)]
    settings = Settings(Path("m.gguf"), "int4", 2, exact=False)
    beside = plain_record(settings, ours, theirs, bandwidth=2e10, weights=50_000_000, memory=3_000_000_000)
    assert json.loads(json.dumps(beside)) == beside
    assert beside["command"] == 'make bench-plain ARGS="--model m.gguf --dtype int4 --threads 2 --rounds 3 --no-exact"'
    alone = plain_record(settings, ours, [], bandwidth=2e10, weights=50_000_000, memory=3_000_000_000)
    page = pages.benchmarks_page([*records, beside, alone])
    assert "| m.gguf | int4, `exact=False` | 150 | 100 | 2.00× | 300 | 100 | 3.00× | 3,000 MB |" in page
    assert "| m.gguf | int4, `exact=False` | 150 |  |  | 300 |  |  | 3,000 MB |" in page
    assert "| m.gguf | int4, `exact=False` | 2.50 | 10.00 | 1.20× |" in page
    assert "## Plain decoding" not in pages.benchmarks_page(records)


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
    record = peers_record(results, settings | {"prompts": {COPY: 1, CHAT: 1}}, "a CPU")
    assert json.loads(json.dumps(record)) == record
    text = peers_body(record)
    assert "| Foredraft int4, auto | 30.0 | 1.50× | 30.0 | 1.50× | yes |  |" in text
    assert "no: 1 of 2 texts differ, the earliest at token 2" in text
    assert "| llama.cpp, prompt lookup, 5 draft tokens | 20.0 | 1.00× |" in text
