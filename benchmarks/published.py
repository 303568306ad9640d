"""What measurements share: the published results, prompts that are the same in every run, and lines of progress.

A result is one JSON file in docs/results/, and the pages are made from them (pages.py). Every file has `kind`,
`machine`, `date`, `version` and `commit` of Foredraft, `versions` of what it ran with, `command` (a line for each call
that it took), and beside them the figures of its kind; `earlier` names the commits of parts that were not measured with
`commit`. `kind` is `machine` (machine.py) or `peers` (peers.py).
"""

from __future__ import annotations

import json
import os
import platform
import random
import re
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import foredraft
from foredraft.reports.facts import cpu_name

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "docs" / "results"
MEASURED = ("src", "benchmarks", "pyproject.toml", "setup.py")  # what a figure may depend on

Record = dict[str, Any]
Figures = dict[str, Any]

PREFILL_TOKENS = 512  # of the prompts whose time to the first token is measured


def read_records(folder: Path = RESULTS) -> list[Record]:
    """All published results, in the order of their file names. One of another version is an error: figures of several
    versions cannot be compared."""
    records = []
    for file in sorted(folder.glob("*.json")):
        record = json.loads(file.read_text(encoding="utf-8"))
        version = record.get("version", "an unknown version")
        if version != foredraft.__version__:
            raise SystemExit(
                f"docs/results/{file.name} was measured with {version}, but this is {foredraft.__version__}. "
                f"Measure it again on its machine, or delete it: {record['command']}"
            )
        records.append(record)
    return records


def new_record(kind: str, machine: Record, commit: str, versions: dict[str, str], command: str) -> Record:
    """A result that is measured today with this version, without its figures."""
    return {
        "kind": kind,
        "machine": machine,
        "date": datetime.now(UTC).date().isoformat(),
        "version": foredraft.__version__,
        "commit": commit,
        "versions": versions,
        "command": command,
    }


def describe_machine(name: str, threads: int) -> Record:
    """This machine, under the name that its figures are shown with."""
    system = f"{platform.system()} {platform.machine()}"
    return {"name": name, "cpu": cpu_name(), "system": system, "cores": os.cpu_count(), "threads": threads}


def source_commit() -> str | None:
    """The commit that is measured, marked where the code differs from it; None outside a repository."""

    def git(*arguments: str) -> str:
        done = subprocess.run(["git", "-C", ROOT, *arguments], capture_output=True, text=True, check=True)
        return done.stdout.strip()

    try:
        dirty = git("status", "--porcelain", "--", *MEASURED)
        return git("rev-parse", "--short=12", "HEAD") + ("-dirty" if dirty else "")
    except (OSError, subprocess.CalledProcessError):
        return None


def publish(record: Record, *name: str, folder: Path = RESULTS) -> Path:
    """Write a result to the file of this name."""
    file = result_file(*name, folder=folder)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    return file


def result_file(*name: str, folder: Path = RESULTS) -> Path:
    return folder / f"{re.sub(r'[^a-z0-9]+', '-', ' '.join(name).lower()).strip('-')}.json"


class Prompts:
    """Distinct prompts, the same in every run: tokens drawn at random, since plain decoding takes as long for any."""

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size

    def prompt(self, name: str, tokens: int) -> list[int]:
        draw = random.Random(name)
        return [draw.randrange(self.vocab_size // 10, self.vocab_size * 9 // 10) for _ in range(tokens)]


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
