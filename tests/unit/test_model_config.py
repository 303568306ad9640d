"""What config.json says, as transformers means it, and clear words for what cannot be."""

from __future__ import annotations

from typing import Any

import pytest

from foredraft.errors import InvalidModel
from tests.llama_config import parse

LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}


def test_rope_of_transformers_4_and_5_is_the_same() -> None:
    old = parse(rope_theta=5e5, rope_scaling={"rope_type": "llama3", **LLAMA3})
    new = parse(rope_parameters={"rope_type": "llama3", "rope_theta": 5e5, **LLAMA3})
    assert old == new
    assert old.rope_theta == 5e5
    assert old.rope_scaling is not None
    assert (old.rope_scaling.kind, old.rope_scaling.factor) == ("llama3", 8.0)
    assert old.rope_scaling.original_max_position_embeddings == 64
    assert parse().rope_scaling is None and parse().rope_theta == 10000.0
    assert parse(model_type="smollm3").rope_theta == 2e6


def test_yarn_lengthens_what_the_file_states_before_it_stretches() -> None:
    """As in the instructions for Qwen, whose files state the trained length, and room for an answer."""
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
    assert parse(max_position_embeddings=40960, rope_scaling=yarn).max_position_embeddings == 131072
    assert parse(max_position_embeddings=200000, rope_scaling=yarn).max_position_embeddings == 200000
    assert parse(max_position_embeddings=9, rope_scaling={**yarn, "factor": 1e30}).max_position_embeddings == 2**31 - 1
    linear = {"rope_type": "linear", "factor": 4.0}
    assert parse(max_position_embeddings=40960, rope_scaling=linear).max_position_embeddings == 40960


def test_longrope_of_phi3() -> None:
    factors = {"short_factor": [1.0, 1.5], "long_factor": [2.0, 3.0]}
    config = parse(
        model_type="phi3",
        partial_rotary_factor=0.5,
        rope_scaling={"type": "su", **factors},
        original_max_position_embeddings=32,
    )
    assert config.rope_dim == 4
    scaling = config.rope_scaling
    assert scaling is not None
    assert (scaling.kind, scaling.short_factor, scaling.long_factor) == ("longrope", (1.0, 1.5), (2.0, 3.0))
    assert scaling.attention_factor == pytest.approx((1 + 2 / 5) ** 0.5)  # log(128 / 32) / log(32)


SLIDING = [
    ({"model_type": "mistral", "sliding_window": 16}, [16, 16]),
    ({"model_type": "mistral", "sliding_window": None}, [0, 0]),
    ({"model_type": "mistral"}, [4096, 4096]),
    ({"model_type": "phi3", "sliding_window": 16}, [16, 16]),
    ({"model_type": "phi3"}, [0, 0]),
    ({"model_type": "qwen2", "sliding_window": 16}, [0, 0]),
    ({"model_type": "qwen2", "sliding_window": 16, "use_sliding_window": True, "max_window_layers": 1}, [0, 16]),
    (
        {
            "model_type": "qwen3",
            "sliding_window": 16,
            "use_sliding_window": True,
            "layer_types": ["sliding_attention", "full_attention"],
        },
        [16, 0],
    ),
    ({"model_type": "smollm3", "sliding_window": 16, "use_sliding_window": True, "no_rope_layers": [0, 1]}, [16, 0]),
    ({"model_type": "llama", "sliding_window": 16}, [0, 0]),
    ({"model_type": "gemma3_text", "sliding_window": 16}, [16, 16]),
    ({"model_type": "gemma3_text", "sliding_window": 16, "sliding_window_pattern": 2}, [16, 0]),
    ({"model_type": "gemma3_text", "layer_types": ["full_attention", "sliding_attention"]}, [0, 4096]),
]


@pytest.mark.parametrize(("changes", "windows"), SLIDING)
def test_sliding_windows(changes: dict[str, Any], windows: list[int]) -> None:
    config = parse(**changes)
    assert [config.window_of_layer(layer) for layer in range(2)] == windows


def test_layers_without_rope() -> None:
    assert parse(model_type="smollm3", no_rope_layers=[1, 0]).no_rope_layers == (1,)
    assert parse(model_type="smollm3", num_hidden_layers=9).no_rope_layers == (3, 7)
    assert parse(model_type="smollm3", num_hidden_layers=9, no_rope_layer_interval=3).no_rope_layers == (2, 5, 8)


def test_options_that_change_nothing_are_let_be() -> None:
    neutral = {"final_logit_softcapping": None, "rope_interleaved": False, "logits_scaling": 1.0, "num_experts": 0}
    assert parse(**neutral) == parse()


