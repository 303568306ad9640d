"""A GGUF file as a checkpoint: memory-mapped, tensors under their Hugging Face names, q and k rows in order."""

from __future__ import annotations

import mmap
import re
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from math import prod
from pathlib import Path

import numpy as np

from foredraft.backends.weight import Weight
from foredraft.config import ModelConfig
from foredraft.errors import InvalidModel
from foredraft.models.architectures import GGUF_ARCHITECTURES
from foredraft.models.checkpoint import Checkpoint, StoredTensor
from foredraft.models.fields import shown
from foredraft.models.gguf import blocks
from foredraft.models.gguf.config import config_from_header
from foredraft.models.gguf.header import GGUFHeader, TensorEntry, read_header
from foredraft.models.tokenizer import Tokenizer

_MODEL_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_qkv": "self_attn.qkv_proj",
    "attn_output": "self_attn.o_proj",
    "attn_sinks": "self_attn.sinks",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "post_attention_norm": "self_attn.update_norm",
    "post_ffw_norm": "mlp.update_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.router",
    "ffn_gate_exps": "mlp.experts.gate_proj",
    "ffn_up_exps": "mlp.experts.up_proj",
    "ffn_down_exps": "mlp.experts.down_proj",
    "nextn.enorm": "enorm",  # of a layer for multi-token prediction, as DeepSeek names its parts
    "nextn.hnorm": "hnorm",
    "nextn.eh_proj": "eh_proj",
    "nextn.embed_tokens": "embed_tokens",
    "nextn.shared_head_norm": "shared_head.norm",
    "nextn.shared_head_head": "shared_head.head",
}
_ROPE_TENSORS = {"rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight"}  # read into the config
_LAYER_PATTERN = re.compile(r"blk\.(\d+)\.((?:nextn\.)?\w+)\.(weight|bias)")


class GGUFCheckpoint(Checkpoint):
    """See Checkpoint."""

    def __init__(self, path: Path) -> None:
        header = read_header(path)
        config = config_from_header(header)
        read_tokenizer = partial(Tokenizer.from_gguf, header.metadata, path)
        super().__init__(path, config, {}, _stored_tensors(header, config), read_tokenizer)


def _stored_tensors(header: GGUFHeader, config: ModelConfig) -> Iterator[StoredTensor]:
    for entry in header.tensors.values():
        if entry.name in _ROPE_TENSORS:
            continue
        if "_exps." in entry.name:  # the matrices or biases of all experts of a layer, one below the other
            entry = replace(entry, shape=(prod(entry.shape[:2]), *entry.shape[2:]))
        supported = blocks.PRECISION if len(entry.shape) > 1 else blocks.FLOATS
        if entry.type not in supported:
            allowed = ", ".join(kind.name for kind in supported)
            raise InvalidModel(
                f"{header.path}: tensor {shown(entry.name)} is {entry.type.name}, but {allowed} are supported; "
                "choose another quantisation of this model."
            )
        name, precision = _layout_name(entry, config), blocks.PRECISION[entry.type]
        yield StoredTensor(header.path, name, entry.shape, precision, partial(_read, header, config, entry))


def _read(header: GGUFHeader, config: ModelConfig, entry: TensorEntry, name: str, wanted: slice) -> Weight:
    heads = 0  # whose rows are interleaved
    if GGUF_ARCHITECTURES[config.architecture].interleaved:
        heads = config.num_heads if ".q_proj." in name else config.num_kv_heads if ".k_proj." in name else 0
    return read_entry(header, entry, wanted, heads)


def read_entry(header: GGUFHeader, entry: TensorEntry, wanted: slice, heads: int = 0) -> Weight:
    """Rows in Hugging Face order; `heads` are those whose rows are interleaved. They move whole and as bytes, so
    quantised codes are kept."""
    if hasattr(mmap, "MADV_DONTNEED"):
        # Give the pages of earlier tensors back: a loaded model needs its packed weights, not the file as well. Where
        # one is still in use it is read again.
        header.data.madvise(mmap.MADV_DONTNEED)
    rows = np.frombuffer(header.data, np.uint8, entry.num_bytes, entry.start).reshape(entry.shape[0], -1)[wanted]
    if heads:
        pairs = rows.reshape(heads, -1, 2, rows.shape[1])
        rows = pairs.swapaxes(1, 2).reshape(rows.shape)
    try:
        return blocks.decode(rows, entry.type)
    except InvalidModel as error:
        raise InvalidModel(f"{header.path}: tensor {entry.name!r}: {error}") from error


def _layout_name(entry: TensorEntry, config: ModelConfig) -> str:
    """The entry's name in the Llama layout; one that is not known is kept as it is."""
    if entry.name in _MODEL_NAMES:
        return _MODEL_NAMES[entry.name]
    match = _LAYER_PATTERN.fullmatch(entry.name)
    if match is None or match[2] not in LAYER_NAMES:
        return entry.name
    module = GGUF_ARCHITECTURES[config.architecture].gguf_names.get(match[2], LAYER_NAMES[match[2]])
    if module == "mlp.up_proj" and entry.shape[0] == 2 * config.intermediate_size:
        module = "mlp.gate_up_proj"
    return f"model.layers.{match[1]}.{module}.{match[3]}"
