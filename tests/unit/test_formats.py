"""Heads in the layouts of others are read as our own: what we export comes back, and whatever is wrong with a file is
said in one sentence that names it."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from foredraft.errors import InvalidModel
from foredraft.heads.base import HeadConfig
from foredraft.heads.catalog import find_heads
from foredraft.heads.coding import decoded
from foredraft.heads.engines import Engine
from foredraft.heads.export import export
from foredraft.heads.files import HeadFiles, read_tensors
from foredraft.heads.formats import open_head
from foredraft.models.catalog import open_checkpoint
from tests.tiny_heads import random_head, save_head, tiny_config
from tests.tiny_models import VOCAB, random_model, save_model

Change = Callable[[dict[str, Any], dict[str, Tensor]], Any]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(random_model("llama"), tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def eagle(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As exported for vLLM."""
    place = tmp_path_factory.mktemp("eagle")
    head = save_head(random_head(tiny_config("eagle", model)), place / "head", torch.bfloat16)
    export(head, Engine.vllm, place / "out", open_checkpoint(model), "org/tiny")
    return place / "out"


def opened(folder: Path, model: Path) -> HeadFiles:
    return open_head(folder, open_checkpoint(model))


def changed(head: Path, place: Path, change: Change) -> Path:
    config, tensors = json.loads((head / "config.json").read_text()), load_file(head / "model.safetensors")
    change(config, tensors)
    place.mkdir()
    (place / "config.json").write_text(json.dumps(config))
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, place / "model.safetensors")
    return place


@pytest.mark.parametrize("draft_vocab", [256, VOCAB])
@pytest.mark.parametrize("engine", [engine for engine in Engine if not engine.is_of_models])
def test_an_exported_eagle_head_comes_back(engine: Engine, draft_vocab: int, model: Path, tmp_path: Path) -> None:
    changes: dict[str, Any] = {"taps": (0, 2), "block": 5, "draft_vocab_size": draft_vocab, "rope_theta": 5000.0}
    head = random_head(tiny_config("eagle", model, **changes))
    if draft_vocab == VOCAB:
        head.set_vocabulary(torch.arange(VOCAB))
    save_head(head, tmp_path / "head", torch.bfloat16)
    export(tmp_path / "head", engine, tmp_path / "out", open_checkpoint(model), "tiny")
    files, ours = opened(tmp_path / "out", model), HeadConfig.read(tmp_path / "head")
    name = "tiny" if engine is Engine.speculators else "another model"
    assert files.config == replace(ours, target_name=name, target_digest="")
    tensors = {name: decoded(tensor) for name, tensor in files.read().items()}
    expected = read_tensors(tmp_path / "head", ours)
    assert tensors.keys() == expected.keys()
    assert all(torch.equal(tensors[name], expected[name]) for name in expected)


