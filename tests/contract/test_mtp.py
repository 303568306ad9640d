"""Layers for multi-token prediction in checkpoints of models: found without being named, with the logits of references
that follow their publishers' own code, and texts that are those of plain decoding."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from foredraft.engine import loading
from foredraft.engine.best_head import DraftTimes
from foredraft.errors import InvalidModel
from foredraft.heads.catalog import find_heads
from foredraft.heads.engines import Engine
from foredraft.heads.export import export
from foredraft.llm import LLM
from foredraft.models.catalog import open_checkpoint
from foredraft.params import SamplingParams
from tests.backends import KERNELS
from tests.contract.test_published_heads import TOLERANCE, paths_of
from tests.gguf_files import TOKENIZER, interleave_halves, write_gguf
from tests.published.layouts import LAYOUTS
from tests.published.mtp import MtpReference
from tests.published.shapes import TargetShape, read_tensors
from tests.served_heads import CHAIN, TOKENS, TREE, Target
from tests.steady_controller import SteadyController
from tests.tiny_heads import random_head, save_head, tiny_config
from tests.tiny_models import VOCAB, random_model, save_model, save_tokenizer

SHAPE = TargetShape(vocab=VOCAB, layers=3)
NAMES = ["mtp/deepseek", "mtp/deepseek-own", "mtp/mimo", "mtp/qwen3"]


def written(name: str, folder: Path) -> Path:
    """A model that brings a layer along."""
    LAYOUTS[name].write(folder, SHAPE, 7)
    return save_tokenizer(folder)


def last_stream(folder: Path, tensors: dict[str, Tensor]) -> Tensor:
    """[tokens, hidden]: what the last layer of the model leaves, computed by transformers. MiMo is Qwen2 there."""
    transformers = pytest.importorskip("transformers")
    config = json.loads((folder / "config.json").read_text())
    kind = config.pop("model_type").replace("mimo", "qwen2")
    sizes = {"rope_parameters": {"rope_type": "default", "rope_theta": config.pop("rope_theta")}}
    model = transformers.AutoModelForCausalLM.from_config(
        transformers.AutoConfig.for_model(kind, **config | sizes), attn_implementation="eager"
    )
    assert not model.load_state_dict(tensors, strict=False).missing_keys
    streams: list[Tensor] = []
    model.model.norm.register_forward_pre_hook(lambda module, inputs: streams.append(inputs[0][0]))
    with torch.inference_mode():
        model(torch.tensor([TOKENS[:-1]]))
    return streams[0]


def compare(folder: Path, name: str, place: Path, tolerance: float, **options: Any) -> None:
    """The model at `place`, whose weights are those of `folder`."""
    tensors = read_tensors(folder)
    ends = (tensors["model.embed_tokens.weight"], tensors["lm_head.weight"], tensors["model.norm.weight"])
    reference = LAYOUTS[name].reference(folder, SHAPE, *ends)
    assert isinstance(reference, MtpReference)
    reference.zero_first = False  # vLLM's own; the publishers' code has none of it
    streams = [last_stream(folder, tensors)]
    target = Target(place, "auto", **{"dtype": "float32", **options})
    sequence = target.sequence(TOKENS)
    for draft in (CHAIN, TREE):
        for row, path in zip(target.served(sequence, draft), paths_of(draft), strict=True):
            expected = reference.path_logits(streams, TOKENS, path)[-1]
            assert (row - expected).abs().max() < tolerance * expected.std()


@pytest.mark.parametrize("kernels", KERNELS, indirect=True)
@pytest.mark.parametrize("name", NAMES)
def test_served_logits_are_those_of_the_publisher(name: str, kernels: str, tmp_path: Path) -> None:
    compare(written(name, tmp_path), name, tmp_path, TOLERANCE)


def converted(folder: Path, file: Path) -> Path:
    """As llama.cpp writes it: the layer is one more block, whose own parts are called nextn."""
    last, tensors = f"model.layers.{SHAPE.layers}.", {}
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, SHAPE.layers + 1)
    parts = {"enorm", "hnorm", "eh_proj", "embed_tokens", "shared_head.norm", "shared_head.head"}
    for name, tensor in read_tensors(folder).items():
        heads = SHAPE.heads * (".q_proj." in name) or SHAPE.kv_heads * (".k_proj." in name)
        part = name.removeprefix(last).removesuffix(".weight")
        new = names.get_name(name, try_suffixes=(".weight",))
        if name.startswith(last) and part in parts:
            new = f"blk.{SHAPE.layers}.nextn.{part.replace('.', '_')}.weight"
        tensors[new] = (interleave_halves(tensor, heads) if heads else tensor).numpy()
    sizes = {
        "block_count": SHAPE.layers + 1,
        "nextn_predict_layers": 1,
        "context_length": 2048,
        "embedding_length": SHAPE.hidden,
        "feed_forward_length": SHAPE.intermediate,
        "attention.head_count": SHAPE.heads,
        "attention.head_count_kv": SHAPE.kv_heads,
        "attention.layer_norm_rms_epsilon": SHAPE.eps,
        "rope.freq_base": SHAPE.rope_theta,
    }
    return write_gguf(file, {**{f"llama.{key}": value for key, value in sizes.items()}, **TOKENIZER}, tensors)


@pytest.mark.parametrize("name", ["mtp/deepseek", "mtp/deepseek-own"])
def test_a_gguf_file_brings_its_layer_too(name: str, tmp_path: Path) -> None:
    folder = written(name, tmp_path / "model")
    compare(folder, name, converted(folder, tmp_path / "model.gguf"), TOLERANCE)


def test_what_is_the_targets_is_shared(tmp_path: Path) -> None:
    copied, own = (written(name, tmp_path / name) for name in ("mtp/deepseek", "mtp/deepseek-own"))
    for folder, shares in ((copied, True), (own, False)):
        config = find_heads("auto", open_checkpoint(folder))["mtp"].config
        assert config.shares_embedding == config.shares_output == shares
        assert config.target_num_layers == SHAPE.layers and config.taps == (SHAPE.layers,)


@pytest.mark.parametrize("dtype", ["bfloat16", "int8", "int4"])
@pytest.mark.parametrize("name", ["mtp/deepseek-own", "mtp/mimo", "mtp/qwen3"])
def test_auto_drafts_with_it_and_changes_no_text(
    name: str, dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without any option, greedy and sampled."""
    monkeypatch.setattr(loading, "HeadTimer", lambda *arguments: lambda config: DraftTimes(1e-9, 1e-9, 2))
    llm = LLM(str(written(name, tmp_path)), dtype=dtype, device="cpu")
    llm.engine.speculation.controller = SteadyController()
    prompts = [TOKENS[:20], TOKENS[5:30]]
    for params in (
        SamplingParams(max_tokens=12, ignore_eos=True),
        SamplingParams(max_tokens=12, temperature=1, seed=3, ignore_eos=True),
    ):
        plain, *others = (llm.generate(prompts, params, spec=spec) for spec in ("off", "auto", "mtp", "mtp:nodes=8"))
        for drafted in others:
            assert [output.token_ids for output in plain] == [output.token_ids for output in drafted]
            assert all(output.metrics.drafted_by_origin.get("mtp", 0) > 0 for output in drafted)


