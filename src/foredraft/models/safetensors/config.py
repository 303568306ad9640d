"""A Hugging Face config.json as a ModelConfig, with the defaults that transformers gives to fields left out."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

from foredraft.config import ExpertsConfig, ModelConfig, RopeScaling
from foredraft.errors import InvalidModel
from foredraft.models.architectures import MODEL_TYPES, Architecture, ExpertFields
from foredraft.models.fields import MAX_LAYERS, Fields, is_whole, not_run, shown

# Fields that change what a model computes, unless its architecture reads them, and the values under which they change
# nothing.
_NEUTRAL: dict[str, object] = {
    **dict.fromkeys(("attn_logit_softcapping", "final_logit_softcapping", "swiglu_limit", "swiglu_alpha", "clip_qkv")),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")),
    **dict.fromkeys(("n_shared_experts", "num_shared_experts", "shared_expert_intermediate_size")),
    **dict.fromkeys(("attention_chunk_size", "kv_lora_rank", "q_lora_rank")),
    **dict.fromkeys(
        ("use_bidirectional_attention", "use_qk_norm", "qk_layernorm", "alibi", "parallel_attn", "rope_interleaved"),
        False,
    ),
    **dict.fromkeys(("embedding_multiplier", "attention_multiplier", "residual_multiplier", "logits_scaling"), 1.0),
}
_ACTIVATION_FIELDS = {"gelu_tanh": ("hidden_activation", ("gelu_pytorch_tanh",))}  # and its values
_ACTIVATION_FIELD = ("hidden_act", ("silu", "swish"))  # of the others
_CLAMPED = {"swiglu_limit": 7.0, "swiglu_alpha": 1.702}  # what the kernels have
_SLIDING, _FULL = "sliding_attention", "full_attention"


def config_from_json(path: Path, raw: dict[str, Any]) -> ModelConfig:
    """The model that `raw`, the content of `path`, describes; raises InvalidModel naming the field that is at fault."""
    fields = Fields(path, raw)
    name = raw.get("model_type")
    if not isinstance(name, str) or name not in MODEL_TYPES:
        raise not_run(path, "model_type", name, list(MODEL_TYPES))
    architecture = MODEL_TYPES[name]
    fields.refuse(_NEUTRAL, architecture.reads)
    quantisation = raw.get("quantization_config")
    method = quantisation.get("quant_method") if isinstance(quantisation, dict) else None
    if quantisation and method not in architecture.quantisations:
        raise InvalidModel(
            f"{path}: quantization_config is set, but quantised safetensors are not supported; "
            "use the unquantised model with dtype='int4' or 'int8', or a GGUF file."
        )
    activation = _activation(architecture, fields)

    hidden_size = fields.integer("hidden_size")
    num_layers = fields.integer("num_hidden_layers", most=MAX_LAYERS)
    num_heads = fields.integer("num_attention_heads")
    head_dim = fields.integer("head_dim", architecture.head_dim or hidden_size // num_heads)
    no_rope_layers = _no_rope_layers(architecture, raw, fields, num_layers)
    sliding_window, sliding_layers = _sliding(architecture, raw, fields, num_layers, no_rope_layers)
    window_rope_theta = None
    if architecture.window_rope_theta is not None:
        raw, window_rope_theta = _ropes_by_layer_type(path, architecture, raw)
    rope_theta, rope_dim, rope_scaling = _rope(path, architecture, raw, head_dim)
    max_positions = fields.integer("max_position_embeddings")
    multipliers = _multipliers(architecture, fields, hidden_size)
    return ModelConfig(
        architecture=name,
        vocab_size=fields.integer("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=fields.integer("intermediate_size"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=fields.integer("num_key_value_heads", num_heads),
        head_dim=head_dim,
        max_position_embeddings=max_positions if rope_scaling is None else rope_scaling.reach(max_positions),
        rms_norm_eps=fields.number("rms_norm_eps", architecture.norm_eps, positive=True),
        rope_theta=rope_theta,
        rope_dim=0 if rope_dim == head_dim else rope_dim,
        rope_scaling=rope_scaling,
        no_rope_layers=no_rope_layers,
        qk_norm=architecture.qk_norm,
        experts=None if architecture.experts is None else _experts(architecture.experts, raw, fields, num_layers),
        attention_sinks=architecture.attention_sinks,
        sliding_window=sliding_window,
        sliding_layers=sliding_layers,
        window_rope_theta=window_rope_theta,
        activation=activation,
        update_norms=architecture.update_norms,
        tie_word_embeddings=fields.flag("tie_word_embeddings", architecture.ties_embeddings),
        **multipliers,
        num_mtp_layers=_num_mtp_layers(fields),
        bos_token_id=next(iter(fields.token_ids("bos_token_id")), None),
        eos_token_ids=fields.token_ids("eos_token_id"),
    )


def _num_mtp_layers(fields: Fields) -> int:
    """As DeepSeek's relatives name it, or Qwen's."""
    named = (fields.integer(name, 0, MAX_LAYERS) for name in ("num_nextn_predict_layers", "mtp_num_hidden_layers"))
    return max(named)


def _activation(architecture: Architecture, fields: Fields) -> str:
    """One of backends.layers.ACTIVATIONS."""
    name, allowed = _ACTIVATION_FIELDS.get(architecture.activation, _ACTIVATION_FIELD)
    found = fields.text(name, allowed[0])
    if found not in allowed:
        raise fields.error(name, f"is {shown(found)}, but only {allowed[0]} is supported")
    for constant, value in _CLAMPED.items() if architecture.activation == "clamped" else ():
        if fields.number(constant, value) != value:
            raise fields.error(constant, f"is {fields.number(constant)}, but only {value} is supported")
    return architecture.activation


def _experts(theirs: ExpertFields, raw: dict[str, Any], fields: Fields, num_layers: int) -> ExpertsConfig:
    """transformers 5 names their number as all its mixtures of experts do."""
    experts = ExpertsConfig(
        count=fields.integer("num_local_experts" if "num_local_experts" in raw else theirs.count),
        num_chosen=fields.integer("num_experts_per_tok", theirs.num_chosen),
        intermediate_size=fields.integer(theirs.intermediate_size, theirs.default_size),
        normalised=True,
    )
    if theirs.is_fixed:
        return experts
    dense, step = raw.get("mlp_only_layers") or [], fields.integer("decoder_sparse_step", 1)
    if not isinstance(dense, list) or not all(is_whole(layer) and 0 <= layer < num_layers for layer in dense):
        raise fields.error(
            "mlp_only_layers", f"is {shown(dense)}, but a list of layers from 0 to {num_layers - 1} is needed"
        )
    return replace(
        experts,
        normalised=fields.flag("norm_topk_prob", False),
        dense_layers=tuple(layer for layer in range(num_layers) if layer in dense or (layer + 1) % step),
    )


def _multipliers(architecture: Architecture, fields: Fields, hidden_size: int) -> dict[str, Any]:
    """Those fields of a ModelConfig in which Granite and Gemma differ from all others."""
    if architecture.has_multipliers:
        return {
            "embedding_multiplier": fields.number("embedding_multiplier", 1.0),
            "attention_multiplier": fields.number("attention_multiplier", 1.0),
            "residual_multiplier": fields.number("residual_multiplier", 1.0),
            "logits_divisor": fields.number("logits_scaling", 1.0, positive=True),
        }
    if architecture.scales_by_width:
        scalar = fields.number("query_pre_attn_scalar", 256.0, positive=True)
        return {"embedding_multiplier": hidden_size**0.5, "attention_multiplier": scalar**-0.5}
    return {}


def _no_rope_layers(
    architecture: Architecture, raw: dict[str, Any], fields: Fields, num_layers: int
) -> tuple[int, ...]:
    """`no_rope_layers` of the file is, against its name, 1 for each layer that has rope."""
    if not architecture.no_rope_interval:
        return ()
    has_rope = raw.get("no_rope_layers")
    if has_rope is None:
        interval = fields.integer("no_rope_layer_interval", architecture.no_rope_interval)
        return tuple(range(interval - 1, num_layers, interval))
    if not isinstance(has_rope, list) or len(has_rope) < num_layers:
        raise fields.error("no_rope_layers", f"must be a list with an entry for each of the {num_layers} layers")
    return tuple(layer for layer in range(num_layers) if not has_rope[layer])


def _sliding(
    architecture: Architecture, raw: dict[str, Any], fields: Fields, num_layers: int, no_rope_layers: tuple[int, ...]
) -> tuple[int | None, tuple[int, ...] | None]:
    """The window and the layers that have it (None: all)."""
    if architecture.windowed == "none":
        return None, None
    if architecture.windowed == "pattern":
        window = fields.integer("sliding_window", architecture.window)
        return window, _windowed_layers(raw, fields, num_layers, architecture.full_interval)
    if architecture.window_is_off and not fields.flag("use_sliding_window", False):
        return None, None
    if raw.get("sliding_window", architecture.window) is None:  # an explicit null means no window
        return None, None
    layers = None
    if architecture.windowed == "some":
        types = raw.get("layer_types")
        if types is not None and not isinstance(types, list):
            raise fields.error("layer_types", f"is {shown(types)}, but a list is needed")
        if types is not None:
            layers = tuple(layer for layer in range(num_layers) if types[layer : layer + 1] == [_SLIDING])
        elif architecture.no_rope_interval:
            layers = no_rope_layers
        else:
            layers = tuple(range(fields.integer("max_window_layers", 28), num_layers))
    return fields.integer("sliding_window", architecture.window), layers


def _windowed_layers(raw: dict[str, Any], fields: Fields, num_layers: int, interval: int) -> tuple[int, ...]:
    """By the type of every layer, or by a pattern: the last of `interval` layers sees everything."""
    types = raw.get("layer_types")
    if types is None:
        interval = fields.integer("sliding_window_pattern", interval)
        types = [_SLIDING if (layer + 1) % interval else _FULL for layer in range(num_layers)]
    if not isinstance(types, list) or len(types) != num_layers or not all(kind in (_SLIDING, _FULL) for kind in types):
        raise fields.error("layer_types", f"must be a list with {_SLIDING} or {_FULL} for each of {num_layers} layers")
    return tuple(layer for layer, kind in enumerate(types) if kind == _SLIDING)


def _ropes_by_layer_type(path: Path, architecture: Architecture, raw: dict[str, Any]) -> tuple[dict[str, Any], float]:
    """`raw` with the rope of layers that see everything as that of all layers, and the theta of those with a
    window, whose rope is never stretched."""
    ropes = raw.get("rope_parameters") or {}
    if not isinstance(ropes, dict) or not all(isinstance(ropes.get(kind, {}), dict) for kind in (_SLIDING, _FULL)):
        raise InvalidModel(f"{path}: field rope_parameters must be an object; download or convert the model again.")
    full = {"rope_theta": architecture.rope_theta, **ropes.get(_FULL, {})}
    window = {"rope_theta": raw.get("rope_local_base_freq", architecture.window_rope_theta), **ropes.get(_SLIDING, {})}
    fields = Fields(path, window)
    if fields.text("rope_type", "default") != "default":
        raise fields.error("rope_type", f"is {shown(window['rope_type'])}, but layers with a window have the default")
    if not ropes:  # transformers 4
        full = {"rope_theta": raw.get("rope_theta", architecture.rope_theta), **(raw.get("rope_scaling") or {})}
    return {**raw, "rope_parameters": full, "rope_scaling": None}, fields.number("rope_theta", positive=True)


def _rope(
    path: Path, architecture: Architecture, raw: dict[str, Any], head_dim: int
) -> tuple[float, int, RopeScaling | None]:
    """Theta, the dimensions that rotate, and the scaling: of `rope_parameters` (transformers 5), or of `rope_scaling`
    with fields beside it (before)."""
    values = raw.get("rope_scaling") or raw.get("rope_parameters") or architecture.rope
    if not isinstance(values, dict) or any(isinstance(value, dict) for value in values.values()):
        raise InvalidModel(f"{path}: rope_parameters per layer type are not supported; use a model with one set.")
    values = {**{key: raw[key] for key in ("rope_theta", "partial_rotary_factor") if key in raw}, **values}
    # Phi-3 keeps the trained length outside, and there it takes precedence.
    if raw.get("original_max_position_embeddings") is not None:
        values = {**values, "original_max_position_embeddings": raw["original_max_position_embeddings"]}
    fields = Fields(path, values)
    theta = fields.number("rope_theta", architecture.rope_theta, positive=True)
    fraction = fields.number("partial_rotary_factor", 1.0)
    if fraction != 1.0 and not architecture.rotates_partly:
        raise fields.error("partial_rotary_factor", f"is {fraction}, but only phi3 models may set it")
    if not 0 < fraction <= 1:
        raise fields.error("partial_rotary_factor", f"is {fraction}, but a number above 0 up to 1 is needed")
    dim = int(head_dim * fraction)
    kind = fields.text("rope_type", fields.text("type", "default"))
    kind = architecture.rope_types.get(kind, kind)
    if kind == "yarn" and theta <= 1:
        raise fields.error("rope_theta", f"is {theta}, but yarn needs more than 1")
    return theta, dim, _rope_scaling(kind, fields, dim, Fields(path, raw).integer("max_position_embeddings"))


def _rope_scaling(kind: str, fields: Fields, dim: int, max_positions: int) -> RopeScaling | None:
    original = fields.integer("original_max_position_embeddings", max_positions)
    if kind == "default":
        return None
    if kind == "linear":
        factor = fields.number("factor", positive=True)
        return RopeScaling("linear", factor, original_max_position_embeddings=original)
    if kind == "llama3":
        low, high = fields.number("low_freq_factor", positive=True), fields.number("high_freq_factor")
        if high <= low:
            raise fields.error("high_freq_factor", f"is {high}, but more than low_freq_factor ({low}) is needed")
        factor = fields.number("factor", positive=True)
        return RopeScaling("llama3", factor, low, high, original_max_position_embeddings=original)
    if kind == "longrope":
        if original == 1:
            raise fields.error("original_max_position_embeddings", "is 1, but longrope needs at least 2")
        factor = fields.number("factor", max_positions / original, positive=True)
        stretch = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
        return RopeScaling(
            "longrope",
            factor=factor,
            original_max_position_embeddings=original,
            short_factor=fields.factors("short_factor", dim // 2),
            long_factor=fields.factors("long_factor", dim // 2),
            attention_factor=fields.number("attention_factor", stretch, positive=True),
        )
    if kind == "yarn":
        return _yarn(fields, original)
    raise fields.error("rope_type", f"is {shown(kind)}, but default, linear, llama3, yarn and longrope are supported")


def _yarn(fields: Fields, original: int) -> RopeScaling:
    factor, fast, slow = (
        fields.number(name, default, positive=True)
        for name, default in (("factor", None), ("beta_fast", 32.0), ("beta_slow", 1.0))
    )
    scale, scale_of_all = fields.number("mscale", 0.0), fields.number("mscale_all_dim", 0.0)

    def magnitude(scale: float) -> float:
        return 0.1 * scale * math.log(factor) + 1 if factor > 1 else 1.0

    own = magnitude(scale) / magnitude(scale_of_all) if scale and scale_of_all else magnitude(1.0)
    return RopeScaling(
        "yarn",
        factor,
        beta_fast=fast,
        beta_slow=slow,
        original_max_position_embeddings=original,
        attention_factor=fields.number("attention_factor", own, positive=True),
        truncate=fields.flag("truncate", True),
    )
