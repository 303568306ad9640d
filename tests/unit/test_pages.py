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
SCRIPTS = ("pages", "page_sections", "peer_report", "peer_results", "plain_report", "published", "common")


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


def test_a_bench_is_published_under_one_name(pages: ModuleType, tmp_path: Path) -> None:
    def cell(spec: str, category: str, ratio: float) -> dict[str, Any]:
        return {"spec": spec, "category": category, "ratio_to_off": ratio, "same_text": True}

    results = {
        "machine": {"cpu": "Neoverse-N1", "threads": 2},
        "versions": {"foredraft": "9"},
        "model": {"name": "m", "dtype": "int4"},
        "settings": {
            "suite": "builtin", "prompts": 4, "batches": [8], "max_tokens": 5, "repeats": 1,
            "specs": ["off", "auto", "ngram", "suffix"], "measured_on": "2030-01-02T03:04:05+00:00",
        },
        "cells": [
            cell("off", "all", 1.0), cell("auto", "all", 1.5), cell("ngram", "all", 1.25), cell("suffix", "all", 1.75),
        ],
    }  # fmt: skip
    record = pages.auto_record(results)
    assert record["ratios_to_off"] == {"all": {"auto": 1.5, "best_fixed": 1.75, "best_fixed_spec": "suffix"}}
    assert (record["date"], record["batch"]) == ("2030-01-02", 8)
    assert "--spec auto --spec ngram --spec suffix" in record["command"]
    for _ in range(2):
        pages.publish(record, "auto Neoverse-N1 int4 batch 8", tmp_path)
    assert [file.name for file in tmp_path.iterdir()] == ["auto-neoverse-n1-int4-batch-8.json"]


def test_plain_figures_have_their_section(pages: ModuleType, records: list[dict[str, Any]]) -> None:
    def cell(engine: str, exact: bool | None, measure: str, rate: float, batch: int = 1) -> dict[str, Any]:
        tokens = {"decode": 64, "prefill": 512}[measure]
        return {
            "engine": engine, "dtype": "float32", "exact": exact, "measure": measure, "batch": batch, "tokens": tokens,
            "tokens_per_s": rate, "samples": [rate],
        }  # fmt: skip

    plain = {
        **next(record for record in records if record["kind"] == "mixed"),
        "kind": "plain", "rounds": 5, "prompt_tokens": 32, "decode_tokens": 64, "prefill_tokens": 512,
        "cells": [
            cell("transformers", None, "decode", 20.0), cell("transformers", None, "prefill", 200.0),
            cell("Foredraft", True, "decode", 50.0), cell("Foredraft", True, "prefill", 300.0),
            cell("Foredraft", True, "decode", 120.0, batch=8),
        ],
    }  # fmt: skip
    page = pages.benchmarks_page([*records, plain])
    assert "| Foredraft float32 | 50 | 2.50× | 300 | 1.50× |" in page
    assert "8 prompts at once, float32: 120.0 tok/s in all, 2.40× of one prompt alone." in page
    assert "Plain decoding beside transformers" not in pages.benchmarks_page(records)


def test_a_comparison_is_condensed_to_medians_and_ratios(pages: ModuleType) -> None:
    from peer_report import body, peers_record
    from peer_results import CHAT, COPY, FOREDRAFT, LLAMA, PEERS, Results

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
    text = body(record)
    assert "| Foredraft int4, auto | 30.0 | 1.50× | 30.0 | 1.50× | yes |  |" in text
    assert "no: 1 of 2 texts differ, the earliest at token 2" in text
    assert "| llama.cpp, prompt lookup, 5 draft tokens | 20.0 | 1.00× |" in text
