"""The header of a GGUF file: metadata and the table of tensors, parsed in one pass over a memory map.

The `gguf` package has a reader too, but it makes several numpy objects for each of the vocabulary's strings and takes
seconds where this takes a tenth of one. Every error names the field or tensor at which the file stops making sense.
"""

from __future__ import annotations

import mmap
import struct
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from foredraft.errors import InvalidModel

_VERSIONS = (2, 3)
_DEFAULT_ALIGNMENT = 32
_MAX_DIMENSIONS = 4
_STRING, _ARRAY = 8, 9
_SCALAR_FORMATS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_read_u64 = struct.Struct("<Q").unpack_from


@dataclass(frozen=True)
class TensorEntry:
    """One tensor: where its bytes are in the file and how they are coded. `shape` is outermost first, as in torch."""

    name: str
    shape: tuple[int, ...]
    type: GGMLQuantizationType
    start: int
    num_bytes: int


@dataclass(frozen=True)
class GGUFHeader:
    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, TensorEntry]


def read_header(path: Path) -> GGUFHeader:
    """Parse and check the header; every tensor's bytes are known to lie inside the file afterwards."""
    try:
        with path.open("rb") as file:
            if file.seek(0, 2) == 0:
                raise InvalidModel(f"{path} is empty; download the GGUF file again.")
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                return _Parser(path, data).parse()
    except OSError as error:
        raise InvalidModel(f"{path} cannot be read: {error.strerror}.") from error


class _Parser:
    """A cursor over the file. `_doing` says what is being read, for the message when the file makes no sense there."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self._path = path
        self._data = data
        self._position = 0
        self._doing = "the file header"

    def parse(self) -> GGUFHeader:
        if self._data[:4] != b"GGUF":
            raise InvalidModel(f"{self._path} does not start with 'GGUF', so it is not a GGUF file; give one.")
        self._position = 4
        try:
            return self._parse_body()
        except (struct.error, UnicodeDecodeError, OverflowError, MemoryError) as error:
            raise self._damaged() from error

    def _parse_body(self) -> GGUFHeader:
        version = self._scalar("I")
        if version not in _VERSIONS:
            raise InvalidModel(
                f"{self._path} has GGUF version {version}, but versions 2 and 3 (little-endian) are supported; "
                "convert the model again with a current llama.cpp."
            )
        num_tensors, num_fields = self._scalar("Q"), self._scalar("Q")
        metadata: dict[str, Any] = {}
        for index in range(num_fields):
            self._doing = f"metadata field {index + 1} of {num_fields}"
            key = self._string()
            self._doing = f"metadata field {key!r}"
            metadata[key] = self._value(self._scalar("I"))
        table = []
        for index in range(num_tensors):
            self._doing = f"tensor {index + 1} of {num_tensors} in the tensor table"
            name = self._string()
            self._doing = f"tensor {name!r} in the tensor table"
            table.append((name, *self._tensor_info()))
        alignment = metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
        if not isinstance(alignment, int) or alignment < 8 or alignment % 8:
            raise InvalidModel(f"{self._path}: metadata field general.alignment is {alignment!r}, not a multiple of 8.")
        data_start = -(-self._position // alignment) * alignment
        tensors: dict[str, TensorEntry] = {}
        for name, shape, type_id, offset in table:
            if name in tensors:
                raise InvalidModel(f"{self._path}: tensor {name!r} is listed twice; download the file again.")
            tensors[name] = self._entry(name, shape, type_id, data_start + offset)
        return GGUFHeader(self._path, metadata, tensors)

    def _tensor_info(self) -> tuple[tuple[int, ...], int, int]:
        num_dimensions = self._scalar("I")
        if not 1 <= num_dimensions <= _MAX_DIMENSIONS:
            raise self._damaged()
        dimensions = struct.unpack_from(f"<{num_dimensions}Q", self._data, self._position)
        self._position += 8 * num_dimensions
        return tuple(reversed(dimensions)), self._scalar("I"), self._scalar("Q")

    def _entry(self, name: str, shape: tuple[int, ...], type_id: int, start: int) -> TensorEntry:
        try:
            kind = GGMLQuantizationType(type_id)
        except ValueError:
            raise InvalidModel(f"{self._path}: tensor {name!r} has the unknown GGML type {type_id}.") from None
        block_length, block_bytes = GGML_QUANT_SIZES[kind]
        if 0 in shape or shape[-1] % block_length:
            raise InvalidModel(
                f"{self._path}: tensor {name!r} has shape {list(shape)}, but {kind.name} needs rows of a multiple of "
                f"{block_length}; download or convert the file again."
            )
        num_bytes = prod(shape) // block_length * block_bytes
        if start + num_bytes > len(self._data):
            raise InvalidModel(
                f"{self._path} is truncated: tensor {name!r} ends at byte {start + num_bytes}, but the file has "
                f"{len(self._data)}; download it again."
            )
        return TensorEntry(name, shape, kind, start, num_bytes)

    def _value(self, type_id: int) -> Any:
        if type_id == _STRING:
            return self._string()
        if type_id == _ARRAY:
            return self._array(self._scalar("I"), self._scalar("Q"))
        if type_id not in _SCALAR_FORMATS:
            raise self._damaged()
        return self._scalar(_SCALAR_FORMATS[type_id])

    def _array(self, type_id: int, length: int) -> list[Any]:
        if type_id == _STRING:
            return self._strings(length)
        if type_id not in _SCALAR_FORMATS or length > len(self._data):
            raise self._damaged()
        layout = struct.Struct(f"<{length}{_SCALAR_FORMATS[type_id]}")
        values = list(layout.unpack_from(self._data, self._position))
        self._position += layout.size
        return values

    def _strings(self, length: int) -> list[str]:
        # The hot loop: 100,000 strings for a vocabulary and its merges. A length that runs past the end of the file is
        # caught by the next unpack, or by the check after the last one.
        data, position = self._data, self._position
        values = []
        for _ in range(length):
            start = position + 8
            position = start + _read_u64(data, position)[0]
            values.append(data[start:position].decode())
        if position > len(data):
            raise self._damaged()
        self._position = position
        return values

    def _string(self) -> str:
        return self._strings(1)[0]

    def _scalar(self, code: str) -> Any:
        layout = struct.Struct("<" + code)
        (value,) = layout.unpack_from(self._data, self._position)
        self._position += layout.size
        return value

    def _damaged(self) -> InvalidModel:
        return InvalidModel(f"{self._path} is truncated or damaged at {self._doing}; download the GGUF file again.")
