"""Configs of published heads that announce what the tensors do not have, or what heads here cannot have, are refused
with a sentence; so are those of kinds that are not read."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import gguf
import pytest

from foredraft.errors import InvalidModel
from foredraft.heads.catalog import find_heads
from foredraft.heads.formats import open_head
from foredraft.models.catalog import open_checkpoint
from foredraft.models.checkpoint import Checkpoint
from tests.contract.test_mtp import changed, written
from tests.published.layouts import LAYOUTS
from tests.published.shapes import TargetShape, read_config, read_tensors, write_files
from tests.tiny_models import VOCAB, random_model, save_model

SHAPE = TargetShape(vocab=VOCAB)
LAYERS = "transformer_layer_config"


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return open_checkpoint(save_model(random_model("llama", num_hidden_layers=8), tmp_path_factory.mktemp("tiny")))


def rewritten(name: str, place: Path, fields: dict[str, Any], without: str = "none") -> Path:
    """A head with other fields (null: left out), and without the tensors whose names contain a text."""
    LAYOUTS[name].write(place, SHAPE, 7)
    config = {key: value for key, value in (read_config(place) | fields).items() if value is not None}
    tensors = {key: tensor for key, tensor in read_tensors(place).items() if without not in key}
    for file in place.glob("*.safetensors*"):
        file.unlink()
    write_files(place, config, tensors)
    return place


def refused(place: Path, target: Checkpoint, sentence: str) -> None:
    with pytest.raises(InvalidModel, match=sentence) as error:
        open_head(place, target)
    assert str(error.value).endswith(".") and "\n" not in str(error.value)


ANNOUNCED: dict[str, tuple[str, str, dict[str, Any], str]] = {
    "markov": ("dflash/speculators-dspark", "markov_head", {}, "'markov_head.markov_w1.weight' .* markov_rank 8"),
    "half of markov": (
        "dflash/speculators-dspark",
        "markov_w2",
        {},
        "tensor 'markov_head.markov_w2.weight' is missing",
    ),
    "another rank": (
        "dflash/speculators-dspark",
        "none",
        {"markov_rank": 16},
        r"'markov_head.markov_w1.weight' has shape \[320, 8\], but config.json asks for \[320, 16\]",
    ),
    "confidence": (
        "dflash/speculators-dspark",
        "confidence_head",
        {},
        "'confidence_head.proj.weight' is missing, but config.json has enable_confidence_head true",
    ),
    "biases": (
        "medusa/new",
        "none",
        {"medusa_fc_bias": True},
        "'blocks.0.layers.0.bias' is missing, .* medusa_fc_bias",
    ),
    "outputs": ("medusa/new", "lm_heads", {}, "'lm_heads.0.weight' is missing, .*original_lm_head false"),
    "outputs of the authors": ("medusa/old", ".2.weight", {}, "'0.2.weight' is missing, .*original_lm_head false"),
    "parallel": (
        "eagle3/specforge",
        "none",
        {"parallel_drafting": True},
        "'mask_hidden' is missing, but config.json has parallel_drafting True",
    ),
    "parallel token": ("eagle3/specforge", "none", {"ptd_token_id": 3}, "'mask_hidden' is missing, .* ptd_token_id 3"),
    "P-EAGLE": ("eagle3/peagle", "mask_hidden", {}, "'mask_hidden' is missing, .* speculators_model_type peagle"),
}


@pytest.mark.parametrize("case", ANNOUNCED)
def test_a_part_that_the_config_announces_must_be_there(case: str, target: Checkpoint, tmp_path: Path) -> None:
    name, without, fields, sentence = ANNOUNCED[case]
    refused(rewritten(name, tmp_path, fields, without), target, sentence)


FAMILIES: dict[str, dict[str, Any]] = {
    "rope_dim 8": {"model_type": "phi3", "partial_rotary_factor": 0.5},
    "window_rope_theta 10000.0": {"model_type": "gemma3_text"},
    "embedding_multiplier 12.0": {"model_type": "granite", "embedding_multiplier": 12.0},
    "attention_multiplier 1.0": {"model_type": "granite"},
    r"no_rope_layers \(0,\)": {"model_type": "smollm3", "no_rope_layers": [0, 1]},
}


@pytest.mark.parametrize("found", FAMILIES)
@pytest.mark.parametrize("name", ["eagle3/specforge", "eagle3/speculators", "dflash/zlab", "eagle1/eagle1"])
def test_layers_that_heads_cannot_have_are_refused(name: str, found: str, target: Checkpoint, tmp_path: Path) -> None:
    """Whatever a family of models has in its layers, of which nothing would be computed."""
    LAYOUTS[name].write(tmp_path, SHAPE, 7)
    config = read_config(tmp_path)
    layers = config.get(LAYERS, config)
    layers |= FAMILIES[found]
    layers.pop("layer_types", None)
    (tmp_path / "config.json").write_text(json.dumps(config))
    refused(tmp_path, target, f"its layers are those of .* models with {found}, which changes")


@pytest.mark.parametrize("kind", ["phi3", "smollm3", "qwen2"])
def test_families_whose_layers_are_plain_are_read(kind: str, target: Checkpoint, tmp_path: Path) -> None:
    fields = {"model_type": kind, "no_rope_layers": [1], "sliding_window": None}
    assert open_head(rewritten("eagle3/specforge", tmp_path, fields), target).config.kind == "eagle"


def test_what_says_the_same_twice_must_agree(target: Checkpoint, tmp_path: Path) -> None:
    name, bonus = "dflash/deepspec-dspark", "dspark_bonus_anchor"
    for index, (fields, from_anchor) in enumerate(
        [
            ({}, True),
            ({bonus: True}, False),
            ({bonus: False}, True),
            ({bonus: True, "sample_from_anchor": False}, False),
        ]
    ):
        place = rewritten(name, tmp_path / str(index), fields)
        config = open_head(place, target).config
        assert config.sample_from_anchor == from_anchor and config.block == 4 - (not from_anchor)
    for value in (True, False):
        place = rewritten(name, tmp_path / str(value), {bonus: value, "sample_from_anchor": value})
        refused(place, target, f"sample_from_anchor and dspark_bonus_anchor are both {str(value).lower()}")


def test_taps_are_never_guessed_in_the_speculators_format(target: Checkpoint, tmp_path: Path) -> None:
    place = rewritten("dflash/speculators", tmp_path, {"aux_hidden_state_layer_ids": None})
    refused(place, target, "field aux_hidden_state_layer_ids is missing")


KINDS: dict[str, tuple[dict[str, Any], str]] = {
    "domino": ({"dflash_config": {"projector_type": "domino"}}, "a Domino head with a GRU"),
    "dflash2": ({"speculators_model_type": "dflash2"}, "speculators_model_type is 'dflash2', a DFlash2 head"),
    "mlp": ({"speculators_model_type": "mlp_speculator"}, "'mlp_speculator', an MLP speculator, .* or mtp"),
}


@pytest.mark.parametrize("kind", KINDS)
def test_other_kinds_are_refused_with_what_they_are(kind: str, target: Checkpoint, tmp_path: Path) -> None:
    fields, sentence = KINDS[kind]
    refused(rewritten("dflash/zlab", tmp_path, fields), target, sentence)


def gguf_without(name: str, place: Path, field: str, tensor: str = "none") -> Path:
    """A GGUF head without a field and a tensor."""
    LAYOUTS[name].write(place, SHAPE, 7)
    reader = gguf.GGUFReader(place / "head.gguf")
    writer = gguf.GGUFWriter(place / "less.gguf", reader.fields["general.architecture"].contents())
    for key, each in reader.fields.items():
        if not key.startswith("GGUF.") and key not in ("general.architecture", field):
            kind = each.types[0]
            writer.add_key_value(key, each.contents(), kind, each.types[-1] if len(each.types) > 1 else None)
    for each in reader.tensors:
        if each.name != tensor:
            writer.add_tensor(each.name, each.data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return place / "less.gguf"


def test_a_gguf_head_says_what_is_missing(target: Checkpoint, tmp_path: Path) -> None:
    norm = "blk.0.attn_norm_2.weight"
    refused(
        gguf_without("gguf/eagle3", tmp_path / "norm", "none", norm),
        target,
        f"tensor '{norm}' is missing, but eagle heads need it",
    )
    anchor = gguf_without("gguf/dspark", tmp_path / "anchor", "dflash.sample_from_anchor")
    refused(anchor, target, "field dflash.sample_from_anchor is missing, and programs differ")
    pattern = "dflash.attention.sliding_window_pattern"
    refused(
        gguf_without("gguf/dflash-causal-sliding", tmp_path / "pattern", pattern),
        target,
        f"field {pattern} is None, but true or false for each of 2 layers is needed",
    )


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [({"mtp_num_hidden_layers": 2}, "has 2 layers"), ({"model_type": "granite"}, "not supported in granite models")],
)
def test_a_brought_layer_that_cannot_run_is_left_out(
    fields: dict[str, Any], sentence: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = changed(
        written("mtp/qwen3", tmp_path),
        lambda tensors: [
            tensors.pop(name)
            for name in list(tensors)
            if "model_type" in fields and ("q_norm" in name or "k_norm" in name)
        ],
        **fields,
    )
    with caplog.at_level(logging.WARNING):
        assert find_heads("auto", open_checkpoint(folder)) == {}
    assert sentence in caplog.text and "left out" in caplog.text
