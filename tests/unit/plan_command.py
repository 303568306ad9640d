"""Runs `foredraft plan` in this process, and makes the files that it reads."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from foredraft.cli import main

CURVE = {"rows": [1, 2, 4, 8, 16, 64], "seconds": [0.012, 0.0125, 0.013, 0.016, 0.024, 0.08]}


@dataclass
class Result:
    code: int
    out: str
    err: str

    @property
    def record(self) -> dict[str, Any]:
        (line,) = self.out.splitlines()
        record = json.loads(line)
        assert isinstance(record, dict)
        return record


Command = Callable[..., Result]


def plan_command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    """Runs `foredraft plan ARGUMENTS...` in this process."""

    def call(*arguments: str) -> Result:
        monkeypatch.setattr(sys, "argv", ["foredraft", "plan", *arguments])
        with pytest.raises(SystemExit) as ended:
            main.run()
        out, err = capsys.readouterr()
        assert isinstance(ended.value.code, int)
        return Result(ended.value.code, out, err)

    return call


def written(file: Path, content: Any) -> str:
    file.write_text(json.dumps(content), encoding="utf-8")
    return str(file)


def cell(spec: str, ratio: float | None, category: str = "all", batch: int = 1, **others: Any) -> dict[str, Any]:
    figures = {"temperature": 0.0, "dtype": "int4", "prompts": 8, "tokens_per_s": 50.0, "acceptance_rate": 0.4}
    described = {"spec": spec, "category": category, "batch": batch, "ratio_to_off": ratio}
    return {**described, **figures, "tokens_per_run": 1.5, "same_text": True, **others}


def results(tmp_path: Path, *cells: Any) -> str:
    content = {"machine": {}, "versions": {}, "verify_cost": CURVE, "cells": cells, "runs": []}
    return written(tmp_path / "results.json", content)


def fails_with_one_sentence(result: Result) -> bool:
    return result.code == 2 and result.out == "" and result.err.count("\n") == 1 and result.err.endswith(".\n")
