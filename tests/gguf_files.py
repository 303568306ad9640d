"""GGUF files for tests: a minimal model made by hand, and transformers models converted as llama.cpp converts them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch

TOKENS = ["<s>", "</s>", "a", "b", "ab", "Ġ"]
TOKENIZER: dict[str, Any] = {
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "gpt-2",
    "tokenizer.ggml.tokens": TOKENS,
    "tokenizer.ggml.token_type": [3, 3, 1, 1, 1, 1],
    "tokenizer.ggml.merges": ["a b"],
    "tokenizer.ggml.bos_token_id": 0,
    "tokenizer.ggml.eos_token_id": 1,
}
HIDDEN, INNER, VOCAB = 256, 256, 8
MINIMAL: dict[str, Any] = {
    "llama.block_count": 1,
    "llama.context_length": 64,
    "llama.embedding_length": HIDDEN,
    "llama.feed_forward_length": INNER,
    "llama.attention.head_count": 4,
    "llama.attention.head_count_kv": 2,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
    **TOKENIZER,
}
_INTERLEAVED = ("llama", "smollm3", "granite")


def minimal_tensors() -> dict[str, np.ndarray]:
    """All tensors of the one-layer, tied model that MINIMAL describes."""
    random = np.random.default_rng(0)
    shapes = {
        "token_embd.weight": (VOCAB, HIDDEN),
        "output_norm.weight": (HIDDEN,),
        "blk.0.attn_norm.weight": (HIDDEN,),
        "blk.0.attn_q.weight": (HIDDEN, HIDDEN),
        "blk.0.attn_k.weight": (HIDDEN // 2, HIDDEN),
        "blk.0.attn_v.weight": (HIDDEN // 2, HIDDEN),
        "blk.0.attn_output.weight": (HIDDEN, HIDDEN),
        "blk.0.ffn_norm.weight": (HIDDEN,),
        "blk.0.ffn_gate.weight": (INNER, HIDDEN),
        "blk.0.ffn_up.weight": (INNER, HIDDEN),
        "blk.0.ffn_down.weight": (HIDDEN, INNER),
    }
    return {name: random.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}


def write_gguf(
    path: Path,
    metadata: dict[str, Any],
    tensors: dict[str, np.ndarray],
    types: dict[str, gguf.GGMLQuantizationType] | None = None,
    architecture: str = "llama",
) -> Path:
    """Write a file; a tensor named in `types` is given as raw bytes [rows, bytes per row] of that type."""
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in metadata.items():
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        else:
            writer.add_array(key, value)
    for name, tensor in tensors.items():
        writer.add_tensor(name, tensor, raw_dtype=(types or {}).get(name))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def convert_to_gguf(model: Any, path: Path, num_tokens: int = 0, fields: Mapping[str, Any] | None = None) -> Path:
    """A transformers model as F32 GGUF, with the names, the order of rows and the metadata that llama.cpp gives it.
    llama.cpp compares the number of tokens with the embedding: with `num_tokens`, the tokenizer has so many.
    `fields` are further ones."""
    config = model.config
    architecture = {"mistral": "llama", "gemma3_text": "gemma3", "qwen3_moe": "qwen3moe", "gpt_oss": "gpt-oss"}.get(
        config.model_type, config.model_type
    )
    names = gguf.get_tensor_name_map(_architecture_id(architecture), config.num_hidden_layers)
    tensors: dict[str, np.ndarray] = {}
    for name, tensor in _state(model):
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        if architecture in _INTERLEAVED and (".q_proj." in name or ".k_proj." in name):
            heads = config.num_attention_heads if ".q_proj." in name else config.num_key_value_heads
            tensor = interleave_halves(tensor, heads)
        if architecture == "gemma3" and tensor.dim() == 1:
            tensor = tensor + 1  # norms multiply by what is stored
        tensors[names.get_name(name, try_suffixes=(".weight", ".bias")) or name] = tensor.numpy()
    metadata = {f"{architecture}.{key}": value for key, value in _metadata(config).items()}
    rope = _rope(config)
    if rope["rope_type"] == "llama3":
        tensors["rope_freqs.weight"] = _llama3_divisors(rope, head_dim(config))
    elif rope["rope_type"] == "longrope":
        tensors["rope_factors_long.weight"] = np.array(rope["long_factor"], np.float32)
        tensors["rope_factors_short.weight"] = np.array(rope["short_factor"], np.float32)
    further = [f"<{token}>" for token in range(len(TOKENS), num_tokens)]
    types = [*TOKENIZER["tokenizer.ggml.token_type"], *[1] * len(further)]
    tokenizer = {
        **TOKENIZER,
        "tokenizer.ggml.tokens": [*TOKENS, *further],
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.add_bos_token": False,
    }
    return write_gguf(path, {**metadata, **tokenizer, **(fields or {})}, tensors, architecture=architecture)


def _state(model: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of a model, those of all its gates and of all its ups apart."""
    is_gpt_oss = model.config.model_type == "gpt_oss"
    for name, tensor in model.state_dict().items():
        if is_gpt_oss and ".mlp.experts." in name:
            rows = tensor if name.endswith("_bias") else tensor.transpose(1, 2)
            kind, stem = "bias" if name.endswith("_bias") else "weight", name.removesuffix("_bias")
            parts = {"gate_up": rows} if "down" in name else {"gate": rows[:, 0::2], "up": rows[:, 1::2]}
            for part, piece in parts.items():
                yield stem.replace("gate_up", part) + f".{kind}", piece.contiguous()
        elif name.endswith(".sinks"):
            yield f"{name}.weight", tensor
        elif name.endswith("mlp.experts.gate_up_proj"):
            for part, piece in zip(("gate", "up"), tensor.chunk(2, dim=1), strict=True):
                yield name.replace("gate_up", part) + ".weight", piece.contiguous()
        else:
            yield (f"{name}.weight" if name.endswith("mlp.experts.down_proj") else name), tensor


