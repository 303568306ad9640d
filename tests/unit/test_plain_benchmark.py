"""benchmarks/plain.py reads llama-bench as it is, and takes ratios within a round."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def plain(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    import plain

    yield plain
    for name in ("plain", "published"):
        sys.modules.pop(name, None)


def llama_bench(folder: Path, plain: ModuleType, answer: str, status: int = 0) -> object:
    """A stand-in that notes how it was called."""
    program = folder / "llama-bench"
    program.write_text(
        f"#!/bin/sh\necho \"$@\" >'{folder}/called'\necho '{answer}'\necho 'no model' >&2\nexit {status}\n"
    )
    program.chmod(0o755)
    return plain.LlamaBench(program, Path("m.gguf"), 3)


def test_llama_bench_is_asked_for_the_same_tokens(plain: ModuleType, tmp_path: Path) -> None:
    tests = [{"n_prompt": 512, "n_gen": 0, "avg_ts": 130.0}, {"n_prompt": 0, "n_gen": 128, "avg_ts": 99.5}]
    assert llama_bench(tmp_path, plain, json.dumps(tests)).round() == plain.Round(99.5, 130.0, {})
    assert (tmp_path / "called").read_text().split() == "-m m.gguf -t 3 -p 512 -n 128 -r 1 -o json".split()


def test_what_llama_bench_says_when_it_fails_is_told(plain: ModuleType, tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="status 4: no model"):
        llama_bench(tmp_path, plain, "", status=4).round()


def test_ratios_are_medians_of_rounds_not_ratios_of_medians(plain: ModuleType) -> None:
    ours = [plain.Round(rate, 300.0, {1: 0.010, 2: two}) for rate, two in ((100, 0.011), (200, 0.012), (150, 0.030))]
    theirs = [plain.Round(rate, 100.0, {}) for rate in (100, 100, 50)]
    found = plain.Measured(ours, theirs, bandwidth=2e10, weights=50_000_000, memory=3_000_000_000)
    lines = [line.split() for line in plain.report(found)]
    assert ["plain,", "128", "150.0", "tok/s", "100.0", "tok/s", "2.00x", "1.00-3.00"] in lines
    assert ["prompt,", "512", "300.0", "tok/s", "100.0", "tok/s", "3.00x", "3.00-3.00"] in lines
    assert ["2", "12.00", "ms", "1.20x", "1.10-3.00"] in lines
    alone = replace(found, theirs=[])
    assert ["plain,", "128", "150.0", "tok/s"] in [line.split() for line in plain.report(alone)]
    figures = found.figures()
    assert figures == json.loads(json.dumps(figures))
    assert figures["plain"] == {"foredraft": 150, "llama.cpp": 100, "ratio": 2.0}
    assert (figures["rows_ms"], figures["floor_ms"], figures["memory_mb"]) == ({"1": 10.0, "2": 12.0}, 2.5, 3000)
    assert alone.figures()["plain"] == {"foredraft": 150, "llama.cpp": None, "ratio": None}


def test_the_price_of_exactness_is_the_median_of_rounds(plain: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """A round is exact, not, not, exact. A machine that gets slower from call to call within a round adds nothing."""
    calls: list[tuple[bool, int]] = []

    class Process:
        def __init__(self, settings: Any) -> None:
            self.exact = settings.exact

        def __enter__(self) -> Process:
            return self

        def __exit__(self, *exception: object) -> None:
            pass

        def ask(self, method: str, number: int, tokens: int, sequences: int = 1) -> float:
            if number < 0:
                return 1.0
            calls.append((self.exact, sequences))
            assert tokens == {1: 128, 8: 16}[sequences], "four seconds, where a step takes a quarter of one"
            drift = 0.01 * ((len(calls) - 1) // 2 % 4)
            price = {True: {1: 1.02, 8: 1.1}, False: {1: 1.0, 8: 1.0}}[self.exact][sequences]
            return tokens * sequences * (price + drift) * (5 if number == 2 else 1) * 0.001

    monkeypatch.setattr(plain, "Foredraft", Process)
    settings = plain.Settings(Path("m.gguf"), "int4", 2, sequences=8)
    figures = plain.price_of_exactness(settings, 3)
    assert [exact for exact, _ in calls] == 3 * [True, True, False, False, False, False, True, True]
    assert figures["price"] == {"latency": 1.02, "throughput": pytest.approx(1.099, abs=0.001)}
    assert figures["exact"] == {"ms_per_token": 1.035, "tokens_per_s": pytest.approx(896.9, abs=0.1)}
    assert figures["not_exact"]["ms_per_token"] == 1.015
