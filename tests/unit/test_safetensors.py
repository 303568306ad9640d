"""Safetensors folders: configurations as transformers means them, tensors, and every way to be wrong."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from foredraft.backends.torch import TorchBackend
from foredraft.config import ModelConfig
from foredraft.errors import InvalidModel
from foredraft.models.catalog import open_checkpoint
from foredraft.models.decoder import load_decoder
from foredraft.models.safetensors.checkpoint import SafetensorsCheckpoint
from foredraft.models.safetensors.config import config_from_json
from foredraft.models.shapes import required_shapes
from tests.tiny_models import ARCHITECTURES, random_model, save_model

BASE: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 40,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "bos_token_id": 0,
    "eos_token_id": 1,
}


def parse(**changes: Any) -> ModelConfig:
    return config_from_json(Path("config.json"), {**BASE, **changes})


def write_folder(folder: Path, dtype: torch.dtype = torch.float32, **changes: Any) -> Path:
    """A folder with a random model as BASE describes it, without a tokenizer."""
    torch.manual_seed(0)
    tensors = {name: torch.randn(shape).to(dtype) for name, shape in required_shapes(parse(**changes))}
    (folder / "config.json").write_text(json.dumps({**BASE, **changes}))
    save_file(tensors, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_tensors_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    model = random_model(name)
    folder = save_model(model, tmp_path)
    checkpoint = SafetensorsCheckpoint(folder)
    parts: dict[str, torch.Tensor] = {}
    queries = checkpoint.config.num_heads * checkpoint.config.head_dim
    keys = checkpoint.config.num_kv_heads * checkpoint.config.head_dim
    for key, tensor in load_file(folder / "model.safetensors").items():
        if "qkv_proj" in key:
            for part, piece in zip("qkv", tensor.split([queries, keys, keys]), strict=True):
                parts[key.replace("qkv", part)] = piece
        elif name == "gpt-oss" and ".experts." in key:
            of_experts = range(checkpoint.config.experts.count if checkpoint.config.experts else 0)
            rows = tensor if key.endswith("_bias") else tensor.transpose(1, 2)
            pieces = {"down_proj": rows} if ".down_" in key else {"gate_proj": rows[:, 0::2], "up_proj": rows[:, 1::2]}
            prefix, kind = key[: key.index(".experts.") + 9], "bias" if key.endswith("_bias") else "weight"
            parts |= {f"{prefix}{i}.{part}.{kind}": piece[i] for part, piece in pieces.items() for i in of_experts}
        elif "gate_up_proj" in key:
            for part, piece in zip(("gate", "up"), tensor.chunk(2), strict=True):
                parts[key.replace("gate_up", part)] = piece
        else:
            is_norm = checkpoint.config.update_norms and tensor.dim() == 1
            layout_name = gemma_name(key) if is_norm else key.replace(".mlp.gate.", ".mlp.router.")
            layout_name += ".weight" * key.endswith(".sinks")
            parts[layout_name] = tensor + 1 if is_norm else tensor
    assert checkpoint.names() == set(parts)
    for key, tensor in parts.items():
        found = checkpoint.weight(key).values if tensor.dim() == 2 else checkpoint.vector(key)
        assert torch.equal(found, tensor), key


def gemma_name(key: str) -> str:
    """Where the layout has a norm of Gemma's."""
    names = {
        "post_attention": "self_attn.update_norm",
        "pre_feedforward": "post_attention_layernorm",
        "post_feedforward": "mlp.update_norm",
    }
    found = [name for name in names if f".{name}_layernorm." in key]
    return key.replace(f"{found[0]}_layernorm", names[found[0]]) if found else key


def test_shards(tmp_path: Path) -> None:
    folder = write_folder(tmp_path)
    whole = {name: SafetensorsCheckpoint(folder).vector(name) for name in SafetensorsCheckpoint(folder).names()}
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    shards = {"a.safetensors": names[:5], "b.safetensors": names[5:]}
    for file, keys in shards.items():
        save_file({key: tensors[key] for key in keys}, folder / file)
    weight_map = {key: file for file, keys in shards.items() for key in keys}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    checkpoint = SafetensorsCheckpoint(folder)
    assert checkpoint.names() == set(whole)
    assert all(torch.equal(checkpoint.vector(name), whole[name]) for name in whole)

    (folder / "b.safetensors").unlink()
    with pytest.raises(InvalidModel, match=r"b\.safetensors is missing, but model\.safetensors\.index\.json lists it"):
        SafetensorsCheckpoint(folder)


