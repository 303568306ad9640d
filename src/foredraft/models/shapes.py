"""Which tensors a decoder of the Llama family has, under their Hugging Face names, and the shape of each."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from foredraft.config import ModelConfig
from foredraft.errors import InvalidModel

Shapes = dict[str, tuple[int, ...]]


def required_shapes(config: ModelConfig) -> Shapes:
    """Every tensor that the model cannot do without."""
    hidden, inner = config.hidden_size, config.intermediate_size
    queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    shapes: Shapes = {"model.embed_tokens.weight": (config.vocab_size, hidden), "model.norm.weight": (hidden,)}
    if not config.tie_word_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, hidden)
    for index in range(config.num_layers):
        layer = f"model.layers.{index}."
        shapes[layer + "input_layernorm.weight"] = (hidden,)
        shapes[layer + "self_attn.q_proj.weight"] = (queries, hidden)
        shapes[layer + "self_attn.k_proj.weight"] = (keys, hidden)
        shapes[layer + "self_attn.v_proj.weight"] = (keys, hidden)
        shapes[layer + "self_attn.o_proj.weight"] = (hidden, queries)
        shapes[layer + "post_attention_layernorm.weight"] = (hidden,)
        shapes[layer + "mlp.gate_proj.weight"] = (inner, hidden)
        shapes[layer + "mlp.up_proj.weight"] = (inner, hidden)
        shapes[layer + "mlp.down_proj.weight"] = (hidden, inner)
        if config.qk_norm:
            shapes[layer + "self_attn.q_norm.weight"] = (config.head_dim,)
            shapes[layer + "self_attn.k_norm.weight"] = (config.head_dim,)
    return shapes


def optional_shapes(config: ModelConfig) -> Shapes:
    """Biases, whose presence in the file decides, and an output head that a tied model repeats."""
    shapes: Shapes = {"lm_head.weight": (config.vocab_size, config.hidden_size)}
    for name, shape in required_shapes(config).items():
        if name.endswith("_proj.weight"):
            shapes[name.removesuffix("weight") + "bias"] = shape[:1]
    return shapes


def fused_parts(path: Path, config: ModelConfig, name: str, num_rows: int) -> list[tuple[str, int]]:
    """The tensors that a stored tensor holds, one below the other, and their rows: itself, unless fused (Phi-3)."""
    queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    fused = {
        "qkv_proj": {"q_proj": queries, "k_proj": keys, "v_proj": keys},
        "gate_up_proj": {"gate_proj": config.intermediate_size, "up_proj": config.intermediate_size},
    }
    for whole, parts in fused.items():
        if f".{whole}." in name:
            if sum(parts.values()) != num_rows:
                raise InvalidModel(
                    f"{path}: tensor {name!r} has {num_rows} rows, but the model's configuration asks for "
                    f"{sum(parts.values())}; download or convert the model again."
                )
            return [(name.replace(whole, part), rows) for part, rows in parts.items()]
    return [(name, num_rows)]


def check_shapes(path: Path, config: ModelConfig, found: Mapping[str, tuple[int, ...]]) -> None:
    """Raise InvalidModel unless `found` is exactly what `config` describes: nothing missing, unknown or misshapen."""
    required = required_shapes(config)
    expected = {**optional_shapes(config), **required}
    missing = sorted(required.keys() - found.keys())
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise InvalidModel(
            f"{path}: tensor {missing[0]!r}{more} is missing, but a {config.architecture} model with "
            f"{config.num_layers} layers needs it; download or convert the model again."
        )
    for name, shape in found.items():
        if name not in expected:
            raise InvalidModel(
                f"{path}: tensor {name!r} is not part of a {config.architecture} model with {config.num_layers} layers "
                "as Foredraft knows it, so its text would be wrong; use another model."
            )
        if tuple(shape) != expected[name]:
            raise InvalidModel(
                f"{path}: tensor {name!r} has shape {list(shape)}, but the model's configuration asks for "
                f"{list(expected[name])}; download or convert the model again."
            )
