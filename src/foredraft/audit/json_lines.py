"""Files of one JSON object a line: prompts, and suites of questions."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from foredraft.errors import InvalidPrompt


def read_json_lines(file: Path, allowed: str) -> list[tuple[str, Any]]:
    """Every record with the place it stands at (`file:line`), for whoever finds fault with it; at least one."""
    try:
        lines = file.read_text(encoding="utf-8").split("\n")  # not splitlines: a JSON string may hold U+2028
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise InvalidPrompt(f"{file} cannot be read: {reason}.") from error
    records: list[tuple[str, Any]] = []
    for number, line in enumerate(lines, 1):
        where = f"{file}:{number}"
        try:
            if line.strip():
                records.append((where, json.loads(line)))
        except json.JSONDecodeError as error:
            problem = f"{error.msg} at column {error.colno}"
            raise InvalidPrompt(f"{where} is not JSON ({problem}); use {allowed}.") from error
    if not records:
        raise InvalidPrompt(f"{file} holds no prompts; write one JSON object a line: {allowed}.")
    return records
