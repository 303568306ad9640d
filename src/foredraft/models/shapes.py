"""Which tensors a decoder of the Llama family has, under their Hugging Face names, and the shape of each."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from foredraft.config import ModelConfig
from foredraft.errors import InvalidModel
from foredraft.models.fields import shown

_ALL_EXPERTS = re.compile(r"\.mlp\.experts\.(gate_proj|up_proj|down_proj)\.")


def required_shapes(config: ModelConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Every tensor that the model cannot do without, one by one: a configuration may claim layers that no file has."""
    hidden = config.hidden_size
    queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    yield "model.embed_tokens.weight", (config.vocab_size, hidden)
    yield "model.norm.weight", (hidden,)
    if not config.tie_word_embeddings:
        yield "lm_head.weight", (config.vocab_size, hidden)
    of_layer: dict[str, tuple[int, ...]] = {
        "input_layernorm": (hidden,),
        "self_attn.q_proj": (queries, hidden),
        "self_attn.k_proj": (keys, hidden),
        "self_attn.v_proj": (keys, hidden),
        "self_attn.o_proj": (hidden, queries),
        "post_attention_layernorm": (hidden,),
    }
    if config.qk_norm:
        of_layer |= {"self_attn.q_norm": (config.head_dim,), "self_attn.k_norm": (config.head_dim,)}
    if config.attention_sinks:
        of_layer["self_attn.sinks"] = (config.num_heads,)
    if config.update_norms:
        of_layer |= {"self_attn.update_norm": (hidden,), "mlp.update_norm": (hidden,)}
    for index in range(config.num_layers):
        for module, shape in (*of_layer.items(), *_mlp_shapes(config, index)):
            yield f"model.layers.{index}.{module}.weight", shape


def _mlp_shapes(config: ModelConfig, layer: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    mlps, inner = ["mlp"], config.intermediate_size
    if config.experts is not None and config.has_experts(layer):
        yield "mlp.router", (config.experts.count, config.hidden_size)
        mlps, inner = (
            [f"mlp.experts.{index}" for index in range(config.experts.count)],
            config.experts.intermediate_size,
        )
    for mlp in mlps:
        yield f"{mlp}.gate_proj", (inner, config.hidden_size)
        yield f"{mlp}.up_proj", (inner, config.hidden_size)
        yield f"{mlp}.down_proj", (config.hidden_size, inner)


def optional_shapes(config: ModelConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Biases, whose presence in the file decides, and an output head that a tied model repeats."""
    yield "lm_head.weight", (config.vocab_size, config.hidden_size)
    for name, shape in required_shapes(config):
        if name.endswith(("_proj.weight", ".router.weight")):
            yield name.removesuffix("weight") + "bias", shape[:1]


def fused_parts(path: Path, config: ModelConfig, name: str, num_rows: int) -> list[tuple[str, int]]:
    """The tensors that a stored tensor holds, one below the other, and their rows: itself, unless fused (Phi-3), or
    that of all experts of a layer."""
    experts = config.experts
    if experts is not None and (match := _ALL_EXPERTS.search(name)):
        rows = config.hidden_size if match[1] == "down_proj" else experts.intermediate_size
        if num_rows != experts.count * rows:
            raise InvalidModel(
                f"{path}: tensor {shown(name)} has {num_rows} rows for all experts, but the model's configuration asks "
                f"for {experts.count} experts with {rows} rows each; download or convert the model again."
            )
        return [(name.replace(".experts.", f".experts.{index}."), rows) for index in range(experts.count)]
    queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    fused = {
        "qkv_proj": {"q_proj": queries, "k_proj": keys, "v_proj": keys},
        "gate_up_proj": {"gate_proj": config.intermediate_size, "up_proj": config.intermediate_size},
    }
    for whole, parts in fused.items():
        if f".{whole}." in name:
            if sum(parts.values()) != num_rows:
                raise InvalidModel(
                    f"{path}: tensor {shown(name)} has {num_rows} rows, but the model's configuration asks for "
                    f"{sum(parts.values())}; download or convert the model again."
                )
            return [(name.replace(whole, part), rows) for part, rows in parts.items()]
    return [(name, num_rows)]


def check_config(path: Path, config: ModelConfig) -> None:
    """Raise InvalidModel unless the numbers of a configuration, each possible by itself, fit each other."""
    if config.num_heads % config.num_kv_heads:
        problem = f"{config.num_heads} attention heads are not a multiple of {config.num_kv_heads} key-value heads"
    elif config.head_dim < 2 or config.head_dim % 2 or config.rotary_dim % 2 or config.rotary_dim > config.head_dim:
        problem = (
            f"{config.rotary_dim} of an attention head's {config.head_dim} dimensions rotate, but both must be even, "
            "and at most all can rotate"
        )
    elif config.experts is not None and config.experts.num_chosen > config.experts.count:
        problem = f"{config.experts.num_chosen} experts of a token are to be chosen of {config.experts.count}"
    else:
        return
    raise InvalidModel(f"{path}: {problem}; download or convert the model again.")


def check_shapes(path: Path, config: ModelConfig, found: Mapping[str, tuple[int, ...]]) -> None:
    """Raise InvalidModel unless `found` is exactly what `config` describes: nothing missing, unknown or misshapen."""
    for name, _ in required_shapes(config):  # up to the first that is missing
        if name not in found:
            raise InvalidModel(
                f"{path}: tensor {name!r} is missing, but a {config.architecture} model with {config.num_layers} "
                "layers needs it; download or convert the model again."
            )
    expected = dict((*optional_shapes(config), *required_shapes(config)))
    for name, shape in found.items():
        if name not in expected:
            raise InvalidModel(
                f"{path}: tensor {shown(name)} is not part of a {config.architecture} model with {config.num_layers} "
                "layers as Foredraft knows it, so its text would be wrong; use another model."
            )
        if tuple(shape) != expected[name]:
            raise InvalidModel(
                f"{path}: tensor {name!r} has shape {list(shape)}, but the model's configuration asks for "
                f"{list(expected[name])}; download or convert the model again."
            )
