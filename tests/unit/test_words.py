"""The check for retired words notices them in code and prose, and leaves ordinary English alone."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

BAD = {
    "guess.py": "guesses = 1\n",
    "camel.py": "class SuffixGuesser: ...\n",
    "said.py": "wants_said = True\n",
    "law.py": "exact_law = {}\n",
    "enter.py": "def enter(sequence): ...\n",
    "waking.py": "waking_s = 0.0\n",
    "settled.py": "text = settled(3)\n",
    "accounts.py": "from foredraft.proposers import accounts\n",
    "comment.py": "x = 1  # believed the more\n",
    "docstring.py": '"""A tree of guessed tokens."""\n',
    "message.py": 'raise ValueError(f"{1} guesses are too many")\n',
    "broken_line.md": "There are several ways\non from here.\n",
    "law.md": "The text keeps the same law.\n",
    "asking.md": "Asking costs little.\n",
    "proposer.md": "Every proposer is asked once.\n",
    "said.md": "It needs what the target said.\n",
    "comment.c": "int a; // what is guessed\n",
}
GOOD = {
    "context.py": "class Bar:\n    def __enter__(self): ...\n",
    "lawn.py": "lawn = lawyer = 1\n",
    "english.md": "Everybody said that the recipe was theirs. The older baker retired. `output.text` stays.\n",
    "moore.md": "Moore's law is older than this project.\n",
    "allowed.md": "A draft is a guess at the next tokens. <!-- words: allow -->\n",
    "allowed.py": "x = 1  # a guess, words: allow\n",
    "form_feed.py": "\f\nx = 1  # a guess, words: allow\n",
    "separator.md": "One\u2028two\x85three.\n\nA draft is a guess. <!-- words: allow -->\n",
    "code.c": "int guess; /* C identifiers are not checked */\n",
}


def lint(*files: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, ROOT / "tools/words.py", *files], capture_output=True, text=True)


@pytest.mark.parametrize("name", BAD)
def test_a_retired_word_fails(name: str, tmp_path: Path) -> None:
    file = tmp_path / name
    file.write_text(f"\n{BAD[name]}")
    done = lint(file)
    assert done.returncode == 1
    (line,) = done.stdout.splitlines()
    assert line.startswith(f"{file}:2: ") and " is retired; write " in line


@pytest.mark.parametrize("name", GOOD)
def test_ordinary_words_pass(name: str, tmp_path: Path) -> None:
    file = tmp_path / name
    file.write_text(GOOD[name], encoding="utf-8")
    done = lint(file)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_a_folder_is_searched(tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "page.md").write_text("A guess.\n")
    (tmp_path / "deep" / "picture.svg").write_text("A guess.\n")
    assert lint(tmp_path).stdout.count("\n") == 1


def test_make_lint_runs_it() -> None:
    assert "tools/words.py" in (ROOT / "Makefile").read_text()
