"""benchmarks/plain.py reads llama-bench as it is, and takes ratios within a round."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def plain(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    import plain

    yield plain
    for name in ("plain", "pages", "page_sections", "published"):
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
    lines = [line.split() for line in plain.report(ours, theirs, bandwidth=2e10, weights=50_000_000)]
    assert ["plain,", "128", "150.0", "tok/s", "100.0", "tok/s", "2.00x", "1.00-3.00"] in lines
    assert ["prompt,", "512", "300.0", "tok/s", "100.0", "tok/s", "3.00x", "3.00-3.00"] in lines
    assert ["2", "12.00", "ms", "1.20x", "1.10-3.00"] in lines
    alone = [line.split() for line in plain.report(ours, [], bandwidth=2e10, weights=50_000_000)]
    assert ["plain,", "128", "150.0", "tok/s"] in alone
