"""A GGUF file as a checkpoint: memory-mapped, tensors under their Hugging Face names, q and k rows in order."""

from __future__ import annotations

import mmap
import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from foredraft.backends.base import Weight
from foredraft.config import ModelConfig
from foredraft.errors import InvalidModel
from foredraft.models import gguf_blocks
from foredraft.models.gguf_config import config_from_header
from foredraft.models.gguf_header import GGUFHeader, TensorEntry, read_header
from foredraft.models.shapes import check_shapes, fused_parts
from foredraft.models.tokenizer import Tokenizer

# Converters of these families interleave the two halves of each q and k head, for a rope that rotates neighbours.
_INTERLEAVED_ARCHITECTURES = ("llama", "smollm3", "granite")

_MODEL_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_qkv": "self_attn.qkv_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_ROPE_TENSORS = {"rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight"}  # read into the config
_LAYER_PATTERN = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")


@dataclass(frozen=True)
class _Source:
    """Where a tensor comes from: some rows of an entry. `interleaved_heads` is 0 where rows are in order already."""

    entry: TensorEntry
    first_row: int
    num_rows: int
    interleaved_heads: int = 0

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.num_rows, *self.entry.shape[1:])


class GGUFCheckpoint:
    """See Checkpoint. Opening reads the header only; a tensor's bytes are touched when it is asked for."""

    def __init__(self, path: Path) -> None:
        header = read_header(path)
        self.path = path
        self.config = config_from_header(header)
        self.generation: dict[str, Any] = {}
        self._metadata = header.metadata
        self._sources = _sources(header, self.config)
        check_shapes(path, self.config, {name: source.shape for name, source in self._sources.items()})
        self.precision = _precision(self._sources)
        # A private map: torch warns about memory that it may not write to, although nothing here writes.
        with path.open("rb") as file:
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        self._bytes = np.frombuffer(self._map, np.uint8)

    def names(self) -> set[str]:
        return set(self._sources)

    def weight(self, name: str) -> Weight:
        source = self._source(name)
        self._let_go()
        return gguf_blocks.decode(self._rows(source), source.entry.type)

    def vector(self, name: str) -> Tensor:
        return self.weight(name).values.float().flatten().clone()  # not a view of the file, which may change

    def tokenizer(self) -> Tokenizer:
        tokenizer = Tokenizer.from_gguf(self._metadata, self.path)
        tokenizer.check_fits(self.config.vocab_size, self.path)
        return tokenizer

    def _source(self, name: str) -> _Source:
        if name not in self._sources:
            raise InvalidModel(f"{self.path} has no tensor {name!r}.")
        return self._sources[name]

    def _let_go(self) -> None:
        """Give the pages of earlier tensors back: a loaded model needs its packed weights, not the file as well. Where
        one is still in use it is read again."""
        if hasattr(mmap, "MADV_DONTNEED"):
            self._map.madvise(mmap.MADV_DONTNEED)

    def _rows(self, source: _Source) -> gguf_blocks.Rows:
        """Raw bytes [rows, bytes per row] in Hugging Face order. Rows move whole, so quantised codes are kept."""
        entry = source.entry
        rows = self._bytes[entry.start : entry.start + entry.num_bytes].reshape(entry.shape[0], -1)
        rows = rows[source.first_row : source.first_row + source.num_rows]
        if source.interleaved_heads:
            pairs = rows.reshape(source.interleaved_heads, -1, 2, rows.shape[1])
            rows = pairs.swapaxes(1, 2).reshape(rows.shape)
        return rows


def _sources(header: GGUFHeader, config: ModelConfig) -> dict[str, _Source]:
    """Every tensor of the file under its Hugging Face name; fused ones appear as their parts."""
    sources: dict[str, _Source] = {}
    for entry in header.tensors.values():
        if entry.name in _ROPE_TENSORS:
            continue
        supported = gguf_blocks.PRECISION if len(entry.shape) > 1 else gguf_blocks.VECTOR_TYPES
        if entry.type not in supported:
            allowed = ", ".join(kind.name for kind in supported)
            raise InvalidModel(
                f"{header.path}: tensor {entry.name!r} is {entry.type.name}, but {allowed} are supported; "
                "choose another quantisation of this model."
            )
        first_row = 0
        layout_name = _layout_name(entry, config)
        for name, num_rows in fused_parts(header.path, config, layout_name, entry.shape[0]):
            sources[name] = _Source(entry, first_row, num_rows, _interleaved_heads(name, config))
            first_row += num_rows
    return sources


def _layout_name(entry: TensorEntry, config: ModelConfig) -> str:
    """The entry's name in the Llama layout; one that is not known is kept as it is."""
    if entry.name in _MODEL_NAMES:
        return _MODEL_NAMES[entry.name]
    match = _LAYER_PATTERN.fullmatch(entry.name)
    if match is None or match[2] not in _LAYER_NAMES:
        return entry.name
    module = _LAYER_NAMES[match[2]]
    if module == "mlp.up_proj" and entry.shape[0] == 2 * config.intermediate_size:
        module = "mlp.gate_up_proj"
    return f"model.layers.{match[1]}.{module}.{match[3]}"


def _interleaved_heads(name: str, config: ModelConfig) -> int:
    if config.architecture in _INTERLEAVED_ARCHITECTURES:
        if ".q_proj." in name:
            return config.num_heads
        if ".k_proj." in name:
            return config.num_kv_heads
    return 0


def _precision(sources: dict[str, _Source]) -> str:
    """The class in which most weights of the linear layers are stored."""
    weights: Counter[str] = Counter()
    for name, source in sources.items():
        if name.endswith("_proj.weight"):
            weights[gguf_blocks.PRECISION[source.entry.type]] += source.num_rows * source.shape[-1]
    return weights.most_common(1)[0][0]
