"""The header of a GGUF file: metadata and the table of tensors, parsed in one pass over a memory map.

The `gguf` package has a reader too, but it makes several numpy objects for each of the vocabulary's strings and takes
seconds where this takes a tenth of one. No count, length or offset is trusted before it is compared with the bytes
that the file has left, so a small file costs little memory whatever it claims. Every error names the field or tensor at
which the file stops making sense.
"""

from __future__ import annotations

import mmap
import os
import stat
import struct
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import Any

from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from foredraft.errors import InvalidModel
from foredraft.models.fields import is_whole, shown

_DEFAULT_ALIGNMENT, _MIN_ALIGNMENT, _MAX_ALIGNMENT = 32, 8, 1 << 16
_MAX_DIMENSIONS = 4
# No model comes near these. They keep what Python makes of a header in proportion to it.
_MAX_FIELDS, _MAX_TENSORS, _MAX_ARRAY = 1 << 14, 1 << 14, 1 << 21
# The fewest bytes: a field's name, type and value; a tensor's name, number of dimensions, one of them, type and offset.
_FIELD_BYTES, _TENSOR_BYTES, _STRING_BYTES = 8 + 4 + 1, 8 + 4 + 8 + 4 + 8, 8
_MAX_TOKEN_LENGTH = 512  # characters; vocabularies have tokens of up to 128 or so
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
    """A file's metadata and tensors, and the private map of its bytes: torch warns about memory that it may not write
    to, although nothing here writes."""

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, TensorEntry]
    data: mmap.mmap


