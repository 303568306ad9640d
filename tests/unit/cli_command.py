"""Runs the command line in this process, with a stand-in for the model."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from foredraft.cli.main import run
from tests.unit.fake_llm import fake_module


@dataclass
class Result:
    code: int
    out: str
    err: str
    log: list[Any]

    @property
    def records(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.out.splitlines()]


Command = Callable[..., Result]


def cli_command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    """Runs `foredraft ARGUMENTS...` in this process, with the stand-in for the model."""

    def call(*arguments: str, stdin: str = "", error: str | None = None) -> Result:
        log: list[Any] = []
        monkeypatch.setitem(sys.modules, "foredraft.llm", fake_module(log, error))
        monkeypatch.setattr(sys, "argv", ["foredraft", *arguments])
        monkeypatch.setattr(sys, "stdin", io.StringIO(stdin))
        with pytest.raises(SystemExit) as ended:
            run()
        out, err = capsys.readouterr()
        return Result(ended.value.code, out, err, log)

    return call


def fails_with_one_sentence(result: Result) -> bool:
    return result.code == 2 and result.out == "" and result.err.count("\n") == 1 and result.err.endswith(".\n")
