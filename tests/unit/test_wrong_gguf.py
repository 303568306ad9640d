"""Every way in which a GGUF file can be wrong is named."""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Type

from foredraft.errors import InvalidModel
from foredraft.models.catalog import open_checkpoint
from foredraft.models.gguf.checkpoint import GGUFCheckpoint
from foredraft.models.gguf.header import read_header
from tests.gguf_files import HIDDEN, MINIMAL, minimal_tensors, write_gguf

Edit = Callable[[dict[str, Any], dict[str, np.ndarray]], None]


def without_field(key: str) -> Edit:
    return lambda metadata, tensors: metadata.pop(key) and None


def with_field(key: str, value: Any) -> Edit:
    return lambda metadata, tensors: metadata.update({key: value})


def without_tensor(name: str) -> Edit:
    return lambda metadata, tensors: tensors.pop(name) is None and None


def with_tensor(name: str, *shape: int) -> Edit:
    return lambda metadata, tensors: tensors.update({name: np.ones(shape, np.float32)})


WRONG_MODELS: dict[str, tuple[Edit, str]] = {
    "no head count": (without_field("llama.attention.head_count"), r"field llama\.attention\.head_count is missing"),
    "zero layers": (with_field("llama.block_count", 0), r"llama\.block_count is 0, but a whole number"),
    "text for a number": (with_field("llama.context_length", "long"), r"llama\.context_length is 'long'"),
    "heads per layer": (with_field("llama.attention.head_count", [4, 4]), r"head_count is \[4, 4\]"),
    "unequal head sizes": (with_field("llama.attention.value_length", 32), r"value_length must equal"),
    "softcap": (
        with_field("llama.final_logit_softcapping", 30.0),
        r"final_logit_softcapping is 30\.0, which Foredraft",
    ),
    "experts": (with_field("llama.expert_count", 8), r"llama\.expert_count is set, but of the mixtures of experts"),
    "split file": (with_field("split.count", 2), r"one part of a split GGUF"),
    "rope": (with_field("llama.rope.scaling.type", "ntk"), r"rope scaling 'ntk' is not supported"),
    "yarn": (with_field("llama.rope.scaling.type", "yarn"), r"llama\.rope\.scaling\.factor is missing"),
    "no embedding": (without_tensor("token_embd.weight"), r"'token_embd\.weight' is missing"),
    "missing matrix": (without_tensor("blk.0.ffn_up.weight"), r"'model\.layers\.0\.mlp\.up_proj\.weight' is missing"),
    "too few layers": (with_field("llama.block_count", 2), r"layers\.1\..*' is missing.* with 2 layers"),
    "wrong shape": (with_tensor("blk.0.ffn_down.weight", 4, HIDDEN), r"down_proj.* has shape \[4, 256\].*\[256, 256\]"),
    "wrong fused rows": (with_tensor("blk.0.attn_qkv.weight", 7, HIDDEN), r"qkv_proj.*' has 7 rows.*512"),
    "unknown tensor": (
        with_tensor("blk.0.attn_sinks.weight", 4),
        r"'model\.layers\.0\.self_attn\.sinks\.weight' is not part",
    ),
    "bad alignment": (with_field("general.alignment", 3), r"general\.alignment is 3"),
}


@pytest.mark.parametrize("case", WRONG_MODELS)
def test_wrong_models_are_named(case: str, tmp_path: Path) -> None:
    edit, message = WRONG_MODELS[case]
    metadata, tensors = dict(MINIMAL), minimal_tensors()
    edit(metadata, tensors)
    path = write_gguf(tmp_path / "model.gguf", metadata, tensors)
    with pytest.raises(InvalidModel, match=message) as caught:
        GGUFCheckpoint(path)
    assert str(path) in str(caught.value)
    assert str(caught.value).endswith(".")


def test_unknown_architecture(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "model.gguf", MINIMAL, minimal_tensors(), architecture="mamba")
    with pytest.raises(InvalidModel, match=r"general\.architecture is 'mamba', but Foredraft runs llama, qwen2"):
        GGUFCheckpoint(path)