def read_header(path: Path) -> GGUFHeader:
    """Parse and check the header. Afterwards, the fields of _FIELDS have their types, and the tensors'
    bytes lie inside the file, aligned and apart from each other."""
    try:
        status = os.stat(path)
        if not stat.S_ISREG(status.st_mode):
            raise InvalidModel(f"{path} is not a regular file; give a GGUF file.")
        if status.st_size == 0:
            raise InvalidModel(f"{path} is empty; download the GGUF file again.")
        with path.open("rb") as file:
            data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    except OSError as error:
        raise InvalidModel(f"{path} cannot be read: {error.strerror}.") from error
    return _Parser(path, data).parse()


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
        version = self._scalar("I")
        if version not in (2, 3):
            raise InvalidModel(
                f"{self._path} has GGUF version {version}, but versions 2 and 3 (little-endian) are supported; "
                "convert the model again with a current llama.cpp."
            )
        num_tensors, num_fields = self._scalar("Q"), self._scalar("Q")
        self._check_count("tensors", num_tensors, _TENSOR_BYTES, _MAX_TENSORS)
        self._check_count("metadata fields", num_fields, _FIELD_BYTES, _MAX_FIELDS)
        metadata = self._metadata(num_fields)
        _check_metadata(self._path, metadata)
        return GGUFHeader(self._path, metadata, self._tensors(num_tensors, metadata), self._data)

    def _metadata(self, num_fields: int) -> dict[str, Any]:
        metadata: dict[str, Any] = {}
        for index in range(num_fields):
            self._doing = f"metadata field {index + 1} of {num_fields}"
            key = self._string()
            self._doing = f"metadata field {shown(key)}"
            if key in metadata:
                raise self._damaged("it is listed twice")
            metadata[key] = self._value(self._scalar("I"))
        return metadata

    def _tensors(self, num_tensors: int, metadata: dict[str, Any]) -> dict[str, TensorEntry]:
        table = []
        for index in range(num_tensors):
            self._doing = f"tensor {index + 1} of {num_tensors} in the tensor table"
            name = self._string()
            self._doing = f"tensor {shown(name)} in the tensor table"
            num_dimensions = self._scalar("I")
            if not 1 <= num_dimensions <= _MAX_DIMENSIONS:
                raise self._damaged(f"it has {num_dimensions} dimensions, but 1 to {_MAX_DIMENSIONS} are possible")
            shape = self._scalars(num_dimensions, "Q")[::-1]
            table.append((name, shape, self._scalar("I"), self._scalar("Q")))
        alignment = metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
        is_power = is_whole(alignment) and alignment.bit_count() == 1
        if not is_power or not _MIN_ALIGNMENT <= alignment <= _MAX_ALIGNMENT:
            raise InvalidModel(
                f"{self._path}: metadata field general.alignment is {shown(alignment)}, but a power of 2 from "
                f"{_MIN_ALIGNMENT} to {_MAX_ALIGNMENT} is needed; convert the model again."
            )
        data_start = -(-self._position // alignment) * alignment
        tensors: dict[str, TensorEntry] = {}
        for name, shape, type_id, offset in table:
            if name in tensors:
                raise InvalidModel(f"{self._path}: tensor {shown(name)} is listed twice; download the file again.")
            if offset % alignment:
                raise InvalidModel(
                    f"{self._path}: tensor {shown(name)} has offset {offset}, which is not a multiple of "
                    f"general.alignment ({alignment}); download or convert the file again."
                )
            tensors[name] = self._entry(name, shape, type_id, data_start + offset)
        for before, after in pairwise(sorted(tensors.values(), key=lambda entry: entry.start)):
            if before.start + before.num_bytes > after.start:
                raise InvalidModel(
                    f"{self._path}: tensors {shown(before.name)} and {shown(after.name)} share bytes of the file; "
                    "download or convert it again."
                )
        return tensors

    def _entry(self, name: str, shape: tuple[int, ...], type_id: int, start: int) -> TensorEntry:
        try:
            kind = GGMLQuantizationType(type_id)
        except ValueError:
            raise InvalidModel(f"{self._path}: tensor {shown(name)} has the unknown GGML type {type_id}.") from None
        block_length, block_bytes = GGML_QUANT_SIZES[kind]
        if 0 in shape or shape[-1] % block_length:
            raise InvalidModel(
                f"{self._path}: tensor {shown(name)} has shape {list(shape)}, but {kind.name} needs rows of a multiple "
                f"of {block_length}; download or convert the file again."
            )
        num_bytes = prod(shape) // block_length * block_bytes
        if start + num_bytes > len(self._data):
            raise InvalidModel(
                f"{self._path} is truncated: tensor {shown(name)} ends at byte {start + num_bytes}, but the file has "
                f"{len(self._data)}; download it again."
            )
        return TensorEntry(name, shape, kind, start, num_bytes)

    def _value(self, type_id: int) -> Any:
        if type_id == _STRING:
            return self._string()
        if type_id == _ARRAY:
            return self._array(self._scalar("I"), self._scalar("Q"))
        if type_id not in _SCALAR_FORMATS:
            raise self._damaged(f"its value has the unknown type {type_id}")
        return self._scalar(_SCALAR_FORMATS[type_id])

    def _array(self, type_id: int, length: int) -> list[Any]:
        if type_id == _STRING:
            self._check_count("texts", length, _STRING_BYTES, _MAX_ARRAY)
            return self._strings(length)
        if type_id not in _SCALAR_FORMATS:
            raise self._damaged(f"it is an array of type {type_id}, but only numbers and texts are supported")
        code = _SCALAR_FORMATS[type_id]
        self._check_count("numbers", length, struct.calcsize("<" + code), _MAX_ARRAY)
        return list(self._scalars(length, code))

    def _strings(self, length: int) -> list[str]:
        # The hot loop: 100,000 strings for a vocabulary and its merges.
        data, position, end = self._data, self._position, len(self._data)
        values = []
        for _ in range(length):
            start = position + 8
            if start > end:
                raise self._damaged(f"the file ends at byte {end}")
            position = start + _read_u64(data, position)[0]
            if position > end:
                raise self._damaged(f"a text has {position - start} bytes, but the file has {end - start} left")
            try:
                values.append(data[start:position].decode())
            except UnicodeDecodeError as error:
                raise self._damaged(f"a text is not UTF-8 at byte {start + error.start}") from error
        self._position = position
        return values

    def _string(self) -> str:
        return self._strings(1)[0]

    def _scalar(self, code: str) -> Any:
        return self._scalars(1, code)[0]

    def _scalars(self, count: int, code: str) -> tuple[Any, ...]:
        layout = struct.Struct(f"<{count}{code}")
        if layout.size > self._left:
            raise self._damaged(f"the file ends at byte {len(self._data)}")
        values = layout.unpack_from(self._data, self._position)
        self._position += layout.size
        return values

    @property
    def _left(self) -> int:
        return len(self._data) - self._position

    def _check_count(self, things: str, count: int, least_bytes: int, most: int) -> None:
        """`count` things of at least so many bytes must follow; nothing is allocated for them before."""
        if count > most:
            raise self._damaged(f"there are {count} {things}, but at most {most} are allowed")
        if count * least_bytes > self._left:
            raise self._damaged(f"{count} {things} need more than the {self._left} bytes that the file has left")

    def _damaged(self, problem: str) -> InvalidModel:
        return InvalidModel(
            f"{self._path} is truncated or damaged at {self._doing}: {problem}; download the GGUF file again."
        )


def _list_of(is_entry: Callable[[Any], bool]) -> Callable[[Any], bool]:
    """The entries of a GGUF array have one type, so the first one tells it."""
    return lambda value: isinstance(value, list) and all(map(is_entry, value[:1]))


def _is_text(value: object) -> bool:
    return isinstance(value, str)


_KINDS: dict[str, Callable[[Any], bool]] = {
    "a text": _is_text,
    "a whole number": is_whole,
    "true or false": lambda value: isinstance(value, bool),
    "a list of texts": _list_of(_is_text),
    "a list of whole numbers": _list_of(is_whole),
    "a list of numbers": _list_of(lambda value: is_whole(value) or isinstance(value, float)),
}
_TOKEN_IDS = tuple(f"tokenizer.ggml.{name}_token_id" for name in ("bos", "eos", "eot", "eom"))
# The types of the fields that are read by name: whoever reads one may rely on it. Those that describe the model's shape
# (`llama.block_count` and so on) are typed where they are read, by `Fields`.
_FIELDS = {
    "general.architecture": "a text",
    "tokenizer.chat_template": "a text",
    "tokenizer.ggml.model": "a text",
    "tokenizer.ggml.pre": "a text",
    "tokenizer.ggml.tokens": "a list of texts",
    "tokenizer.ggml.merges": "a list of texts",
    "tokenizer.ggml.token_type": "a list of whole numbers",
    "tokenizer.ggml.scores": "a list of numbers",
    "tokenizer.ggml.add_bos_token": "true or false",
    "tokenizer.ggml.add_eos_token": "true or false",
    "tokenizer.ggml.add_space_prefix": "true or false",
    "tokenizer.ggml.unknown_token_id": "a whole number",
    "tokenizer.ggml.padding_token_id": "a whole number",
    **dict.fromkeys(_TOKEN_IDS, "a whole number"),
}


def _check_metadata(path: Path, metadata: dict[str, Any]) -> None:
    """Raise InvalidModel for a field of the wrong type, or one that does not fit the vocabulary."""

    def error(key: str, problem: str) -> InvalidModel:
        return InvalidModel(f"{path}: metadata field {key} {problem}; download or convert the model again.")

    for key, kind in _FIELDS.items():
        if key in metadata and not _KINDS[kind](metadata[key]):
            raise error(key, f"is {shown(metadata[key])}, but {kind} is needed")
    tokens = metadata.get("tokenizer.ggml.tokens")
    if tokens is None:
        return
    longest = max(map(len, tokens), default=0)
    if longest > _MAX_TOKEN_LENGTH:
        raise error("tokenizer.ggml.tokens", f"has a token of {longest} characters, above {_MAX_TOKEN_LENGTH}")
    for key in ("tokenizer.ggml.token_type", "tokenizer.ggml.scores"):
        if len(metadata.get(key, tokens)) != len(tokens):
            raise error(key, f"has {len(metadata[key])} entries for {len(tokens)} tokens")
    for key in _TOKEN_IDS:
        if key in metadata and not 0 <= metadata[key] < len(tokens):
            raise error(key, f"is {metadata[key]}, but there are {len(tokens)} tokens")
