"""Heads on disk: what is written is read back, and whatever does not fit is refused with one sentence."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from foredraft.config import RopeScaling
from foredraft.errors import InvalidModel, InvalidParameter
from foredraft.heads import files
from foredraft.heads.base import MAX_BLOCK, HeadConfig, tensor_shapes
from foredraft.heads.dflash.train import Options as DFlashOptions
from foredraft.heads.draft_model.train import DraftStudent
from foredraft.heads.files import check_out, check_target, read_tensors, target_digest, write_head
from foredraft.models.catalog import open_checkpoint
from foredraft.train.kinds import parse_kind
from foredraft.train.run import TrainingRun, TrainOptions
from tests.tiny_heads import build_head
from tests.tiny_models import random_model, save_model
from tests.unit.head_configs import EVERY_KIND, head_config

LLAMA3 = asdict(RopeScaling("llama3", factor=8.0, original_max_position_embeddings=64))
NAMES = [f"{config.kind}-{config.correction}-{config.block_input}" for config in EVERY_KIND]


def written(folder: Path, config: HeadConfig) -> dict[str, torch.Tensor]:
    head = build_head(config)
    is_whole = config.draft_vocab_size == config.target_vocab_size
    head.set_vocabulary(torch.arange(config.draft_vocab_size) * (1 if is_whole else 2) + (0 if is_whole else 3))
    tensors = dict(head.state_dict())
    write_head(folder, config, tensors)
    return tensors


@pytest.mark.parametrize("config", EVERY_KIND, ids=NAMES)
def test_a_head_is_read_as_it_was_written(config: HeadConfig, tmp_path: Path) -> None:
    config = replace(config, acceptance=(0.5, 0.25), provenance={"steps": 3, "text": "own", "loss": 0.5})
    tensors = written(tmp_path, config)
    assert HeadConfig.read(tmp_path) == config
    found = read_tensors(tmp_path, config)
    assert found.keys() == tensors.keys() == tensor_shapes(config).keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in tensors.items())
    again = build_head(config)
    again.load_state_dict(found)  # names and shapes are those of the module


FOREIGN = {
    "weights alone": {"model-00001-of-00002.safetensors": "shard", "model-00002-of-00002.safetensors": "shard"},
    "a model": {"config.json": '{"model_type": "llama"}', "model.safetensors": "weights"},
    "a tokenizer": {"tokenizer.json": "{}"},
}


@pytest.mark.parametrize("case", FOREIGN)
@pytest.mark.parametrize("kinds", [("eagle",), ("draft",), ("medusa", "draft")], ids="+".join)
def test_files_of_others_are_never_replaced(case: str, kinds: tuple[str, ...], tmp_path: Path) -> None:
    """Nor is time spent on training first: not even the model is looked for."""
    options = TrainOptions("nowhere", tmp_path, tuple(map(parse_kind, kinds)), steps=1)
    place = options.folder_of(options.kinds[-1])
    place.mkdir(exist_ok=True)
    for name, content in FOREIGN[case].items():
        (place / name).write_text(content)
    with pytest.raises(
        InvalidParameter, match=r"no head or draft model that Foredraft has written, so nothing is repl"
    ):
        TrainingRun(options)
    with pytest.raises(InvalidParameter, match=r"name a folder that is new or empty\.$"):
        written(place, head_config("eagle"))
    untrained: Any = None
    with pytest.raises(InvalidParameter, match=r"name a folder that is new or empty\.$"):
        DraftStudent.save(untrained, place, (), {})
    assert {file.name: file.read_text() for file in place.iterdir()} == FOREIGN[case]


def test_a_head_replaces_a_head_or_a_draft_model(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    written(tmp_path, head_config("eagle"))
    written(tmp_path, head_config("medusa"))
    assert HeadConfig.read(tmp_path).kind == "medusa" and (tmp_path / "notes.txt").read_text() == "mine"
    (tmp_path / "config.json").write_text('{"model_type": "llama", "foredraft": {}}')
    written(tmp_path, head_config("eagle"))
    assert HeadConfig.read(tmp_path).kind == "eagle"
    with pytest.raises(InvalidParameter, match=r"notes\.txt is a file"):
        check_out(tmp_path / "notes.txt")


def test_a_head_that_is_half_written_can_be_written_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(tensors: dict[str, torch.Tensor], file: Path, metadata: None) -> None:
        if "00002" in file.name:
            raise KeyboardInterrupt
        save_file(tensors, file)

    with monkeypatch.context() as patched:
        patched.setattr("safetensors.torch.save_file", interrupted)
        patched.setattr(files, "SHARD_BYTES", 8000)
        with pytest.raises(KeyboardInterrupt):
            written(tmp_path, head_config("eagle"))
    assert len(list(tmp_path.glob("*.safetensors"))) == 1
    written(tmp_path, head_config("eagle"))
    assert HeadConfig.read(tmp_path).kind == "eagle"


def test_a_large_head_is_written_in_several_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = head_config("eagle")
    written(tmp_path, config)  # one file, which the several replace
    monkeypatch.setattr(files, "SHARD_BYTES", 8000)
    tensors = written(tmp_path, config)
    names = sorted(file.name for file in tmp_path.glob("*.safetensors"))
    assert len(names) > 2 and names[0] == f"model-00001-of-{len(names):05}.safetensors"
    assert all(torch.equal(found, tensors[name]) for name, found in read_tensors(tmp_path, config).items())


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"kind": "hydra"}, "field kind is 'hydra', but eagle, medusa, dflash, mtp, draft_model are known"),
        ({"taps": [2, 9]}, r"field taps is \[2, 9\], but numbers from 0 to 4, the target's layers, are needed"),
        ({"taps": []}, "field taps is"),
        ({"hidden_size": 64}, "field hidden_size is 64, but eagle heads are as wide as their target: 32"),
        ({"num_heads": True}, "field num_heads is True, but a whole number from 1 to 2147483647 is needed"),
        ({"num_kv_heads": 3}, "field num_heads is 4, no multiple of num_kv_heads=3"),
        ({"draft_vocab_size": 51}, "field draft_vocab_size is 51, more than the 50 tokens of the target"),
        ({"correction": "markov"}, "field rank is 0, which does not fit correction 'markov'"),
        ({"correction": "markov", "rank": 4}, "only a dflash head may have one"),
        ({"acceptance": [1.5]}, "rates from 0 to 1"),
        ({"norm_eps": 0}, "field norm_eps is 0, but a positive number that float32 holds"),
        ({"norm_eps": 1e300}, r"field norm_eps is 1e\+300, but a positive number that float32 holds is needed"),
        ({"rope_theta": 1e308}, r"field rope_theta is 1e\+308, but a positive number that float32 holds is needed"),
        ({"rope_theta": 1e-300}, "field rope_theta is 1e-300, but a positive number that float32 holds is needed"),
        ({"rope_theta": 10**400}, "field rope_theta is 1000.*, but a positive number that float32 holds is needed"),
        ({"taps": [2, 2]}, r"field taps is \[2, 2\], but each may be named once"),
        ({"acceptance": [0.5] * 65}, "field acceptance is .* but at most 64 rates from 0 to 1 are needed"),
        ({"flavour": 1}, "field flavour is not a field of a head"),
        ({"block": None}, "field block is None, but a whole number"),
        ({"target_digest": ""}, "field target_digest is empty, but a head that was trained here names its target"),
        ({"qk_norm": 1}, "field qk_norm is 1, but true or false is needed"),
        ({"kind": "medusa", "qk_norm": True}, "field qk_norm is True, which medusa heads do not know"),
        ({"biases": ["a_proj"]}, r"field biases is \['a_proj'\], but q_proj, .* are known"),
        ({"sliding_layers": [1]}, r"field sliding_layers is \[1\], but there are 1 layers"),
        ({"sliding_window": 8}, "field sliding_window is 8, which does not fit 0 layers"),
        ({"rope_scaling": {}}, "field rope_scaling is {}, but null or an object of one of the kinds linear, llama3"),
        ({"rope_scaling": {**LLAMA3, "factor": 0}}, "field rope_scaling is .*, but null or an object"),
        ({"rope_scaling": {**LLAMA3, "kind": ["linear"]}}, "field rope_scaling is .*, but null or an object"),
        ({"rope_scaling": {**LLAMA3, "low_freq_factor": 9.0}}, "field rope_scaling has high_freq_factor 4.0, which"),
        ({"rope_scaling": {**LLAMA3, "kind": "factors"}}, "field rope_scaling has 0 factors, but 4 are needed"),
        (
            {"rope_scaling": {**LLAMA3, "original_max_position_embeddings": 0}},
            "field rope_scaling is llama3, which needs orig",
        ),
        ({"kind": "medusa", "num_layers": 1025}, "field num_layers is 1025, but medusa heads have at most 1024"),
        ({"kind": "mtp", "num_layers": 2}, "field num_layers is 2, but mtp heads have at most 1"),
        ({"intermediate_size": 2**31}, "field intermediate_size is 2147483648, but a whole number from 1 to 2147"),
        ({"head_dim": 7}, "field head_dim is 7, but an even number is needed"),
        ({"mask_token_id": 50}, "field mask_token_id is 50, but the target has 50 tokens"),
    ],
)
def test_a_bad_field_is_named(changes: dict[str, Any], sentence: str, tmp_path: Path) -> None:
    head_config("eagle").write(tmp_path)
    file = tmp_path / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))
    with pytest.raises(InvalidModel, match=sentence):
        HeadConfig.read(tmp_path)


@pytest.mark.parametrize("config", EVERY_KIND, ids=NAMES)
def test_a_block_is_limited_before_anything_is_made_of_it(config: HeadConfig, tmp_path: Path) -> None:
    """Medusa heads have tensors for every token of a block; of a masked block the file holds nothing."""
    for block in (MAX_BLOCK + 1, 2**31 - 1):
        replace(config, block=block).write(tmp_path)
        with pytest.raises(InvalidModel, match=f"field block is {block}, but at most {MAX_BLOCK} are supported"):
            HeadConfig.read(tmp_path)
    replace(config, block=MAX_BLOCK).write(tmp_path)
    assert len(tensor_shapes(HeadConfig.read(tmp_path))) < 1000


def test_what_is_trained_is_within_the_limits_of_heads() -> None:
    assert parse_kind("dflash:block=64").options == DFlashOptions(block=MAX_BLOCK)
    for kind in ("dflash:block=65", "medusa:offsets=65", "eagle:depth=65", "draft:depth=65"):
        with pytest.raises(InvalidParameter, match="='65' must be a whole number from 1 to 64"):
            parse_kind(kind)
    with pytest.raises(InvalidParameter, match="must be a whole number from 1 to 1024"):
        parse_kind(f"medusa:layers={'9' * 5000}")


def test_a_missing_field_is_named(tmp_path: Path) -> None:
    head_config("eagle").write(tmp_path)
    file = tmp_path / "config.json"
    raw = json.loads(file.read_text())
    del raw["taps"]
    file.write_text(json.dumps(raw))
    with pytest.raises(InvalidModel, match="field taps is missing"):
        HeadConfig.read(tmp_path)
    with pytest.raises(InvalidModel, match=r"has no config\.json"):
        HeadConfig.read(tmp_path / "nowhere")


def test_tensors_that_do_not_fit_are_named(tmp_path: Path) -> None:
    config = head_config("eagle")
    tensors = written(tmp_path, config)
    with pytest.raises(InvalidModel, match=r"tensor 'fc.weight' is missing, but eagle heads need it"):
        write_head(tmp_path, config, {name: tensor for name, tensor in tensors.items() if name != "fc.weight"})
    with pytest.raises(InvalidModel, match=r"tensor 'fc.weight' has shape \[32, 96\], but config.json asks for"):
        read_tensors(tmp_path, replace(config, taps=(1,)))
    with pytest.raises(InvalidModel, match="tensor 'extra' is not a tensor of eagle heads"):
        write_head(tmp_path, config, {**tensors, "extra": torch.zeros(1)})
    with pytest.raises(InvalidModel, match="d2t and t2d name different draft vocabularies"):
        write_head(tmp_path, config, {**tensors, "d2t": tensors["d2t"] + 1})


def test_a_truncated_file_is_refused(tmp_path: Path) -> None:
    config = head_config("medusa")
    written(tmp_path, config)
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-10])
    with pytest.raises(InvalidModel, match="is truncated or damaged"):
        read_tensors(tmp_path, config)
    file.unlink()
    with pytest.raises(InvalidModel, match=r"has no model.safetensors"):
        read_tensors(tmp_path, config)


def test_a_head_belongs_to_one_model(tmp_path: Path) -> None:
    mine = open_checkpoint(save_model(random_model("llama"), tmp_path / "mine"))
    other = open_checkpoint(save_model(random_model("llama", seed=1), tmp_path / "other"))
    wide = open_checkpoint(save_model(random_model("llama", vocab_size=330), tmp_path / "wide"))
    config = head_config(
        "medusa",
        target_digest=target_digest(mine),
        target_hidden_size=64,
        hidden_size=64,
        target_vocab_size=320,
        target_num_layers=3,
        taps=(3,),
    )
    check_target(tmp_path, config, mine)
    with pytest.raises(InvalidModel, match="trained for tiny, whose weights are not those of"):
        check_target(tmp_path, config, other)
    with pytest.raises(InvalidModel, match=r"target_vocab_size 320, but .* has 330"):
        check_target(tmp_path, config, wide)
