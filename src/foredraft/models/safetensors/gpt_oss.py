"""The experts of gpt-oss in safetensors: one tensor for all of a layer, in which rows of gates and ups take turns.

Matrices are MXFP4, as `_blocks` of codes and their `_scales`, or floats with inputs and outputs the other way round.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from foredraft.backends.weight import Weight, plain_weight
from foredraft.config import QUANT_GROUP
from foredraft.errors import InvalidModel
from foredraft.models.checkpoint import StoredTensor
from foredraft.models.fields import shown

_PATTERN = re.compile(r"(.*\.mlp\.experts)\.(gate_up_proj|down_proj)(|_blocks|_scales|_bias)")
_ROWS = {
    "gate_up_proj": {"gate_proj": slice(0, None, 2), "up_proj": slice(1, None, 2)},
    "down_proj": {"down_proj": slice(None)},
}
_FLOATS = {"F32": "float32", "F16": "bfloat16", "BF16": "bfloat16"}
_DTYPES = {"": _FLOATS, "_bias": _FLOATS, "_blocks": {"U8": "int4"}, "_scales": {"U8": "int4"}}  # and their precision
_RANKS = {"": 3, "_bias": 2, "_blocks": 4, "_scales": 3}


@dataclass(frozen=True)
class Place:
    """Where a tensor lies: the name of a file, and the open file."""

    file: Path
    shard: Any

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self.shard.get_slice(name).get_shape())

    def of_expert(self, name: str, expert: int, rows: slice = slice(None)) -> Tensor:
        tensor: Tensor = self.shard.get_slice(name)[expert : expert + 1][0]
        return tensor[rows]


def are_experts(name: str) -> bool:
    return _PATTERN.fullmatch(name) is not None


def expert_tensors(places: Mapping[str, Place], num_experts: int) -> Iterator[StoredTensor]:
    """Expert by expert, under the names of the Llama layout. `places` are those of tensors of experts; a matrix and its
    scales may lie in different files."""
    for name, place in places.items():
        match = _PATTERN.fullmatch(name)
        assert match is not None
        prefix, module, suffix = match.groups()
        shape, dtype = place.shape(name), place.shard.get_slice(name).get_dtype()
        if len(shape) != _RANKS[suffix] or dtype not in _DTYPES[suffix]:
            raise _wrong(place, name, f"is {dtype} with shape {list(shape)}, which no experts of gpt-oss have")
        if shape[0] != num_experts:
            raise _wrong(place, name, f"holds {shape[0]} experts, but num_local_experts is {num_experts}")
        if suffix == "_scales":
            continue  # read with their codes
        read: Callable[[int, slice], Weight]
        columns: tuple[int, ...] = ()
        if suffix == "_bias":
            kind, num_rows, read = "bias", shape[1], partial(_bias, place, name)
        elif suffix == "":
            kind, num_rows, columns, read = "weight", shape[2], shape[1:2], partial(_floats, place, name)
        else:
            scales = name.removesuffix("_blocks") + "_scales"
            if scales not in places or (*places[scales].shape(scales), QUANT_GROUP // 2) != shape:
                raise _wrong(place, name, f"does not fit {shown(scales)}, or that is missing")
            kind, num_rows, columns = "weight", shape[1], (shape[2] * QUANT_GROUP,)
            read = partial(_mxfp4, place, name, places[scales], scales)
        for part, rows in _ROWS[module].items():
            whole = (len(range(num_rows)[rows]), *columns)
            for expert in range(num_experts):
                layout_name = f"{prefix}.{expert}.{part}.{kind}"
                precision = _DTYPES[suffix][dtype]
                yield StoredTensor(place.file, layout_name, whole, precision, partial(_read, read, expert, rows))


def _wrong(place: Place, name: str, problem: str) -> InvalidModel:
    return InvalidModel(f"{place.file}: tensor {shown(name)} {problem}; download or convert the model again.")


def _read(read: Callable[[int, slice], Weight], expert: int, rows: slice, name: str, wanted: slice) -> Weight:
    """As StoredTensor wants it; what is `wanted` is always all of it."""
    return read(expert, rows)


def _bias(place: Place, name: str, expert: int, rows: slice) -> Weight:
    return plain_weight(place.of_expert(name, expert, rows))


def _floats(place: Place, name: str, expert: int, rows: slice) -> Weight:
    return plain_weight(place.of_expert(name, expert).T[rows].contiguous())


def _mxfp4(place: Place, name: str, of_scales: Place, scales: str, expert: int, rows: slice) -> Weight:
    """A byte holds two neighbouring codes, the first in its lower bits."""
    pairs = place.of_expert(name, expert, rows)  # [rows, groups, 16]
    codes = torch.stack([pairs & 15, pairs >> 4], dim=-1).flatten(1)
    return Weight("mx4", codes, of_scales.of_expert(scales, expert, rows).contiguous())
