"""GGUF metadata as a ModelConfig."""

from __future__ import annotations

import math

import numpy as np

from foredraft.config import ExpertsConfig, ModelConfig, RopeScaling
from foredraft.errors import InvalidModel
from foredraft.models.architectures import GGUF_ARCHITECTURES, Architecture, ExpertFields
from foredraft.models.fields import MAX_LAYERS, Fields, not_run, shown
from foredraft.models.gguf.header import GGUFHeader
from foredraft.models.gguf.tokenizer import eos_token_ids

# Fields that change what a model computes and that nobody reads, and the values under which they change nothing.
_NEUTRAL: dict[str, object] = {
    **dict.fromkeys(("attn_logit_softcapping", "final_logit_softcapping", "attention.clamp_kqv")),
    **dict.fromkeys(("attention.max_alibi_bias", "attention.q_lora_rank", "attention.kv_lora_rank")),
    **dict.fromkeys(("expert_shared_count", "expert_group_count", "leading_dense_block_count")),
    **dict.fromkeys(("expert_weights_scale", "interleave_moe_layer_step"), 1),
    **dict.fromkeys(("use_parallel_residual",), False),
}
_NEXTN = "nextn_predict_layers"
_GEMMA3_27B_LAYERS = 62  # whose queries are scaled by the width of a head that hidden_size gives, not by their own