@pytest.mark.parametrize(("name", "kind"), [("blk.0.ffn_up.weight", Type.TQ1_0), ("output_norm.weight", Type.Q8_0)])
def test_unsupported_type(name: str, kind: Type, tmp_path: Path) -> None:
    tensors = minimal_tensors()
    length, size = gguf.GGML_QUANT_SIZES[kind]
    shape = (*tensors[name].shape[:-1], tensors[name].shape[-1] // length * size)
    tensors[name] = np.zeros(shape, np.uint8)
    path = write_gguf(tmp_path / "model.gguf", MINIMAL, tensors, {name: kind})
    with pytest.raises(InvalidModel, match=rf"{name}' is {kind.name}, but F32, .* supported"):
        GGUFCheckpoint(path)


def replaced(old: bytes, new: bytes) -> Callable[[bytes], bytes]:
    def edit(data: bytes) -> bytes:
        assert old in data
        return data.replace(old, new, 1)

    return edit


TYPE_OF_NORM = b"output_norm.weight" + struct.pack("<IQI", 1, HIDDEN, 0)
DAMAGE: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "empty": (lambda data: b"", r"is empty"),
    "not GGUF": (lambda data: b"PK\x03\x04" + data[4:], r"does not start with 'GGUF'"),
    "magic only": (lambda data: data[:4], r"damaged at the file header"),
    "old version": (lambda data: data[:4] + struct.pack("<I", 1) + data[8:], r"has GGUF version 1"),
    "big-endian": (lambda data: data[:4] + struct.pack(">I", 3) + data[8:], r"version 50331648"),
    "cut in a field": (lambda data: data[:400], r"damaged at metadata field"),
    "cut in a string": (
        lambda data: data[: data.index(b"gpt-2") + 2],
        r"damaged at metadata field 'tokenizer\.ggml\.pre'",
    ),
    "cut in the table": (
        lambda data: data[: data.index(b"output_norm.weight") + 18],
        r"damaged at tensor 'output_norm",
    ),
    "cut in the weights": (lambda data: data[:-1000], r"is truncated: tensor 'blk\.0\.ffn_down\.weight' ends at byte"),
    "unknown field type": (
        replaced(b"tokenizer.ggml.pre" + struct.pack("<I", 8), b"tokenizer.ggml.pre" + struct.pack("<I", 77)),
        r"damaged at metadata field 'tokenizer\.ggml\.pre'",
    ),
    "endless array": (
        replaced(
            b"tokenizer.ggml.tokens" + struct.pack("<IIQ", 9, 8, 6),
            b"tokenizer.ggml.tokens" + struct.pack("<IIQ", 9, 8, 2**60),
        ),
        r"damaged at",
    ),
    "endless numbers": (
        replaced(b"token_type" + struct.pack("<IIQ", 9, 5, 6), b"token_type" + struct.pack("<IIQ", 9, 5, 2**60)),
        r"damaged at metadata field 'tokenizer\.ggml\.token_type'",
    ),
    "not text": (replaced(b"</s>", b"\xff\xfe\xfd\xfc"), r"damaged at metadata field 'tokenizer\.ggml\.tokens'"),
    "unknown tensor type": (
        replaced(TYPE_OF_NORM, TYPE_OF_NORM[:-4] + struct.pack("<I", 999)),
        r"'output_norm\.weight' has the unknown GGML type 999",
    ),
    "no dimensions": (
        replaced(TYPE_OF_NORM, b"output_norm.weight" + struct.pack("<IQI", 0, HIDDEN, 0)),
        r"damaged at tensor 'output_norm\.weight'",
    ),
    "row no multiple of the block": (
        replaced(TYPE_OF_NORM, b"output_norm.weight" + struct.pack("<IQI", 1, 33, 8)),
        r"'output_norm\.weight' has shape \[33\], but Q8_0 needs rows of a multiple of 32",
    ),
    "listed twice": (
        replaced(b"blk.0.attn_k.weight", b"blk.0.attn_v.weight"),
        r"'blk\.0\.attn_v\.weight' is listed twice",
    ),
}


@pytest.mark.parametrize("case", DAMAGE)
def test_damaged_files_are_named(case: str, tmp_path: Path) -> None:
    edit, message = DAMAGE[case]
    path = write_gguf(tmp_path / "model.gguf", MINIMAL, minimal_tensors())
    path.write_bytes(edit(path.read_bytes()))
    with pytest.raises(InvalidModel, match=message) as caught:
        open_checkpoint(path)
    assert str(path) in str(caught.value)


def test_every_cut_of_the_header_is_refused(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "model.gguf", MINIMAL, minimal_tensors())
    data = path.read_bytes()
    cut = tmp_path / "cut.gguf"
    for length in range(0, min(entry.start for entry in read_header(path).tensors.values()), 7):
        cut.write_bytes(data[:length])
        with pytest.raises(InvalidModel):
            read_header(cut)


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(InvalidModel, match="cannot be read: No such file"):
        GGUFCheckpoint(tmp_path / "none.gguf")
