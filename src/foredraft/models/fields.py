"""Typed access to a model's description, GGUF metadata and config.json alike; errors name the file and the field."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from foredraft.errors import InvalidModel


class Fields:
    """The fields `prefix + key` of `values`, read from `path`. A field without a default must be there."""

    def __init__(self, path: Path, values: Mapping[str, Any], prefix: str = "") -> None:
        self._path = path
        self._values = values
        self._prefix = prefix

    def integer(self, key: str, default: int | None = None) -> int:
        """A whole number, at least 1; 0 only where that is the default."""
        value = self._get(key, default)
        if not isinstance(value, int) or isinstance(value, bool) or (value < 1 and value != default):
            raise self.error(key, f"is {value!r}, but a whole number of at least 1 is needed")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = self._get(key, default)
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise self.error(key, f"is {value!r}, but a number is needed")
        return float(value)

    def text(self, key: str, default: str) -> str:
        value = self._get(key, default)
        if not isinstance(value, str):
            raise self.error(key, f"is {value!r}, but a text is needed")
        return value

    def flag(self, key: str, default: bool) -> bool:
        value = self._get(key, default)
        if not isinstance(value, bool):
            raise self.error(key, f"is {value!r}, but true or false is needed")
        return value

    def numbers(self, key: str, length: int) -> tuple[float, ...]:
        value = self._get(key, None)
        valid = isinstance(value, list) and all(isinstance(item, int | float) for item in value)
        if not valid or len(value) != length:
            raise self.error(key, f"must be a list of {length} numbers")
        return tuple(float(item) for item in value)

    def error(self, key: str, problem: str) -> InvalidModel:
        return InvalidModel(f"{self._path}: field {self._prefix}{key} {problem}; download or convert the model again.")

    def _get(self, key: str, default: Any) -> Any:
        value = self._values.get(self._prefix + key)
        if value is None:
            value = default
        if value is None:
            raise self.error(key, "is missing")
        return value
