"""A model's description: reading the small JSON files beside its weights, and typed access to fields, of GGUF metadata
and config.json alike. Errors name the file and the field."""

from __future__ import annotations

import json
import re
import reprlib
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from foredraft.config import MAX_INTEGER
from foredraft.errors import InvalidModel

MAX_LAYERS = 1024  # eight times as many as any model has; what is made per layer stays small
_MAX_NUMBER = 3.4e38  # what float32 holds
_MIN_POSITIVE = 1.2e-38  # the smallest that is surely not 0 there
_MAX_SHOWN = 80


def shown(value: object) -> str:
    """`repr` for messages, cut where a value is long."""
    short = reprlib.Repr()
    short.maxstring = short.maxother = short.maxlong = _MAX_SHOWN
    return short.repr(value)


def not_run(path: Path, field: str, found: object, known: Sequence[str]) -> InvalidModel:
    """For an architecture that is not among those known: names them, and the relatives that its name tells."""
    near = [name for name in known if isinstance(found, str) and found.startswith(_family(name))]
    advice = f"the nearest to it {'is' if len(near) == 1 else 'are'} {' and '.join(near)}" if near else ""
    return InvalidModel(
        f"{path}: {field} is {shown(found)}, but Foredraft runs {', '.join(known)}; "
        f"{advice or 'choose a model of one of these families'}."
    )


def _family(name: str) -> str:
    """What an architecture's name begins with, before any digit or sign: the gemma of gemma3_text."""
    return re.split(r"[^a-z]", name)[0]


def is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def is_number(value: Any) -> bool:
    """Whether it is a number that float32 holds."""
    is_real = isinstance(value, int | float) and not isinstance(value, bool)
    return is_real and -_MAX_NUMBER <= value <= _MAX_NUMBER  # which a NaN is not


def is_positive(value: Any) -> bool:
    """Whether it is a number that float32 holds and can divide by."""
    return is_number(value) and bool(value >= _MIN_POSITIVE)


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


class Fields:
    """The fields `prefix + key` of `values`, read from `path`. A field without a default must be there."""

    def __init__(self, path: Path, values: Mapping[str, Any], prefix: str = "") -> None:
        self._path = path
        self._values = values
        self._prefix = prefix

    def integer(self, key: str, default: int | None = None, most: int = MAX_INTEGER) -> int:
        """A whole number from 1 to `most`; 0 only where that is the default."""
        value = self._get(key, default)
        if not is_whole(value) or not (1 <= value <= most or value == default):
            raise self.error(key, f"is {shown(value)}, but a whole number from 1 to {most} is needed")
        return int(value)

    def number(self, key: str, default: float | None = None, positive: bool = False) -> float:
        """A number that float32 holds; the default need not be positive."""
        value = self._get(key, default)
        if not is_number(value) or (positive and not is_positive(value) and value != default):
            raise self.error(key, f"is {shown(value)}, but a {'positive ' * positive}finite number is needed")
        return float(value)

    def text(self, key: str, default: str) -> str:
        value = self._get(key, default)
        if not isinstance(value, str):
            raise self.error(key, f"is {shown(value)}, but a text is needed")
        return value

    def flag(self, key: str, default: bool) -> bool:
        value = self._get(key, default)
        if not isinstance(value, bool):
            raise self.error(key, f"is {shown(value)}, but true or false is needed")
        return value

    def factors(self, key: str, length: int) -> tuple[float, ...]:
        """A list of positive numbers."""
        value = self._get(key, None)
        if not isinstance(value, list) or len(value) != length or not all(map(is_positive, value)):
            raise self.error(key, f"is {shown(value)}, but a list of {length} positive finite numbers is needed")
        return tuple(float(item) for item in value)

    def token_ids(self, key: str) -> tuple[int, ...]:
        """Nothing, one token id, or a list of them."""
        value = self._values.get(self._prefix + key)
        ids = [] if value is None else value if isinstance(value, list) else [value]
        if not all(is_whole(item) and 0 <= item <= MAX_INTEGER for item in ids):
            raise self.error(key, f"is {shown(value)}, but a token id or a list of token ids is needed")
        return tuple(ids)

    def refuse(self, neutral: Mapping[str, object], read: Collection[str] = ()) -> None:
        """Raise InvalidModel for a field that changes what a model computes and that nobody reads, unless it is absent,
        or has the value under which it changes nothing."""
        for key, value in neutral.items():
            found = self._values.get(self._prefix + key)
            if key not in read and found not in (None, False, 0, value) and found != []:
                raise InvalidModel(
                    f"{self._path}: field {self._prefix}{key} is {shown(found)}, which Foredraft does not know for "
                    "models of this kind, so their text would be wrong; use another model."
                )

    def key(self, key: str) -> str:
        """The whole name of a field."""
        return self._prefix + key

    def error(self, key: str, problem: str) -> InvalidModel:
        return InvalidModel(f"{self._path}: field {self._prefix}{key} {problem}; download or convert the model again.")

    def _get(self, key: str, default: Any) -> Any:
        value = self._values.get(self._prefix + key)
        if value is None:
            value = default
        if value is None:
            raise self.error(key, "is missing")
        return value
