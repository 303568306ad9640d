"""A Hugging Face config.json as a ModelConfig, with the defaults that transformers gives to fields left out."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from foredraft.config import ExpertsConfig, ModelConfig, RopeScaling
from foredraft.errors import InvalidModel
from foredraft.models.fields import MAX_LAYERS, Fields, is_whole, not_run, shown

# MiMo is Qwen2 with layers for multi-token prediction beside it.
ARCHITECTURES = (
    "llama",
    "mistral",
    "qwen2",
    "qwen3",
    "qwen3_moe",
    "mimo",
    "smollm3",
    "phi3",
    "granite",
    "gemma3_text",
    "gpt_oss",
)
_HEAD_DIMS = {"qwen3": 128, "gemma3_text": 256, "gpt_oss": 64}  # where they do not follow from the hidden size
_THETAS = {"smollm3": 2e6, "gpt_oss": 1.5e5}  # of rotations; others have 1e4
_WINDOW_PATTERNS = {"gemma3_text": (4096, 6), "gpt_oss": (128, 2)}  # the window, and how often a layer has none
# Fields that change what a model computes, and the values under which they change nothing; and who reads some of them.
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
_READ = {
    "granite": ("embedding_multiplier", "attention_multiplier", "residual_multiplier", "logits_scaling"),
    "qwen3_moe": ("num_experts", "num_local_experts"),
    "gpt_oss": ("num_local_experts", "num_experts", "swiglu_limit", "swiglu_alpha"),
}
_GPT_OSS_ROPE = {"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096, "truncate": False}
_SLIDING, _FULL = "sliding_attention", "full_attention"


def config_from_json(path: Path, raw: dict[str, Any]) -> ModelConfig:
    """The model that `raw`, the content of `path`, describes; raises InvalidModel naming the field that is at fault."""
    fields = Fields(path, raw)
    architecture = raw.get("model_type")
    if architecture not in ARCHITECTURES:
        raise not_run(path, "model_type", architecture, ARCHITECTURES)
    fields.refuse(_NEUTRAL, _READ.get(architecture, ()))
    quantization = raw.get("quantization_config")
    is_mxfp4 = isinstance(quantization, dict) and quantization.get("quant_method") == "mxfp4"
    if quantization and not (architecture == "gpt_oss" and is_mxfp4):
        raise InvalidModel(
            f"{path}: quantization_config is set, but quantised safetensors are not supported; "
            "use the unquantised model with dtype='int4' or 'int8', or a GGUF file."
        )
    is_gemma, is_gpt_oss = architecture == "gemma3_text", architecture == "gpt_oss"
    activation = _activation(fields, architecture)

    hidden_size = fields.integer("hidden_size")
    num_layers = fields.integer("num_hidden_layers", most=MAX_LAYERS)
    num_heads = fields.integer("num_attention_heads")
    head_dim = fields.integer("head_dim", _HEAD_DIMS.get(architecture, hidden_size // num_heads))
    no_rope_layers = _no_rope_layers(raw, fields, num_layers) if architecture == "smollm3" else ()
    sliding_window, sliding_layers = _sliding(architecture, raw, fields, num_layers, no_rope_layers)
    window_rope_theta = None
    if is_gemma:
        raw, window_rope_theta = _ropes_by_layer_type(path, raw)
    rope_theta, rope_dim, rope_scaling = _rope(path, architecture, raw, head_dim)
    multipliers = _multipliers(architecture, fields, hidden_size)
    return ModelConfig(
        architecture=architecture,
        vocab_size=fields.integer("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=fields.integer("intermediate_size"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=fields.integer("num_key_value_heads", num_heads),
        head_dim=head_dim,
        max_position_embeddings=fields.integer("max_position_embeddings"),
        rms_norm_eps=fields.number(
            "rms_norm_eps", 1e-5 if architecture in ("phi3", "gpt_oss") else 1e-6, positive=True
        ),
        rope_theta=rope_theta,
        rope_dim=0 if rope_dim == head_dim else rope_dim,
        rope_scaling=rope_scaling,
        no_rope_layers=no_rope_layers,
        qk_norm=architecture in ("qwen3", "qwen3_moe", "gemma3_text"),
        experts=_experts(raw, fields, num_layers) if architecture in ("qwen3_moe", "gpt_oss") else None,
        attention_sinks=is_gpt_oss,
        sliding_window=sliding_window,
        sliding_layers=sliding_layers,
        window_rope_theta=window_rope_theta,
        activation=activation,
        update_norms=is_gemma,
        tie_word_embeddings=fields.flag("tie_word_embeddings", architecture in ("smollm3", "gemma3_text")),
        **multipliers,
        num_mtp_layers=_num_mtp_layers(fields),
        bos_token_id=next(iter(fields.token_ids("bos_token_id")), None),
        eos_token_ids=fields.token_ids("eos_token_id"),
    )


def _num_mtp_layers(fields: Fields) -> int:
    """As DeepSeek's relatives name it, or Qwen's."""
    named = (fields.integer(name, 0, MAX_LAYERS) for name in ("num_nextn_predict_layers", "mtp_num_hidden_layers"))
    return max(named)


def _activation(fields: Fields, architecture: str) -> str:
    """One of backends.layers.ACTIVATIONS."""
    is_gemma = architecture == "gemma3_text"
    name, allowed = ("hidden_activation", ("gelu_pytorch_tanh",)) if is_gemma else ("hidden_act", ("silu", "swish"))
    found = fields.text(name, allowed[0])
    if found not in allowed:
        raise fields.error(name, f"is {shown(found)}, but only {allowed[0]} is supported")
    if architecture != "gpt_oss":
        return "gelu_tanh" if is_gemma else "silu"
    for constant, value in (("swiglu_limit", 7.0), ("swiglu_alpha", 1.702)):
        if fields.number(constant, value) != value:
            raise fields.error(constant, f"is {fields.number(constant)}, but only {value} is supported")
    return "clamped"


def _experts(raw: dict[str, Any], fields: Fields, num_layers: int) -> ExpertsConfig:
    """transformers 5 names their number as all its mixtures of experts do."""
    if raw["model_type"] == "gpt_oss":
        chosen = fields.integer("num_experts_per_tok", 4)
        return ExpertsConfig(fields.integer("num_local_experts"), chosen, fields.integer("intermediate_size"), True)
    dense, step = raw.get("mlp_only_layers") or [], fields.integer("decoder_sparse_step", 1)
    if not isinstance(dense, list) or not all(is_whole(layer) and 0 <= layer < num_layers for layer in dense):
        raise fields.error("mlp_only_layers", f"is {shown(dense)}, but a list of layers from 0 to {num_layers - 1}")
    return ExpertsConfig(
        count=fields.integer("num_local_experts" if "num_local_experts" in raw else "num_experts"),
        num_chosen=fields.integer("num_experts_per_tok", 8),
        intermediate_size=fields.integer("moe_intermediate_size", 768),
        normalised=fields.flag("norm_topk_prob", False),
        dense_layers=tuple(layer for layer in range(num_layers) if layer in dense or (layer + 1) % step),
    )


def _multipliers(architecture: str, fields: Fields, hidden_size: int) -> dict[str, Any]:
    """Those fields of a ModelConfig in which Granite and Gemma differ from all others."""
    if architecture == "granite":
        return {
            "embedding_multiplier": fields.number("embedding_multiplier", 1.0),
            "attention_multiplier": fields.number("attention_multiplier", 1.0),
            "residual_multiplier": fields.number("residual_multiplier", 1.0),
            "logits_divisor": fields.number("logits_scaling", 1.0, positive=True),
        }
    if architecture == "gemma3_text":
        scalar = fields.number("query_pre_attn_scalar", 256.0, positive=True)
        return {"embedding_multiplier": hidden_size**0.5, "attention_multiplier": scalar**-0.5}
    return {}


def _no_rope_layers(raw: dict[str, Any], fields: Fields, num_layers: int) -> tuple[int, ...]:
    """`no_rope_layers` of the file is, against its name, 1 for each layer that has rope."""
    has_rope = raw.get("no_rope_layers")
    if has_rope is None:
        interval = fields.integer("no_rope_layer_interval", 4)
        return tuple(range(interval - 1, num_layers, interval))
    if not isinstance(has_rope, list) or len(has_rope) < num_layers:
        raise fields.error("no_rope_layers", f"must be a list with an entry for each of the {num_layers} layers")
    return tuple(layer for layer in range(num_layers) if not has_rope[layer])


def _sliding(
    architecture: str, raw: dict[str, Any], fields: Fields, num_layers: int, no_rope_layers: tuple[int, ...]
) -> tuple[int | None, tuple[int, ...] | None]:
    """The window and the layers that have it (None: all)."""
    if architecture in ("llama", "granite"):
        return None, None
    if architecture in _WINDOW_PATTERNS:
        default, interval = _WINDOW_PATTERNS[architecture]
        return fields.integer("sliding_window", default), _windowed_layers(raw, fields, num_layers, interval)
    if architecture in ("mistral", "phi3"):
        usual = 4096 if architecture == "mistral" else None  # explicit null means no window
        window = raw.get("sliding_window", usual)
        return (None if window is None else fields.integer("sliding_window", usual)), None
    if not fields.flag("use_sliding_window", False) or raw.get("sliding_window", 4096) is None:
        return None, None
    if architecture == "qwen3_moe":
        return fields.integer("sliding_window", 4096), None
    if raw.get("layer_types") is not None:
        types = raw["layer_types"]
        if not isinstance(types, list):
            raise fields.error("layer_types", f"is {shown(types)}, but a list is needed")
        layers = tuple(layer for layer in range(num_layers) if types[layer : layer + 1] == ["sliding_attention"])
    elif architecture == "smollm3":
        layers = no_rope_layers
    else:
        layers = tuple(range(fields.integer("max_window_layers", 28), num_layers))
    return fields.integer("sliding_window", 4096), layers


def _windowed_layers(raw: dict[str, Any], fields: Fields, num_layers: int, interval: int) -> tuple[int, ...]:
    """By the type of every layer, or by a pattern: the last of `interval` layers sees everything."""
    types = raw.get("layer_types")
    if types is None:
        interval = fields.integer("sliding_window_pattern", interval)
        types = [_SLIDING if (layer + 1) % interval else _FULL for layer in range(num_layers)]
    if not isinstance(types, list) or len(types) != num_layers or not all(kind in (_SLIDING, _FULL) for kind in types):
        raise fields.error("layer_types", f"must be a list with {_SLIDING} or {_FULL} for each of {num_layers} layers")
    return tuple(layer for layer, kind in enumerate(types) if kind == _SLIDING)


def _ropes_by_layer_type(path: Path, raw: dict[str, Any]) -> tuple[dict[str, Any], float]:
    """Gemma 3: `raw` with the rope of layers that see everything as that of all layers, and the theta of those with a
    window, whose rope is never stretched."""
    ropes = raw.get("rope_parameters") or {}
    if not isinstance(ropes, dict) or not all(isinstance(ropes.get(kind, {}), dict) for kind in (_SLIDING, _FULL)):
        raise InvalidModel(f"{path}: field rope_parameters must be an object; download or convert the model again.")
    full = {"rope_theta": 1e6, **ropes.get(_FULL, {})}
    window = {"rope_theta": raw.get("rope_local_base_freq", 1e4), **ropes.get(_SLIDING, {})}
    fields = Fields(path, window)
    if fields.text("rope_type", "default") != "default":
        raise fields.error("rope_type", f"is {shown(window['rope_type'])}, but layers with a window have the default")
    if not ropes:  # transformers 4
        full = {"rope_theta": raw.get("rope_theta", 1e6), **(raw.get("rope_scaling") or {})}
    return {**raw, "rope_parameters": full, "rope_scaling": None}, fields.number("rope_theta", positive=True)


def _rope(path: Path, architecture: str, raw: dict[str, Any], head_dim: int) -> tuple[float, int, RopeScaling | None]:
    """Theta, the dimensions that rotate, and the scaling: of `rope_parameters` (transformers 5), or of `rope_scaling`
    with fields beside it (before)."""
    values = (
        raw.get("rope_scaling") or raw.get("rope_parameters") or (_GPT_OSS_ROPE if architecture == "gpt_oss" else {})
    )
    if not isinstance(values, dict) or any(isinstance(value, dict) for value in values.values()):
        raise InvalidModel(f"{path}: rope_parameters per layer type are not supported; use a model with one set.")
    values = {**{key: raw[key] for key in ("rope_theta", "partial_rotary_factor") if key in raw}, **values}
    # Phi-3 keeps the trained length outside, and there it takes precedence.
    if raw.get("original_max_position_embeddings") is not None:
        values = {**values, "original_max_position_embeddings": raw["original_max_position_embeddings"]}
    fields = Fields(path, values)
    theta = fields.number("rope_theta", _THETAS.get(architecture, 1e4), positive=True)
    fraction = fields.number("partial_rotary_factor", 1.0)
    if fraction != 1.0 and architecture != "phi3":
        raise fields.error("partial_rotary_factor", f"is {fraction}, but only phi3 models may set it")
    if not 0 < fraction <= 1:
        raise fields.error("partial_rotary_factor", f"is {fraction}, but a number above 0 up to 1 is needed")
    dim = int(head_dim * fraction)
    kind = fields.text("rope_type", fields.text("type", "default"))
    if architecture == "phi3" and kind in ("su", "yarn"):  # older names
        kind = "longrope"
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