def interleave_halves(tensor: torch.Tensor, heads: int) -> torch.Tensor:
    """llama.cpp's row order: within each head, row i of the first half next to row i of the second."""
    halves = tensor.reshape(heads, 2, -1, *tensor.shape[1:])
    return halves.transpose(1, 2).reshape(tensor.shape).contiguous()


def head_dim(config: Any) -> int:
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def _architecture_id(name: str) -> gguf.MODEL_ARCH:
    return next(key for key, value in gguf.MODEL_ARCH_NAMES.items() if value == name)


def _rope(config: Any) -> dict[str, Any]:
    """Of layers that see everything."""
    rope: dict[str, Any] = config.rope_parameters
    return rope.get("full_attention", rope)


def _metadata(config: Any) -> dict[str, Any]:
    rope = _rope(config)
    metadata: dict[str, Any] = {
        "block_count": config.num_hidden_layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.key_length": head_dim(config),
        "attention.value_length": head_dim(config),
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "rope.freq_base": float(rope["rope_theta"]),
        "rope.dimension_count": int(head_dim(config) * rope.get("partial_rotary_factor", 1.0)),
    }
    if config.model_type == "phi3":
        metadata["rope.scaling.original_context_length"] = config.original_max_position_embeddings
        metadata["attention.sliding_window"] = config.sliding_window or 0
    if config.model_type == "gemma3_text":
        metadata["attention.sliding_window"] = config.sliding_window
        metadata["attention.sliding_window_pattern"] = config.layer_types.index("full_attention") + 1
        metadata["rope.freq_base_swa"] = float(config.rope_parameters["sliding_attention"]["rope_theta"])
    if config.model_type == "qwen3_moe":
        metadata["expert_weights_norm"] = config.norm_topk_prob
        metadata["expert_count"] = config.num_experts
        metadata["expert_used_count"] = config.num_experts_per_tok
        metadata["expert_feed_forward_length"] = config.moe_intermediate_size
    if config.model_type == "gpt_oss":
        metadata["attention.sliding_window"] = config.sliding_window
        metadata["expert_count"] = config.num_local_experts
        metadata["expert_used_count"] = config.num_experts_per_tok
        metadata["expert_feed_forward_length"] = config.intermediate_size
    if rope["rope_type"] == "yarn":
        metadata["rope.scaling.type"] = "yarn"
        metadata["rope.scaling.factor"] = rope["factor"]
        metadata["rope.scaling.original_context_length"] = rope["original_max_position_embeddings"]
    if config.model_type == "granite":
        metadata["attention.scale"] = config.attention_multiplier
        metadata["embedding_scale"] = config.embedding_multiplier
        metadata["residual_scale"] = config.residual_multiplier
        metadata["logit_scale"] = config.logits_scaling
    if rope["rope_type"] == "linear":
        metadata["rope.scaling.type"] = "linear"
        metadata["rope.scaling.factor"] = rope["factor"]
    return metadata


def _llama3_divisors(rope: dict[str, Any], dim: int) -> np.ndarray:
    """What llama.cpp's converter writes into rope_freqs."""
    original, low, high = rope["original_max_position_embeddings"], rope["low_freq_factor"], rope["high_freq_factor"]
    divisors = []
    for index in range(0, dim, 2):
        wavelength = 2 * np.pi * rope["rope_theta"] ** (index / dim)
        if wavelength < original / high:
            divisors.append(1.0)
        elif wavelength > original / low:
            divisors.append(rope["factor"])
        else:
            smooth = (original / wavelength - low) / (high - low)
            divisors.append(1 / ((1 - smooth) / rope["factor"] + smooth))
    return np.array(divisors, np.float32)
