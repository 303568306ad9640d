"""Safetensors folders: tensors, and every way to be wrong. Configurations are in test_model_config.py."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from foredraft.backends.torch import TorchBackend
from foredraft.errors import InvalidModel
from foredraft.models.catalog import open_checkpoint
from foredraft.models.decoder import load_decoder
from foredraft.models.safetensors.checkpoint import SafetensorsCheckpoint
from foredraft.models.shapes import required_shapes
from tests.llama_config import BASE, parse
from tests.tiny_models import ARCHITECTURES, random_model, save_model


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
