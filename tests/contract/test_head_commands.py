"""Commands that measure and check take a head that others have published."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from foredraft.cli.main import run
from tests.published.layouts import LAYOUTS
from tests.published.shapes import TargetShape
from tests.tiny_models import VOCAB, random_model, save_model

Command = Callable[..., tuple[int, list[dict[str, Any]], str]]


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Command:
    """Runs `foredraft ARGUMENTS... --json` with a tiny model and a head in one of the layouts."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    model = random_model("llama", num_hidden_layers=8)
    folder, place = save_model(model, tmp_path / "model"), tmp_path / "head"

    def call(name: str, layout: str, *arguments: str) -> tuple[int, list[dict[str, Any]], str]:
        LAYOUTS[layout].write(place, TargetShape(hidden=model.config.hidden_size, vocab=VOCAB), 7)
        head = next(place.glob("*.gguf"), place)
        shared = ["--model", str(folder), "--head", str(head), "--threads", "1", "--json"]
        monkeypatch.setattr(sys, "argv", ["foredraft", name, *shared, *arguments])
        with pytest.raises(SystemExit) as ended:
            run()
        out, err = capsys.readouterr()
        assert isinstance(ended.value.code, int)
        return ended.value.code, [json.loads(line) for line in out.splitlines()], err

    return call


@pytest.mark.parametrize(
    ("layout", "spec"),
    [("eagle3/specforge", "eagle"), pytest.param("gguf/dspark", "dflash", marks=pytest.mark.slow)],
)
def test_an_audit_drafts_with_it(command: Command, layout: str, spec: str) -> None:
    code, (report,), err = command("audit", layout, *f"--spec {spec} --limit 2 --max-tokens 12 --samples 500".split())
    assert code == 0 and report["passed"], err
    checks = [check["detail"] for check in report["checks"] if spec in check["name"]]
    assert len(checks) == 2, report  # greedy and sampled


def test_a_benchmark_measures_it(command: Command, tmp_path: Path) -> None:
    suite = tmp_path / "suite.jsonl"
    lines = [{"question_id": n, "category": "a", "turns": [f"{n} one two one two"]} for n in range(2)]
    suite.write_text("\n".join(map(json.dumps, lines)))
    code, cells, err = command(
        "bench",
        "eagle3/peagle",
        *f"--suite {suite} --spec off --spec eagle --batch 1 --temperature 0 --max-tokens 12 --repeats 1".split(),
        *("--out", str(tmp_path / "out")),
    )
    assert code == 0, err
    drafted = [cell for cell in cells if cell["spec"] == "eagle"]
    assert drafted and all(cell["same_text"] and cell["drafted_per_run"] > 0 for cell in drafted)
