"""Whatever is wrong with a head is said in one sentence, when the model is loaded or when the head is first named."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from foredraft.backends.layers import Taps
from foredraft.backends.torch import TorchBackend
from foredraft.errors import ForedraftError, InvalidModel, InvalidParameter, InvalidSpec
from foredraft.heads.catalog import find_heads, shipped_heads
from foredraft.heads.weights import TapReader
from foredraft.llm import LLM
from foredraft.models.catalog import open_checkpoint
from foredraft.params import SamplingParams
from tests.tiny_heads import KINDS, random_head, save_head, save_heads, tiny_config
from tests.tiny_models import random_model, save_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(random_model("llama"), tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def eagle(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_head(random_head(tiny_config("eagle", folder)), tmp_path_factory.mktemp("eagle"))


def refused(folder: Path, head: Path | str, sentence: str, kind: type[ForedraftError] = InvalidModel) -> None:
    with pytest.raises(kind, match=sentence) as error:
        LLM(str(folder), head=str(head), spec="off")
    assert str(error.value).endswith(".") and "\n" not in str(error.value)


def changed(head: Path, place: Path, **fields: Any) -> Path:
    shutil.copytree(head, place, dirs_exist_ok=True)
    config = json.loads((place / "config.json").read_text())
    (place / "config.json").write_text(json.dumps({**config, **fields}))
    return place


def test_a_head_of_another_model(eagle: Path, tmp_path: Path) -> None:
    other = save_model(random_model("llama", seed=9), tmp_path)
    refused(other, eagle, "the head was trained for tiny, whose weights are not those of")


def test_a_head_of_a_model_of_other_sizes(eagle: Path, tmp_path: Path) -> None:
    other = save_model(random_model("smollm3"), tmp_path)
    refused(other, eagle, "trained for tiny with target_num_layers 3, but .* has 5")


def test_a_truncated_file(folder: Path, eagle: Path, tmp_path: Path) -> None:
    head = changed(eagle, tmp_path)
    file = head / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])
    refused(folder, head, "model.safetensors is truncated or damaged")


def test_a_wrong_vocabulary(folder: Path, eagle: Path, tmp_path: Path) -> None:
    refused(folder, changed(eagle, tmp_path, target_vocab_size=400), "target_vocab_size 400, but .* has 320")
    refused(folder, changed(eagle, tmp_path, draft_vocab_size=100), "'lm_head.weight' has shape .256, 64., but")


def test_a_tap_that_the_model_does_not_have(folder: Path, eagle: Path, tmp_path: Path) -> None:
    refused(folder, changed(eagle, tmp_path, taps=[1, 2, 9]), r"taps is \[1, 2, 9\], but numbers from 0 to 3")


def test_a_tap_that_is_not_written(folder: Path) -> None:
    taps = Taps((1, 3), torch.zeros(32, 128))
    with pytest.raises(
        InvalidModel, match=r"reads the residual stream after layer 2, but the target writes those .* 1, 3"
    ):
        TapReader(tiny_config("eagle", folder), taps, TorchBackend("float32", torch.device("cpu")))


def test_folders_that_hold_no_head_or_two(folder: Path, eagle: Path, tmp_path: Path) -> None:
    refused(folder, tmp_path, "has no config.json, neither itself nor in its folders")
    refused(folder, folder, r"architectures is \['LlamaForCausalLM'\], no head that Foredraft knows")
    changed(eagle, tmp_path / "one"), changed(eagle, tmp_path / "two")
    refused(folder, tmp_path, "has two eagle heads, one and two")
    shutil.rmtree(tmp_path / "two")
    shutil.copytree(folder, tmp_path / "draft")  # as `foredraft train eagle draft` writes one beside the heads
    assert set(find_heads(str(tmp_path), open_checkpoint(folder))) == {"eagle"}
    with pytest.raises(InvalidParameter, match="head=3 must be auto, None, a folder, a GGUF file or a hub id"):
        LLM(str(folder), head=3)  # type: ignore[arg-type]


@pytest.mark.parametrize("head", [None, "auto"])
def test_a_model_without_heads_says_so(folder: Path, head: str | None) -> None:
    llm = LLM(str(folder), head=head, spec="off")
    assert llm.engine.runner.taps is None and set(llm.engine.kv.groups) == {"target"}
    for kind in KINDS:
        with pytest.raises(InvalidSpec, match=f"{kind}: no head of this kind .* none; .* foredraft train {kind} --out"):
            llm.generate("x", spec=kind)


def test_a_head_of_another_kind_says_which_there_are(folder: Path, eagle: Path) -> None:
    llm = LLM(str(folder), head=str(eagle), spec="off")
    with pytest.raises(InvalidSpec, match="dflash: no head of this kind was loaded with the model, it has eagle"):
        llm.generate("x", spec="dflash")


@pytest.mark.parametrize(
    ("spec", "complaint"),
    [
        ("eagle:nodes=65", "k=0, nodes=65, width=4: k must be from 0"),
        ("eagle:k=20,width=4", "k times width must be at most 64"),
        ("dflash:tree=bush", "use chain, static, dynamic"),
        ("medusa:dtype=int2", "use auto, float32"),
        ("medusa:k=5", "k=5 must be at most 4, which is what this head drafts"),
        ("staged:chain=ngram>eagle", "eagle must be a model that drafts a chain"),
    ],
)
def test_bad_options(folder: Path, tmp_path_factory: pytest.TempPathFactory, spec: str, complaint: str) -> None:
    heads = save_heads(folder, tmp_path_factory.mktemp("heads"))
    with pytest.raises(InvalidSpec, match=complaint):
        LLM(str(folder), head=str(heads), spec="off").generate("x", spec=spec)


def test_heads_that_come_with_the_package_are_found_by_their_model(folder: Path, tmp_path: Path) -> None:
    save_heads(folder, tmp_path / "tiny")
    other = save_model(random_model("llama", seed=9), tmp_path / "other")
    assert set(shipped_heads(open_checkpoint(folder), tmp_path)) == set(KINDS)
    assert shipped_heads(open_checkpoint(other), tmp_path) == {}


@pytest.mark.parametrize("kind", KINDS)
def test_a_head_is_loaded_once_and_goes_with_its_last_proposer(folder: Path, tmp_path: Path, kind: str) -> None:
    llm = LLM(str(folder), head=str(save_heads(folder, tmp_path)), spec="off")
    params = SamplingParams(max_tokens=4, ignore_eos=True)
    for nodes in range(4, 14):  # more settings than are kept
        llm.generate([[1, 2, 3]], params, spec=f"{kind}:nodes={nodes}")
    groups = {"target", "taps"} | ({f"{kind} auto"} if kind != "medusa" else set())
    assert set(llm.engine.kv.groups) == groups
    for k in range(1, 11):
        llm.generate([[1, 2, 3]], params, spec=f"ngram:k={k}")
    assert set(llm.engine.kv.groups) == {"target", "taps"}
