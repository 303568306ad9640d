"""Golden token ids as they lie in goldens/: read by the tests, written by make_goldens.py."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent / "goldens"
NOT_COMPARED = "----"  # llama.cpp only approximates the model's own rule here


def read(name: str) -> dict[str, Any]:
    golden: dict[str, Any] = json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8"))
    return golden


def write(name: str, golden: dict[str, Any]) -> None:
    """One line per entry, so that a change of one shows as one."""
    lines = [f" {json.dumps(key)}: {json.dumps(value, ensure_ascii=False)}" for key, value in golden.items()]
    FOLDER.mkdir(exist_ok=True)
    (FOLDER / f"{name}.json").write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


def fingerprint(ids: Sequence[int]) -> str:
    """Four hexadecimal digits: with 2,000 texts no wrong tokenizer gets by, and the wrong text is named."""
    return hashlib.sha256(repr(list(ids)).encode()).hexdigest()[:4]


def digest(texts: Sequence[str]) -> str:
    return hashlib.sha256(repr(list(texts)).encode()).hexdigest()