def config_from_header(header: GGUFHeader) -> ModelConfig:
    """The model that the header describes; raises InvalidModel naming the field that is missing or not supported."""
    name = header.metadata.get("general.architecture")
    if not isinstance(name, str) or name not in GGUF_ARCHITECTURES:
        raise not_run(header.path, "general.architecture", name, list(GGUF_ARCHITECTURES))
    architecture = GGUF_ARCHITECTURES[name]
    fields = Fields(header.path, header.metadata, name + ".")
    _check_supported(header, fields, architecture)
    hidden_size = fields.integer("embedding_length")
    num_blocks, num_mtp_layers = fields.integer("block_count", most=MAX_LAYERS), fields.integer(_NEXTN, 0, MAX_LAYERS)
    if num_mtp_layers >= num_blocks:
        raise fields.error(_NEXTN, f"is {num_mtp_layers}, but block_count, which counts these too, is {num_blocks}")
    num_layers = num_blocks - num_mtp_layers
    num_heads = fields.integer("attention.head_count")
    if num_heads > hidden_size:
        raise fields.error("attention.head_count", f"is {num_heads}, but embedding_length is {hidden_size}")
    head_dim = fields.integer("attention.key_length", hidden_size // num_heads)
    if fields.integer("attention.value_length", head_dim) != head_dim:
        raise InvalidModel(f"{header.path}: {name}.attention.value_length must equal key_length ({head_dim}).")
    rope_dim = fields.integer("rope.dimension_count", head_dim)
    sliding_window, sliding_layers = _windows(architecture, fields, num_layers)
    window_rope_theta = architecture.window_rope_theta
    if window_rope_theta is not None:
        window_rope_theta = fields.number("rope.freq_base_swa", window_rope_theta, positive=True)
    if architecture.scales_by_width:
        width = hidden_size // num_heads if num_layers == _GEMMA3_27B_LAYERS else head_dim
        embedding_multiplier, attention_multiplier = hidden_size**0.5, width**-0.5
    else:
        embedding_multiplier = fields.number("embedding_scale", 1.0)
        attention_multiplier = fields.number("attention.scale", 0.0) or None
    interval = architecture.no_rope_interval
    scaling, max_positions = rope_scaling(header, fields, rope_dim // 2), fields.integer("context_length")
    return ModelConfig(
        architecture=name,
        vocab_size=header.tensors["token_embd.weight"].shape[0],
        hidden_size=hidden_size,
        intermediate_size=fields.integer("feed_forward_length", None if architecture.experts is None else 1),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=fields.integer("attention.head_count_kv", num_heads),
        head_dim=head_dim,
        max_position_embeddings=max_positions if scaling is None else scaling.reach(max_positions),
        rms_norm_eps=fields.number("attention.layer_norm_rms_epsilon", positive=True),
        rope_theta=fields.number("rope.freq_base", 10000.0, positive=True),
        rope_dim=0 if rope_dim == head_dim else rope_dim,
        rope_scaling=scaling,
        no_rope_layers=tuple(range(interval - 1, num_layers, interval)) if interval else (),
        qk_norm=architecture.qk_norm,
        experts=None if architecture.experts is None else _experts(architecture.experts, fields),
        activation=architecture.activation,
        attention_sinks=architecture.attention_sinks,
        sliding_window=sliding_window,
        sliding_layers=sliding_layers,
        window_rope_theta=window_rope_theta,
        update_norms=architecture.update_norms,
        embedding_multiplier=embedding_multiplier,
        attention_multiplier=attention_multiplier,
        tie_word_embeddings="output.weight" not in header.tensors,
        residual_multiplier=fields.number("residual_scale", 1.0),
        logits_divisor=fields.number("logit_scale", 1.0, positive=True),
        num_mtp_layers=num_mtp_layers,
        bos_token_id=header.metadata.get("tokenizer.ggml.bos_token_id"),
        eos_token_ids=eos_token_ids(header.metadata),
    )


def _check_supported(header: GGUFHeader, fields: Fields, architecture: Architecture) -> None:
    """Raise InvalidModel for what would make a model's text wrong, or is no whole model."""
    if not fields.flag("attention.causal", True):
        raise fields.error("attention.causal", "is false, but tokens must not see what follows them")
    experts = architecture.experts
    fields.refuse({**_NEUTRAL, "expert_gating_func": None if experts is None else experts.gating})
    if fields.integer("expert_count", 0) and experts is None:
        known = ", ".join(each.gguf for each in GGUF_ARCHITECTURES.values() if each.experts is not None)
        raise InvalidModel(
            f"{header.path}: field {fields.key('expert_count')} is set, but of the mixtures of experts Foredraft runs "
            f"{known}; choose one of these, or a model without experts."
        )
    if Fields(header.path, header.metadata, "split.").integer("count", 0) > 1:
        raise InvalidModel(f"{header.path} is one part of a split GGUF; merge the parts with llama-gguf-split --merge.")
    if "token_embd.weight" not in header.tensors:
        raise InvalidModel(f"{header.path}: tensor 'token_embd.weight' is missing, so this is not a language model.")


def _experts(theirs: ExpertFields, fields: Fields) -> ExpertsConfig:
    """Of a file whose layers all have experts; their weights are normalised unless it says otherwise."""
    return ExpertsConfig(
        count=fields.integer("expert_count"),
        num_chosen=fields.integer("expert_used_count"),
        intermediate_size=fields.integer("expert_feed_forward_length"),
        normalised=theirs.is_fixed or fields.flag("expert_weights_norm", True),
    )


def _windows(architecture: Architecture, fields: Fields, num_layers: int) -> tuple[int | None, tuple[int, ...] | None]:
    """The window, and the layers that have it: all (None), or all but the last of an interval."""
    if architecture.windowed != "pattern":
        return fields.integer("attention.sliding_window", 0) or None, None
    interval = fields.integer("attention.sliding_window_pattern", architecture.full_interval)
    layers = tuple(layer for layer in range(num_layers) if (layer + 1) % interval)
    return fields.integer("attention.sliding_window"), layers


def rope_scaling(header: GGUFHeader, fields: Fields, num_frequencies: int) -> RopeScaling | None:
    """How the rope of a file is stretched; `fields` are those of its architecture."""
    context = fields.integer("context_length")
    original = fields.integer("rope.scaling.original_context_length", 0) or context
    if "rope_factors_long.weight" in header.tensors and "rope_factors_short.weight" in header.tensors:
        if original == 1:
            raise fields.error("rope.scaling.original_context_length", "is 1, but longrope needs at least 2")
        return RopeScaling(
            "longrope",
            factor=context / original,
            original_max_position_embeddings=original,
            short_factor=_factors(header, "rope_factors_short.weight", num_frequencies),
            long_factor=_factors(header, "rope_factors_long.weight", num_frequencies),
            attention_factor=fields.number("rope.scaling.attn_factor", 0.0, positive=True) or None,
        )
    if "rope_freqs.weight" in header.tensors:
        # Llama 3: the converter worked the scaling out as one divisor per frequency.
        return RopeScaling("factors", long_factor=_factors(header, "rope_freqs.weight", num_frequencies))
    kind = fields.text("rope.scaling.type", "none")
    if kind == "linear":
        return RopeScaling("linear", factor=fields.number("rope.scaling.factor", positive=True))
    if kind == "yarn":
        architecture = GGUF_ARCHITECTURES.get(header.metadata["general.architecture"])
        return _yarn(fields, original, architecture is None or architecture.rope.get("truncate", True))
    if kind not in ("none", ""):
        raise InvalidModel(
            f"{header.path}: rope scaling {shown(kind)} is not supported; "
            "use a model with none, linear, llama3, yarn or longrope."
        )
    return None


def _yarn(fields: Fields, original: int, truncate: bool) -> RopeScaling:
    """gpt-oss does not cut its ramp to whole dimensions; llama.cpp does, for all models."""
    factor = fields.number("rope.scaling.factor", positive=True)
    for key in ("rope.scaling.yarn_log_multiplier", "rope.scaling.yarn_ext_factor", "rope.scaling.yarn_attn_factor"):
        if fields.number(key, 0.0):
            raise fields.error(key, f"is {fields.number(key)}, which is not supported")
    return RopeScaling(
        "yarn",
        factor,
        beta_fast=fields.number("rope.scaling.yarn_beta_fast", 32.0, positive=True),
        beta_slow=fields.number("rope.scaling.yarn_beta_slow", 1.0, positive=True),
        original_max_position_embeddings=original,
        attention_factor=fields.number("rope.scaling.attn_factor", 1.0, positive=True)
        * (0.1 * math.log(factor) + 1 if factor > 1 else 1.0),
        truncate=truncate,
    )


def _factors(header: GGUFHeader, name: str, length: int) -> tuple[float, ...]:
    """A tensor of positive numbers, one per frequency of the rotation."""
    entry = header.tensors[name]
    if entry.type.name != "F32" or entry.shape != (length,):
        raise InvalidModel(
            f"{header.path}: tensor {name!r} is {entry.type.name} with shape {list(entry.shape)}, but F32 with shape "
            f"[{length}] is needed; convert the model again."
        )
    values = np.frombuffer(header.data, "<f4", length, entry.start)
    if not (np.isfinite(values) & (values > 0)).all():
        raise InvalidModel(f"{header.path}: tensor {name!r} must hold positive finite numbers; download it again.")
    return tuple(values.tolist())
