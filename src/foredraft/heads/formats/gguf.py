"""Heads in GGUF files of llama.cpp: EAGLE-3, and DFlash with or without a Markov term. `target_layers` name the stream
after so many layers (files of the first days say `extract_layers`), `d2t` holds the target's ids themselves, and the q
and k rows of EAGLE-3 are interleaved. Codes are kept as they are."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from foredraft.backends.weight import Weight
from foredraft.config import ModelConfig
from foredraft.errors import InvalidModel
from foredraft.heads.base import D2T, T2D, HeadConfig
from foredraft.heads.files import Tensors, check_tensors
from foredraft.heads.formats.dflash import OTHER_WINDOWS
from foredraft.heads.formats.published import DEFAULT_DEPTH, REMEDY, check_config
from foredraft.models.checkpoint import Checkpoint
from foredraft.models.fields import MAX_LAYERS, Fields, is_whole, shown
from foredraft.models.gguf import blocks
from foredraft.models.gguf.checkpoint import LAYER_NAMES, read_entry
from foredraft.models.gguf.config import rope_scaling
from foredraft.models.gguf.header import GGUFHeader, TensorEntry, read_header

_CONFIDENCE = "confidence_head.proj.weight"
_NAMES = {
    "token_embd.weight": "embed_tokens.weight",
    "output.weight": "lm_head.weight",
    "output_norm.weight": "norm.weight",
    "markov_w1.weight": "markov_head.markov_w1",
    "markov_w2.weight": "markov_head.markov_w2",
    "conf_proj.weight": _CONFIDENCE,
    "conf_proj.bias": "confidence_head.proj.bias",
}
_ENCODER_NORM = "enc.output_norm.weight"  # before fc in EAGLE-3 files, behind it in those of DFlash
_LEFT_OUT = ("rope_freqs.weight",)  # which the config has
_NAMES_IN_LAYERS = {**LAYER_NAMES, "attn_norm_2": "hidden_norm"}
_MARKOV_W1 = "markov_head.markov_w1"
_BY_TOKEN = ("lm_head.weight", "markov_head.markov_w2")  # a row for each token of the draft vocabulary
_NEUTRAL = {"logit_scale": 1.0, "final_logit_softcapping": None}
_LAYER = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")


def read(path: Path, target: Checkpoint) -> tuple[HeadConfig, Tensors]:
    header = read_header(path)
    architecture = header.metadata.get("general.architecture")
    if architecture not in ("eagle3", "dflash"):
        raise InvalidModel(
            f"{path}: general.architecture is {shown(architecture)}, but GGUF heads are eagle3 or dflash; give the "
            "file of such a head."
        )
    is_eagle = architecture == "eagle3"
    theirs = {_renamed(name, is_eagle): name for name in header.tensors if name not in _LEFT_OUT}
    fields = Fields(path, header.metadata, f"{architecture}.")
    fields.refuse(_NEUTRAL)
    config = _config(header, fields, theirs, target, is_eagle)
    check_config(path, config, target)
    tensors: dict[str, Tensor | Weight] = {
        name: _tensor(header, header.tensors[old], name, config if is_eagle else None)
        for name, old in theirs.items()
        if name != D2T
    }
    if config.kind == "dflash":
        embedding = tensors.get("embed_tokens.weight", target.weight("model.embed_tokens.weight"))
        whole = embedding if isinstance(embedding, Weight) else Weight("f32", embedding)
        tensors["mask_embedding.weight"] = whole.rows(config.mask_token_id, config.mask_token_id + 1).dense()
    if config.confidence != "none":
        tensors.setdefault(_NAMES["conf_proj.bias"], torch.zeros(1))
    tensors |= _vocabulary(header, config, tensors)
    check_tensors(path, config, tensors, lambda name: theirs.get(name) or _original(name, config), REMEDY)
    return config, tensors


def _renamed(name: str, is_eagle: bool) -> str:
    if name == _ENCODER_NORM:
        return "input_norm.weight" if is_eagle else "hidden_norm.weight"
    match = _LAYER.fullmatch(name)
    if match is None:
        return _NAMES.get(name, name)
    prefix = "midlayer" if is_eagle and match[1] == "0" else f"layers.{match[1]}"
    return f"{prefix}.{_NAMES_IN_LAYERS.get(match[2], match[2])}.{match[3]}"


def _original(name: str, config: HeadConfig) -> str:
    """The name that a tensor of ours would have in the file."""
    inner = (f"blk.{index}.{part}" for index in range(config.num_layers) for part in _NAMES_IN_LAYERS)
    known = (*(f"{part}.{kind}" for part in inner for kind in ("weight", "bias")), *_NAMES, _ENCODER_NORM)
    return next((theirs for theirs in known if _renamed(theirs, config.kind == "eagle") == name), name)


def _config(
    header: GGUFHeader, fields: Fields, theirs: dict[str, str], target: Checkpoint, is_eagle: bool
) -> HeadConfig:
    hidden, heads = fields.integer("embedding_length"), fields.integer("attention.head_count")
    head_dim = fields.integer("attention.key_length", hidden // heads)
    if fields.integer("rope.dimension_count", head_dim) != head_dim:
        raise fields.error("rope.dimension_count", f"must be {head_dim}, because whole heads are rotated")
    vocab_size = fields.integer("vocab_size", target.config.vocab_size)
    layers = ModelConfig(
        architecture="head",
        vocab_size=vocab_size,
        hidden_size=hidden,
        intermediate_size=fields.integer("feed_forward_length"),
        num_layers=fields.integer("block_count", most=MAX_LAYERS),
        num_heads=heads,
        num_kv_heads=fields.integer("attention.head_count_kv", heads),
        head_dim=head_dim,
        max_position_embeddings=fields.integer("context_length"),
        rms_norm_eps=fields.number("attention.layer_norm_rms_epsilon", positive=True),
        rope_theta=fields.number("rope.freq_base", 10000.0, positive=True),
    )
    taps = header.metadata.get(fields.key("target_layers"), header.metadata.get(fields.key("extract_layers")))
    if not isinstance(taps, list) or not all(map(is_whole, taps)):
        raise fields.error("target_layers", f"is {shown(taps)}, but a list of whole numbers is needed")
    d2t = header.tensors.get(D2T)
    common = {
        "target_name": "another model",
        "target_digest": "",
        "target_hidden_size": fields.integer("target_hidden_size", target.config.hidden_size),
        "target_vocab_size": vocab_size,
        "taps": tuple(taps),
        "draft_vocab_size": vocab_size if d2t is None else d2t.shape[0],
        "rope_scaling": rope_scaling(header, fields, head_dim // 2),
        "shares_embedding": "embed_tokens.weight" not in theirs,
        "shares_output": "lm_head.weight" not in theirs,
    }
    kind = _eagle(fields, theirs) if is_eagle else _dflash(header, fields, theirs, layers.num_layers)
    return HeadConfig.of_sizes(layers, target.config, **common, **kind)


def _eagle(fields: Fields, theirs: dict[str, str]) -> dict[str, Any]:
    return {
        "kind": "eagle",
        "block": DEFAULT_DEPTH,
        "norm_before_residual": fields.flag("norm_before_residual", False),
        "norm_before_fc": fields.flag("norm_before_fc", False),
        "qk_norm": "midlayer.self_attn.q_norm.weight" in theirs,
    }


def _dflash(header: GGUFHeader, fields: Fields, theirs: dict[str, str], num_layers: int) -> dict[str, Any]:
    has_markov = _MARKOV_W1 in theirs
    if has_markov and fields.key("sample_from_anchor") not in header.metadata:
        raise fields.error("sample_from_anchor", "is missing, and programs differ in what that means")
    from_anchor = fields.flag("sample_from_anchor", False)
    tokens = Fields(header.path, header.metadata, "tokenizer.ggml.")
    mask = next(iter(tokens.token_ids("mask_token_id")), None)
    if mask is None:
        raise tokens.error("mask_token_id", "is missing")
    return {
        "kind": "dflash",
        "block": fields.integer("block_size", most=1024) - (not from_anchor),
        "block_input": "masked",
        "mask_token_id": mask,
        "sample_from_anchor": from_anchor,
        "correction": "markov" if has_markov else "none",
        "confidence": _confidence(header, theirs, fields.integer("embedding_length")),
        "rank": header.tensors["markov_w1.weight"].shape[-1] if has_markov else 0,
        **_attention(header, fields, num_layers),
    }


def _attention(header: GGUFHeader, fields: Fields, num_layers: int) -> dict[str, Any]:
    """Windows count from each row, and rows see each other both ways unless the file says otherwise."""
    is_causal, window = fields.flag("attention.causal", False), fields.integer("attention.sliding_window", 0)
    causal = {"causal_layers": tuple(range(num_layers)) if is_causal else ()}
    if not window:
        return causal
    pattern = header.metadata.get(fields.key("attention.sliding_window_pattern"))
    if not isinstance(pattern, list) or len(pattern) != num_layers or not all(isinstance(one, bool) for one in pattern):
        found = f"is {shown(pattern)}, but true or false for each of {num_layers} layers is needed"
        raise fields.error("attention.sliding_window_pattern", found)
    layers = tuple(layer for layer, slides in enumerate(pattern) if slides)
    if layers and not is_causal:
        raise InvalidModel(f"{header.path}: {OTHER_WINDOWS}")
    return {**causal, "sliding_window": window if layers else 0, "sliding_layers": layers}


def _confidence(header: GGUFHeader, theirs: dict[str, str], hidden: int) -> str:
    """What the confidence output reads, which only its width tells."""
    if _CONFIDENCE not in theirs:
        return "none"
    return "row" if header.tensors[theirs[_CONFIDENCE]].shape[-1] == hidden else "row and code"


def _tensor(header: GGUFHeader, entry: TensorEntry, name: str, interleaved: HeadConfig | None) -> Tensor | Weight:
    """A tensor where the file has floats, else a weight with its codes."""
    supported = blocks.PRECISION if len(entry.shape) == 2 else blocks.FLOATS
    if entry.type not in supported:
        allowed = ", ".join(kind.name for kind in supported)
        raise InvalidModel(
            f"{header.path}: tensor {shown(entry.name)} is {entry.type.name}, but {allowed} are supported; use another "
            "quantisation of this head."
        )
    heads = 0
    if interleaved is not None and name.endswith(("q_proj.weight", "k_proj.weight")):
        heads = interleaved.num_heads if ".q_proj." in name else interleaved.num_kv_heads
        if entry.shape[0] % (2 * heads):
            raise InvalidModel(
                f"{header.path}: tensor {shown(entry.name)} has no whole pairs for {heads} heads; {REMEDY}."
            )
    weight = read_entry(header, entry, slice(None), heads)
    return weight if weight.scales is not None else weight.values.reshape(entry.shape)


def _vocabulary(header: GGUFHeader, config: HeadConfig, tensors: dict[str, Tensor | Weight]) -> dict[str, Tensor]:
    """The draft vocabulary with rising ids; the rows of `tensors` that belong to its tokens are brought into the same
    order."""
    entry, size, total = header.tensors.get(D2T), config.draft_vocab_size, config.target_vocab_size
    ids = np.arange(size)
    if entry is not None:
        kinds = {"I64": "<i8", "I32": "<i4"}
        if entry.type.name not in kinds or len(entry.shape) != 1:
            raise InvalidModel(f"{header.path}: tensor 'd2t' must be a list of I64 or I32; {REMEDY}.")
        ids = np.frombuffer(header.data, kinds[entry.type.name], size, entry.start).astype(np.int64)
    tokens, order = torch.from_numpy(ids).sort()
    if (tokens.diff() <= 0).any() or tokens[0] < 0 or tokens[-1] >= total:
        raise InvalidModel(f"{header.path}: tensor 'd2t' does not hold different ids of {total} tokens; {REMEDY}.")
    if not torch.equal(order, torch.arange(size)):
        for name in _BY_TOKEN:
            match tensors.get(name):
                case Weight() as weight if weight.outputs == size:
                    tensors[name] = weight.chosen(order)
                case Tensor() as tensor if len(tensor) == size:
                    tensors[name] = tensor[order]
    known = torch.zeros(total, dtype=torch.bool)
    known[tokens] = True
    return {D2T: tokens - torch.arange(size), T2D: known}