def test_an_embedding_is_shared_if_it_is_the_targets_to_the_last_row(model: Path, tmp_path: Path) -> None:
    """The speculators format has a copy of it, or another."""
    save_head(random_head(tiny_config("eagle", model)), tmp_path / "head", torch.bfloat16)
    export(tmp_path / "head", Engine.speculators, tmp_path / "out", open_checkpoint(model), "tiny")
    assert load_file(tmp_path / "out" / "model.safetensors")["embed_tokens.weight"].shape[0] == VOCAB
    assert "embed_tokens.weight" not in opened(tmp_path / "out", model).read()

    def change(config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        tensors["embed_tokens.weight"][-1, -1] += 1

    files = opened(changed(tmp_path / "out", tmp_path / "other", change), model)
    assert not files.config.shares_embedding
    assert files.read()["embed_tokens.weight"].shape[0] == VOCAB


@pytest.mark.parametrize(
    ("kind", "engine"), [("dflash", Engine.vllm), ("dflash", Engine.speculators), ("medusa", Engine.vllm)]
)
def test_exported_heads_of_other_kinds_come_back(kind: str, engine: Engine, model: Path, tmp_path: Path) -> None:
    """What an export has no place for is made again: norm and masks are the target's."""
    target = open_checkpoint(model)
    changes: dict[str, Any] = {"taps": (0, 2), "correction": "markov", "block_input": "masked", "mask_token_id": 7}
    head = random_head(tiny_config(kind, model, **(changes if kind == "dflash" else {})))
    if kind == "dflash":
        head.mask_embedding.weight.copy_(target.weight("model.embed_tokens.weight").dense()[7])
    else:
        head.norm.weight.copy_(target.vector("model.norm.weight"))
    save_head(head, tmp_path / "head", torch.bfloat16)
    export(tmp_path / "head", engine, tmp_path / "out", target, "tiny")
    files, ours = opened(tmp_path / "out", model), HeadConfig.read(tmp_path / "head")
    assert (files.config.block, files.config.taps, files.config.rank) == (ours.block, ours.taps, ours.rank)
    expected = read_tensors(tmp_path / "head", ours)
    tensors = {name: decoded(tensor) for name, tensor in files.read().items()}
    assert tensors.keys() == expected.keys()
    assert all(torch.equal(tensors[name].to(expected[name].dtype), expected[name]) for name in expected)


def test_a_vocabulary_in_any_order_is_read_in_rising_order(model: Path, eagle: Path, tmp_path: Path) -> None:
    def reverse(config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        places = torch.arange(len(tensors["d2t"]))
        tensors["d2t"] = (tensors["d2t"] + places).flip(0) - places
        tensors["lm_head.weight"] = tensors["lm_head.weight"].flip(0)
        del tensors["t2d"]

    found, expected = (opened(folder, model).read() for folder in (changed(eagle, tmp_path / "one", reverse), eagle))
    for name in ("d2t", "t2d", "lm_head.weight"):
        assert torch.equal(decoded(found[name]), decoded(expected[name]))


MISTAKES: dict[str, tuple[Change, str]] = {
    "a tensor too many": (
        lambda config, tensors: tensors.update(extra=torch.zeros(3)),
        "tensor 'extra' is not a tensor of eagle heads",
    ),
    "one missing": (
        lambda config, tensors: tensors.pop("layers.0.mlp.up_proj.weight"),
        "tensor 'layers.0.mlp.up_proj.weight' is missing, but eagle heads need it",
    ),
    "transposed": (
        lambda config, tensors: tensors.update({"fc.weight": tensors["fc.weight"].T}),
        r"'fc.weight' has shape \[192, 64\], but config.json asks for \[64, 192\]",
    ),
    "a claimed bias": (
        lambda config, tensors: config.update(attention_bias=True),
        "tensor 'layers.0.self_attn.q_proj.bias' is missing",
    ),
    "another vocabulary": (
        lambda config, tensors: config.update(vocab_size=VOCAB + 1),
        f"trained for another model with target_vocab_size {VOCAB + 1}, but .* has {VOCAB}",
    ),
    "another width": (
        lambda config, tensors: config.update(target_hidden_size=128),
        "target_hidden_size 128, but .* has 64",
    ),
    "tokens outside": (
        lambda config, tensors: tensors["d2t"].add_(VOCAB),
        "do not name 256 different ones of 320 tokens",
    ),
    "two vocabularies": (
        lambda config, tensors: tensors.update(t2d=~tensors["t2d"]),
        "d2t and t2d name different draft vocabularies",
    ),
    "no vocabulary": (
        lambda config, tensors: (tensors.pop("d2t"), tensors.pop("t2d")),
        "draft_vocab_size is 256, but neither d2t nor t2d says which of the 320 tokens these are",
    ),
    "two lists of taps": (
        lambda config, tensors: config.update(eagle_config={"eagle_aux_hidden_state_layer_ids": [1, 2, 3]}),
        r"two lists of taps disagree: the streams after \[1, 2, 3\] layers, or after \[2, 3, 4\]",
    ),
    "taps that are not there": (
        lambda config, tensors: config.update(eagle_aux_hidden_state_layer_ids=[1, 2, 9]),
        r"taps is \[1, 2, 9\], but numbers from 0 to 3, the target's layers, are needed",
    ),
    "codes": (
        lambda config, tensors: tensors.update({"fc.weight": tensors["fc.weight"].to(torch.float8_e4m3fn)}),
        "tensor 'fc.weight' is float8_e4m3fn, but float32, bfloat16 and float16 are supported",
    ),
    "a quantised head": (
        lambda config, tensors: config.update(quantization_config={"bits": 4}),
        "quantization_config is set, but quantised safetensors are not supported",
    ),
    "an unknown architecture": (
        lambda config, tensors: config.update(architectures=["GidgetModel"]),
        r"architectures is \['GidgetModel'\], no head that Foredraft knows, which is not supported",
    ),
    "an unknown layer": (
        lambda config, tensors: config.update(model_type="rwkv"),
        "model_type is 'rwkv', but Foredraft runs llama",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_are_loud(mistake: str, model: Path, eagle: Path, tmp_path: Path) -> None:
    change, sentence = MISTAKES[mistake]
    with pytest.raises(InvalidModel, match=sentence) as error:
        opened(changed(eagle, tmp_path / "head", change), model)
    assert str(error.value).endswith(".") and "\n" not in str(error.value)


def test_a_pickle_is_refused_with_the_way_to_convert_it(model: Path, eagle: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text((eagle / "config.json").read_text())
    for name in ("", "pytorch_model.bin"):  # hub ids bring no pickles along
        if name:
            (tmp_path / name).write_bytes(b"")
        with pytest.raises(InvalidModel, match=r"no .safetensors files.*pickle.*weights_only=True.*model.safetensors"):
            opened(tmp_path, model)


def test_heads_of_others_are_found_beside_ours(model: Path, eagle: Path, tmp_path: Path) -> None:
    (tmp_path / "theirs").symlink_to(eagle)
    save_head(random_head(tiny_config("medusa", model)), tmp_path / "ours")
    (tmp_path / "draft").symlink_to(model)  # a model is no head
    assert set(find_heads(str(tmp_path), open_checkpoint(model))) == {"eagle", "medusa"}