def test_granite_multipliers() -> None:
    config = parse(
        model_type="granite",
        embedding_multiplier=12,
        attention_multiplier=0.5,
        residual_multiplier=0.2,
        logits_scaling=8,
    )
    assert (config.embedding_multiplier, config.attention_scale) == (12.0, 0.5)
    assert (config.residual_multiplier, config.logits_divisor) == (0.2, 8.0)


def test_ropes_of_gemma() -> None:
    """By layer type since transformers 5, in fields of their own before."""
    linear = {"rope_type": "linear", "factor": 8.0}
    new = parse(
        model_type="gemma3_text",
        rope_parameters={
            "full_attention": {"rope_theta": 5e5, **linear},
            "sliding_attention": {"rope_type": "default", "rope_theta": 2e4},
        },
    )
    old = parse(model_type="gemma3_text", rope_theta=5e5, rope_local_base_freq=2e4, rope_scaling=linear)
    assert new == old
    assert (old.rope_theta, old.window_rope_theta) == (5e5, 2e4)
    assert old.rope_scaling is not None and old.rope_scaling.factor == 8
    plain = parse(model_type="gemma3_text")
    assert (plain.rope_theta, plain.window_rope_theta, plain.rope_scaling) == (1e6, 1e4, None)
    assert (plain.head_dim, plain.attention_scale) == (256, 1 / 16)


WRONG_CONFIGS: list[tuple[dict[str, Any], str]] = [
    ({"model_type": "mamba"}, r"model_type is 'mamba', but Foredraft runs llama, mistral"),
    ({"model_type": None}, r"model_type is None"),
    ({"model_type": "gemma3"}, r"model_type is 'gemma3', but .*; the nearest to it is gemma3_text\.$"),
    ({"model_type": "qwen2_moe"}, r"the nearest to it are qwen2 and qwen3 and qwen3_moe\.$"),
    ({"model_type": "gemma2"}, r"the nearest to it is gemma3_text\.$"),
    ({"model_type": "xlstm"}, r"choose a model of one of these families"),
    ({"final_logit_softcapping": 30.0}, r"final_logit_softcapping is 30\.0, which Foredraft does not know"),
    ({"model_type": "gemma3_text", "use_bidirectional_attention": True}, r"use_bidirectional_attention is True"),
    ({"num_local_experts": 8}, r"num_local_experts is 8, which Foredraft does not know for models of this kind"),
    ({"model_type": "qwen3_moe", "shared_expert_intermediate_size": 64}, r"shared_expert_intermediate_size is 64"),
    ({"embedding_multiplier": 12.0}, r"embedding_multiplier is 12\.0"),
    ({"quantization_config": {"quant_method": "awq"}}, r"quantization_config is set.*GGUF"),
    ({"hidden_act": "gelu"}, r"hidden_act is 'gelu', but only silu"),
    ({"hidden_size": None}, r"field hidden_size is missing"),
    ({"num_hidden_layers": 0}, r"num_hidden_layers is 0"),
    ({"num_attention_heads": "four"}, r"num_attention_heads is 'four'"),
    ({"rms_norm_eps": "small"}, r"rms_norm_eps is 'small', but a positive finite number"),
    ({"tie_word_embeddings": "yes"}, r"tie_word_embeddings is 'yes', but true or false"),
    ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, r"rope_type is 'dynamic', but default, linear"),
    ({"rope_scaling": {"type": "linear"}}, r"field factor is missing"),
    ({"rope_parameters": {"full_attention": {"rope_theta": 1.0}}}, r"rope_parameters per layer type"),
    ({"partial_rotary_factor": 0.5}, r"partial_rotary_factor is 0\.5, but only phi3"),
    (
        {"model_type": "phi3", "rope_scaling": {"type": "longrope", "short_factor": [1.0], "long_factor": [1.0]}},
        r"short_factor is \[1\.0\], but a list of 4 positive",
    ),
    (
        {"model_type": "smollm3", "no_rope_layers": [1]},
        r"no_rope_layers must be a list with an entry for each of the 2",
    ),
    ({"model_type": "gemma3_text", "sliding_window": 0}, r"sliding_window is 0, but a whole number from 1"),
    ({"model_type": "gemma3_text", "hidden_activation": "relu"}, r"hidden_activation is 'relu', but only gelu_py"),
    ({"model_type": "gemma3_text", "layer_types": ["full_attention"]}, r"layer_types must be a list with sliding_"),
    (
        {"model_type": "gemma3_text", "rope_parameters": {"sliding_attention": {"rope_type": "linear"}}},
        r"rope_type is 'linear', but layers with a window have the default",
    ),
]


@pytest.mark.parametrize(("changes", "message"), WRONG_CONFIGS)
def test_wrong_configurations_are_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidModel, match=message) as caught:
        parse(**changes)
    assert "config.json" in str(caught.value)
