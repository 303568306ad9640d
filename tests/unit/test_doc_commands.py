"""Every command that the documentation shows is one that there is: it parses, and scripts and targets exist. What is
cheap is run."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.exceptions import TyperException

from foredraft.cli import main
from foredraft.errors import InvalidSpec
from foredraft.proposers.registry import parse_spec

ROOT = Path(__file__).parents[2]
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])
PAGES.remove(ROOT / "docs/map.md")  # docstrings name commands there, and do not show them
GIVEN_OUT = "…"  # stands for what the reader fills in
CHEAP = "foredraft plan --alpha"


def fenced(page: str) -> list[str]:
    """The lines of blocks for a shell: all of those named `sh`, and what follows a prompt in others."""
    lines: list[str] = []
    for kind, block in re.findall(r"^```(\w*)\n(.*?)^```", page, re.DOTALL | re.MULTILINE):
        lines += [line.removeprefix("$ ") for line in block.splitlines() if kind == "sh" or line.startswith("$ ")]
    return [line for line in lines if line and not line.startswith("#")]


def inline(page: str) -> list[str]:
    """Commands in the running text, as far as they are complete."""
    prose = re.sub(r"^```.*?^```", "", page, flags=re.DOTALL | re.MULTILINE)
    spans = [" ".join(span.split()) for span in re.findall(r"`([^`]+)`", prose)]
    return [span for span in spans if re.match(r"(foredraft|python|make) ", span) and GIVEN_OUT not in span]


def words(line: str) -> list[str]:
    """A command without its comment and without where its output goes."""
    found = shlex.split(line, comments=True)
    return found[: found.index(">")] if ">" in found else found


TEXTS = {str(page.relative_to(ROOT)): page.read_text(encoding="utf-8") for page in PAGES}
COMMANDS = [
    pytest.param(line, id=f"{name}: {line[:60]}")
    for name, text in TEXTS.items()
    for line in dict.fromkeys([*fenced(text), *inline(text)])
]


def parse(arguments: list[str]) -> None:
    """Read the arguments as the program would, without doing anything."""
    name, *others = arguments
    if name not in ("--help", "--version"):
        assert name in main.COMMANDS, f"there is no command {name}"
        command: Any = typer.main.get_command(main.command_app(name))
        command.make_context(name, others)
    for option, value in pairwise(arguments):
        if option == "--spec":
            parse_spec(value)


@pytest.mark.parametrize("line", COMMANDS)
def test_a_command_of_the_documentation_exists(line: str) -> None:
    program, *arguments = words(line)
    assert not program.startswith(".venv"), "write it for a shell in which the environment is active"
    if program == "foredraft":
        parse(arguments)
    elif program == "python":
        (script, *options) = arguments
        source = (ROOT / script).read_text(encoding="utf-8")
        helper = (ROOT / script).parent / "lab.py"
        source += helper.read_text(encoding="utf-8") if helper.exists() else ""
        for option in options:
            assert not option.startswith("--") or f'"{option}"' in source, f"{script} has no {option}"
    elif program == "make":
        subprocess.run(["make", "--dry-run", *arguments], cwd=ROOT, check=True, capture_output=True)
    else:
        assert program in (".", "pip", "echo"), f"is {program} a command of ours?"


def test_commands_are_found() -> None:
    assert any(line.startswith("foredraft generate") for line in fenced(TEXTS["README.md"]))
    assert len(fenced(TEXTS["docs/economics.md"])) >= 7


@pytest.mark.parametrize(
    "line",
    ["foredraft burn", "foredraft bench --speck ngram", "foredraft plan --k-max 0", "foredraft chat --spec nogram"],
)
def test_a_command_that_is_none_is_noticed(line: str) -> None:
    with pytest.raises((AssertionError, TyperException, InvalidSpec)):
        parse(words(line)[1:])


def test_cheap_commands_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As they stand, in a folder with the file that the page on economics shows."""
    pytest.importorskip("matplotlib")
    (curve,) = re.findall(r"```json\n(.*?)```", TEXTS["docs/economics.md"], re.DOTALL)
    (tmp_path / "verify.json").write_text(curve, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    commands = [words(line) for text in TEXTS.values() for line in fenced(text) if line.startswith(CHEAP)]
    assert commands
    for command in commands:
        monkeypatch.setattr(sys, "argv", command)
        with pytest.raises(SystemExit) as ended:
            main.run()
        assert ended.value.code == 0, command
