"""docs/map.md is what the docstrings say, and has a line for every file."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_map_is_current() -> None:
    done = subprocess.run([sys.executable, ROOT / "tools/map.py", "--check"], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, ""), done.stdout + done.stderr


def test_every_file_says_what_it_is() -> None:
    page = (ROOT / "docs/map.md").read_text(encoding="utf-8")
    assert "|  |" not in page, "a file without a docstring"
    names = [file.name for file in (ROOT / "src/foredraft").rglob("*.py") if file.name != "__init__.py"]
    assert all(f"`{name}` |" in page for name in names)
