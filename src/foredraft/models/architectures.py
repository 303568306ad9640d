"""The architectures that run here: one entry each, with what sets it apart from Llama and what its files leave unsaid.

A new one is an entry, as far as the decoder knows its parts (`ModelConfig`). Where config.json leaves a field out, the
default is that of transformers; what GGUF files cannot say is what llama.cpp fixes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal


@dataclass(frozen=True)
class ExpertFields:
    """How config.json describes experts, where transformers 5 does not call their number num_local_experts."""

    count: str  # the field with their number
    num_chosen: int  # where num_experts_per_tok is left out
    intermediate_size: str  # the field with the size of each
    default_size: int | None  # where that is left out; None: it must be there
    is_fixed: bool  # all layers have experts, and their weights are normalised; else further fields say it
    gating: int  # expert_gating_func of GGUF files: 1 is a softmax over all experts, 3 over the chosen ones


@dataclass(frozen=True)
class Architecture:
    """A default is what Llama has."""

    model_type: str  # in config.json
    gguf: str = ""  # general.architecture; none for those whose GGUF files say llama, or are not read
    qk_norm: bool = False
    activation: str = "silu"  # one of backends.layers.ACTIVATIONS
    experts: ExpertFields | None = None
    attention_sinks: bool = False
    update_norms: bool = False
    has_multipliers: bool = False  # Granite's four
    scales_by_width: bool = False  # embeddings by the root of their width, and queries by a scalar of the model (Gemma)
    ties_embeddings: bool = False  # where config.json does not say it
    norm_eps: float = 1e-6
    head_dim: int | None = None  # None: hidden_size / num_attention_heads

    rope_theta: float = 1e4
    rope: Mapping[str, Any] = field(default_factory=dict)  # rope_parameters where config.json has none
    rope_types: Mapping[str, str] = field(default_factory=dict)  # older names of rope types
    rotates_partly: bool = False  # whether partial_rotary_factor may be other than 1
    no_rope_interval: int = 0  # the last of so many layers sees no positions

    # Layers with a sliding window: all, some (layer_types, or the last ones), or all but the last of an interval.
    windowed: Literal["none", "all", "some", "pattern"] = "none"
    window: int | None = None  # in tokens, where config.json does not say it
    window_is_off: bool = False  # unless use_sliding_window is set
    full_interval: int = 0  # of a pattern
    window_rope_theta: float | None = None  # of layers with a window; None: they rotate as the others

    reads: tuple[str, ...] = ()  # fields of config.json that other models must not set
    quantisations: tuple[str, ...] = ()  # of safetensors files
    # Tensors whose names are not those of the Llama layout, in which the norm after attention is the one that the MLP
    # reads through.
    tensor_names: Mapping[str, str] = field(default_factory=dict)
    gguf_names: Mapping[str, str] = field(default_factory=dict)
    fuses_experts: bool = False  # one tensor for all experts of a layer (gpt_oss.py)
    norms_from_zero: bool = False  # in safetensors files: a norm multiplies by one more than what is stored
    interleaved: bool = False  # in GGUF files: the halves of q and k heads, for a rope that rotates neighbours


_ALL = (
    Architecture("llama", "llama", interleaved=True),
    Architecture("mistral", windowed="all", window=4096),
    Architecture("qwen2", "qwen2", windowed="some", window=4096, window_is_off=True),
    Architecture("qwen3", "qwen3", qk_norm=True, head_dim=128, windowed="some", window=4096, window_is_off=True),
    Architecture(
        "qwen3_moe",
        "qwen3moe",
        qk_norm=True,
        experts=ExpertFields("num_experts", 8, "moe_intermediate_size", default_size=768, is_fixed=False, gating=1),
        windowed="all",
        window=4096,
        window_is_off=True,
        reads=("num_experts", "num_local_experts"),
        tensor_names={"mlp.gate.weight": "mlp.router.weight"},
    ),
    # Qwen2 with layers for multi-token prediction beside it.
    Architecture("mimo", windowed="some", window=4096, window_is_off=True),
    Architecture(
        "smollm3",
        "smollm3",
        rope_theta=2e6,
        ties_embeddings=True,
        no_rope_interval=4,
        windowed="some",
        window=4096,
        window_is_off=True,
        interleaved=True,
    ),
    Architecture(
        "phi3",
        "phi3",
        norm_eps=1e-5,
        windowed="all",
        rope_types={"su": "longrope", "yarn": "longrope"},
        rotates_partly=True,
    ),
    Architecture(
        "granite",
        "granite",
        has_multipliers=True,
        reads=("embedding_multiplier", "attention_multiplier", "residual_multiplier", "logits_scaling"),
        interleaved=True,
    ),
    Architecture(
        "gemma3_text",
        "gemma3",
        qk_norm=True,
        activation="gelu_tanh",
        update_norms=True,
        scales_by_width=True,
        ties_embeddings=True,
        head_dim=256,
        rope_theta=1e6,
        windowed="pattern",
        window=4096,
        full_interval=6,
        window_rope_theta=1e4,
        tensor_names={
            "post_attention_layernorm.weight": "self_attn.update_norm.weight",
            "pre_feedforward_layernorm.weight": "post_attention_layernorm.weight",
            "post_feedforward_layernorm.weight": "mlp.update_norm.weight",
        },
        norms_from_zero=True,
    ),
    Architecture(
        "gpt_oss",
        "gpt-oss",
        activation="clamped",
        experts=ExpertFields("num_local_experts", 4, "intermediate_size", default_size=None, is_fixed=True, gating=3),
        attention_sinks=True,
        norm_eps=1e-5,
        head_dim=64,
        rope_theta=1.5e5,
        rope={"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096, "truncate": False},
        windowed="pattern",
        window=128,
        full_interval=2,
        reads=("num_local_experts", "num_experts", "swiglu_limit", "swiglu_alpha"),
        quantisations=("mxfp4",),
        tensor_names={"self_attn.sinks": "self_attn.sinks.weight"},
        gguf_names={"post_attention_norm": "post_attention_layernorm"},
        fuses_experts=True,
    ),
)
MODEL_TYPES = {each.model_type: each for each in _ALL}
GGUF_ARCHITECTURES = {each.gguf: each for each in _ALL if each.gguf}