@pytest.mark.parametrize("engine", [Engine.deepseek, Engine.qwen])
def test_a_trained_layer_is_the_same_inside_its_model(engine: Engine, tmp_path: Path) -> None:
    """The model that is read has one file, and the copy of it brings the layer."""
    model = save_model(random_model("llama"), tmp_path / "model")
    head = save_head(random_head(tiny_config("mtp", model, norm_eps=1e-6)), tmp_path / "head")
    export(head, engine, tmp_path / "copy", open_checkpoint(model), "tiny")
    found = []
    for place, named in ((model, head), (tmp_path / "copy", "auto")):
        target = Target(place, named, dtype="float32")
        found.append(target.served(target.sequence(TOKENS), TREE))
    assert torch.equal(*found)


def changed(folder: Path, change: Callable[[dict[str, Tensor]], object], **fields: Any) -> Path:
    """A checkpoint of one file, with other tensors and fields of its config."""
    file = folder / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | fields))
    return folder


MISTAKES: dict[str, tuple[Callable[[dict[str, Tensor]], object], dict[str, Any], str]] = {
    "missing": (
        lambda tensors: tensors.pop("mtp.fc.weight"),
        {},
        "tensor 'mtp.fc.weight' is missing, but mtp heads need it; .* load it without this layer .head=None",
    ),
    "of the layer": (
        lambda tensors: tensors.pop("mtp.layers.0.self_attn.q_norm.weight"),
        {},
        "tensor 'mtp.layers.0.self_attn.q_norm.weight' is missing",
    ),
    "shape": (
        lambda tensors: tensors.update({"mtp.fc.weight": tensors["mtp.fc.weight"].T.contiguous()}),
        {},
        r"tensor 'mtp.fc.weight' has shape \[128, 64\], but config.json asks for \[64, 128\]",
    ),
    "unknown": (
        lambda tensors: tensors.update({"mtp.gate.weight": torch.ones(3)}),
        {},
        "tensor 'mtp.gate.weight' is not a tensor of mtp heads",
    ),
    "measured": (
        lambda tensors: None,
        {"foredraft": {"mtp_acceptance": [2]}},
        r"mtp_acceptance is \[2\], but .* rates",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_layer_that_is_not_whole_is_refused_with_a_sentence(mistake: str, tmp_path: Path) -> None:
    """And the model loads without it."""
    change, fields, sentence = MISTAKES[mistake]
    checkpoint = open_checkpoint(changed(written("mtp/qwen3", tmp_path), change, **fields))
    with pytest.raises(InvalidModel, match=sentence) as error:
        find_heads("auto", checkpoint)
    assert str(error.value).endswith(".") and "\n" not in str(error.value)
    assert find_heads(None, checkpoint) == {}


def test_a_layer_that_the_config_does_not_name_is_no_part_of_the_model(tmp_path: Path) -> None:
    """Names such as those of DeepSeek could be those of a model with one more layer."""
    folder = written("mtp/deepseek", tmp_path)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_nextn_predict_layers": 0}))
    with pytest.raises(InvalidModel, match="is not part of a llama model with 3 layers"):
        open_checkpoint(folder)


def test_a_config_may_name_a_layer_that_is_not_there(tmp_path: Path) -> None:
    """As quantised and retrained models do."""
    folder = written("mtp/qwen3", tmp_path)
    changed(folder, lambda tensors: [tensors.pop(name) for name in list(tensors) if name.startswith("mtp.")])
    assert find_heads("auto", open_checkpoint(folder)) == {}
