"""Reading the small JSON files beside a model's weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from foredraft.errors import InvalidModel


def read_json(file: Path) -> dict[str, Any]:
    """The object in a file, empty where there is no such file; raises InvalidModel for anything but a JSON object."""
    if not file.is_file():
        return {}
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise InvalidModel(f"{file} cannot be read: {error.strerror}.") from error
    except (ValueError, RecursionError) as error:
        raise InvalidModel(f"{file} is not valid JSON ({error}); download the model again.") from error
    if not isinstance(value, dict):
        raise InvalidModel(f"{file} must hold a JSON object; download the model again.")
    return value
