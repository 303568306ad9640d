"""What measurements share: the published results, prompts that are the same in every run, and lines of progress.

A result is one small JSON file in docs/results/, and the pages are made from them (pages.py). Every file has `kind`,
`machine`, `date`, `versions`, `command` and `notes`, and the figures of its kind beside them.
"""

from __future__ import annotations

import json
import os
import platform
import random
import re
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "docs" / "results"

Record = dict[str, Any]

PREFILL_TOKENS = 512  # of the prompts whose time to the first token is measured


def read_records(folder: Path = RESULTS) -> list[Record]:
    """All published results, in the order of their file names."""
    return [json.loads(file.read_text(encoding="utf-8")) for file in sorted(folder.glob("*.json"))]


def new_record(kind: str, cpu: str, threads: int, versions: dict[str, str], command: str, **figures: Any) -> Record:
    """A result that was measured today on this machine."""
    machine = {
        "name": cpu,
        "about": "",
        "cpu": cpu,
        "system": f"{platform.system()} {platform.machine()}",
        "cores": os.cpu_count(),
        "threads": threads,
    }
    date = datetime.now(UTC).date().isoformat()
    return {
        "kind": kind,
        "machine": machine,
        "date": date,
        "versions": versions,
        "command": command,
        **figures,
        "notes": [],
    }


def publish(record: Record, name: str, folder: Path = RESULTS) -> Path:
    """Write a result in place of the last one of the same measurement on the same machine, or under `name` if there is
    none. What is known of the machine is kept: a person may have described it better than it describes itself."""
    for known in read_records(folder):
        if all(known["machine"][key] == record["machine"][key] for key in ("cpu", "system", "cores")):
            record["machine"] |= {key: known["machine"][key] for key in ("name", "about")}
    files = {_measurement(json.loads(file.read_text(encoding="utf-8"))): file for file in folder.glob("*.json")}
    file = files.get(_measurement(record), folder / f"{slug(name)}.json")
    file.write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    return file


def _measurement(record: Record) -> tuple[Any, ...]:
    """What two results have in common if the later one replaces the earlier one."""
    machine, fields = record["machine"], ("kind", "model", "dtype", "batch", "exact")
    return machine["name"], machine["threads"], *(record.get(field) for field in fields)


def slug(text: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")


class Prompts:
    """Distinct prompts, the same in every run: tokens drawn at random, since plain decoding takes as long for any."""

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size

    def prompt(self, name: str, tokens: int) -> list[int]:
        draw = random.Random(name)
        return [draw.randrange(self.vocab_size // 10, self.vocab_size * 9 // 10) for _ in range(tokens)]


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