@pytest.mark.parametrize(
    ("dtype", "kind", "precision"),
    [(torch.float32, "f32", "float32"), (torch.float16, "f32", "bfloat16"), (torch.bfloat16, "bf16", "bfloat16")],
)
def test_precision(dtype: torch.dtype, kind: str, precision: str, tmp_path: Path) -> None:
    checkpoint = SafetensorsCheckpoint(write_folder(tmp_path, dtype))
    weight = checkpoint.weight("model.layers.0.mlp.up_proj.weight")
    stored = load_file(tmp_path / "model.safetensors")["model.layers.0.mlp.up_proj.weight"]
    assert (weight.kind, checkpoint.precision) == (kind, precision)
    assert torch.equal(weight.dense(), stored.float())
    assert checkpoint.vector("model.norm.weight").dtype == torch.float32


def test_a_tied_model_may_repeat_its_head_and_keep_rope_buffers(tmp_path: Path) -> None:
    folder = write_folder(tmp_path, tie_word_embeddings=True)
    tensors = load_file(folder / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(4)
    save_file(tensors, folder / "model.safetensors")
    checkpoint = SafetensorsCheckpoint(folder)
    assert checkpoint.names() == set(dict(required_shapes(checkpoint.config)))


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


GENERATION = [
    ({}, {}, (1,)),
    ({"temperature": 0.6, "top_p": 0.9}, {}, (1,)),
    ({"do_sample": True}, {"temperature": 1.0}, (1,)),
    (
        {"do_sample": True, "temperature": 0.6, "top_p": 0.9, "top_k": 20, "min_p": None, "eos_token_id": [5, 1]},
        {"temperature": 0.6, "top_p": 0.9, "top_k": 20},
        (5, 1),
    ),
    ({"do_sample": False, "repetition_penalty": 1.1, "eos_token_id": 7}, {}, (7,)),
]


@pytest.mark.parametrize(("file", "expected", "eos"), GENERATION)
def test_generation_config(
    file: dict[str, Any], expected: dict[str, Any], eos: tuple[int, ...], tmp_path: Path
) -> None:
    folder = write_folder(tmp_path)
    (folder / "generation_config.json").write_text(json.dumps(file))
    checkpoint = SafetensorsCheckpoint(folder)
    assert checkpoint.generation == expected
    assert checkpoint.config.eos_token_ids == eos


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


def edit_tensors(change: Callable[[dict[str, torch.Tensor]], None]) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        tensors = load_file(folder / "model.safetensors")
        change(tensors)
        save_file(tensors, folder / "model.safetensors")

    return edit


def cut(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


def only_pickles(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


def only_gguf(folder: Path) -> None:
    (folder / "config.json").unlink()
    (folder / "model.gguf").touch()


def two_files(folder: Path) -> None:
    data = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").unlink()
    for name in ("one", "two"):
        (folder / f"{name}.safetensors").write_bytes(data)


def escaping_index(folder: Path) -> None:
    index = {"weight_map": {"model.norm.weight": "../elsewhere.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


UP = "model.layers.1.mlp.up_proj.weight"
WRONG_FOLDERS: dict[str, tuple[Callable[[Path], None], str]] = {
    "no config": (lambda folder: (folder / "config.json").unlink(), r"has no config\.json; give a folder"),
    "GGUF files": (only_gguf, r"has no config\.json, but GGUF files"),
    "config not JSON": (
        lambda folder: (folder / "config.json").write_text("{") and None,
        r"config\.json is not valid JSON",
    ),
    "config a list": (lambda folder: (folder / "config.json").write_text("[]") and None, r"must hold a JSON object"),
    "no weights": (lambda folder: (folder / "model.safetensors").unlink(), r"has no \.safetensors files"),
    "pickles": (only_pickles, r"pickles, which can run any code"),
    "two files": (two_files, r"has 2 \.safetensors files but no model\.safetensors\.index\.json"),
    "empty index": (
        lambda folder: (folder / "model.safetensors.index.json").write_text("{}") and None,
        r"field weight_map is missing or empty",
    ),
    "index leads outside": (escaping_index, r"is missing, but model\.safetensors\.index\.json lists it"),
    "truncated": (cut, r"model\.safetensors is truncated or damaged"),
    "not safetensors": (
        lambda folder: (folder / "model.safetensors").write_bytes(b"PK\x03\x04 something else") and None,
        r"model\.safetensors is truncated or damaged",
    ),
    "missing tensor": (edit_tensors(lambda t: t.pop(UP) is None and None), rf"tensor '{UP}' is missing.*2 layers"),
    "wrong shape": (edit_tensors(lambda t: t.update({UP: torch.ones(3, 32)})), r"up_proj.*shape \[3, 32\].*\[64, 32\]"),
    "unknown tensor": (edit_tensors(lambda t: t.update({"extra": torch.ones(1)})), r"tensor 'extra' is not part of"),
    "8-bit tensor": (
        edit_tensors(lambda t: t.update({UP: torch.ones(64, 32, dtype=torch.int8)})),
        r"up_proj\.weight' is I8 .* use an unquantised version",
    ),
    "scalar": (edit_tensors(lambda t: t.update({UP: torch.tensor(1.0)})), r"up_proj\.weight' is F32 with shape \[\]"),
}


MOE = {
    "model_type": "qwen3_moe",
    "head_dim": 8,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
}
EXPERT = "model.layers.1.mlp.experts.3.up_proj.weight"
WRONG_EXPERTS: dict[str, tuple[dict[str, Any], Callable[[Path], None] | None, str]] = {
    "one is missing": ({}, edit_tensors(lambda t: t.pop(EXPERT) is None and None), rf"tensor '{EXPERT}' is missing"),
    "more than the config has": ({"num_experts": 3}, None, r"experts\.3\.down_proj\.weight' is not part of"),
    "fewer than the config has": ({"num_experts": 5}, None, r"experts\.4\.gate_proj\.weight' is missing"),
    "more chosen than there are": ({"num_experts_per_tok": 5}, None, r"5 experts of a token are to be chosen of 4"),
    "none chosen": ({"num_experts_per_tok": 0}, None, r"num_experts_per_tok is 0, but a whole number from 1"),
    "no number": ({"num_experts": None}, None, r"field num_experts is missing"),
    "a layer that is none": (
        {"mlp_only_layers": [2]},
        None,
        r"mlp_only_layers is \[2\], but a list .* to 1 is needed; ",
    ),
    "router that is no number": (
        {},
        edit_tensors(lambda t: t["model.layers.1.mlp.gate.weight"][2, 5].fill_(torch.nan) is None and None),
        r"'model\.layers\.1\.mlp\.router\.weight' or its bias holds numbers that are not finite",
    ),
}


@pytest.mark.parametrize("case", WRONG_EXPERTS)
def test_wrong_experts_are_named(case: str, tmp_path: Path) -> None:
    changes, edit, message = WRONG_EXPERTS[case]
    folder = write_folder(tmp_path, **MOE)
    tensors = load_file(folder / "model.safetensors")
    save_file(
        {name.replace(".router.", ".gate."): tensor for name, tensor in tensors.items()}, tmp_path / "model.safetensors"
    )
    load_decoder(SafetensorsCheckpoint(folder), "float32", 8, TorchBackend("float32", torch.device("cpu")))
    (folder / "config.json").write_text(json.dumps({**BASE, **MOE, **changes}))
    if edit is not None:
        edit(folder)
    with pytest.raises(InvalidModel, match=message):
        load_decoder(SafetensorsCheckpoint(folder), "float32", 8, TorchBackend("float32", torch.device("cpu")))


@pytest.mark.parametrize("case", WRONG_FOLDERS)
def test_wrong_folders_are_named(case: str, tmp_path: Path) -> None:
    edit, message = WRONG_FOLDERS[case]
    edit(write_folder(tmp_path))
    with pytest.raises(InvalidModel, match=message) as caught:
        open_checkpoint(tmp_path)
    assert str(tmp_path) in str(caught.value)


def test_no_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(InvalidModel, match=r"has no tokenizer\.json"):
        SafetensorsCheckpoint(write_folder(tmp_path)).tokenizer()
