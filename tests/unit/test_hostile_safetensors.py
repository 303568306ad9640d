"""Safetensors folders whose headers and JSON files claim too much, or hold something else: one sentence each."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from foredraft.config import ModelConfig
from foredraft.engine import capacity
from foredraft.errors import InvalidModel
from foredraft.llm import LLM
from foredraft.models import decoder
from foredraft.models.catalog import open_checkpoint
from foredraft.models.rope import rope_table
from tests.tiny_models import random_model, save_model

NAN = float("nan")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(random_model("llama"), tmp_path_factory.mktemp("tiny"))


def safetensors_file(header: Any, size: int = 64, claimed: int | None = None) -> bytes:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(raw) if claimed is None else claimed) + raw + bytes(size)


def entry(shape: list[Any], start: int, end: int, dtype: str = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}


HEADERS = {
    "no file": b"",
    "cut in the length": b"\x01\x02",
    "endless header": safetensors_file({}, claimed=2**63),
    "header beyond the file": safetensors_file({}, claimed=1 << 20),
    "not JSON": safetensors_file(b"{"),
    "not an object": safetensors_file([1]),
    "deep JSON": safetensors_file(b"[" * 200_000),
    "deep objects": safetensors_file(b'{"a":' * 200_000),
    "not UTF-8": safetensors_file(b'{"\xff": 1}'),
    "overflowing shape": safetensors_file({"x": entry([2**40, 2**40], 0, 64)}),
    "large shape": safetensors_file({"x": entry([2**40], 0, 2**42)}),
    "negative shape": safetensors_file({"x": entry([-4, -4], 0, 64)}),
    "shape of texts": safetensors_file({"x": entry(["4"], 0, 16)}),
    "offsets reversed": safetensors_file({"x": entry([16], 64, 0)}),
    "offsets beyond the file": safetensors_file({"x": entry([32], 0, 128)}),
    "offsets overlap": safetensors_file({"x": entry([16], 0, 64), "y": entry([8], 32, 64)}),
    "bytes that nothing names": safetensors_file({"x": entry([8], 0, 32)}),
    "unknown type": safetensors_file({"x": entry([16], 0, 64, "F13")}),
    "a number for a tensor": safetensors_file({"x": 5}),
    "no such tensors": safetensors_file({"x" * 5000: entry([16], 0, 64)}),
    "no tensors": safetensors_file({}, size=0),
}


@pytest.mark.parametrize("case", HEADERS)
def test_safetensors_headers(case: str, folder: Path) -> None:
    file = folder / "model.safetensors"
    good = file.read_bytes()
    file.write_bytes(HEADERS[case])
    try:
        with pytest.raises(InvalidModel) as caught:
            open_checkpoint(folder)
    finally:
        file.write_bytes(good)
    assert len(str(caught.value)) < 700


def test_the_safetensors_that_are_spoilt_here_are_good(folder: Path) -> None:
    checkpoint = open_checkpoint(folder)
    stored = load_file(folder / "model.safetensors")
    assert all(torch.equal(checkpoint.weight(name).dense(), stored[name]) for name in checkpoint.names())


WRONG_JSON: list[tuple[str, dict[str, Any], str]] = [
    (
        "config.json",
        {"num_hidden_layers": 2**31},
        r"num_hidden_layers is 2147483648, but a whole number from 1 to 1024",
    ),
    ("config.json", {"num_hidden_layers": 1024}, r"'model\.layers\.3\.input_layernorm\.weight' is missing"),
    ("config.json", {"model_type": "smollm3", "num_hidden_layers": 10**9}, r"from 1 to 1024 is needed"),
    ("config.json", {"hidden_size": 10**30}, r"hidden_size is 10{30}, but a whole number from 1 to 2147483647"),
    ("config.json", {"rms_norm_eps": NAN}, r"rms_norm_eps is nan, but a positive finite number"),
    ("config.json", {"num_key_value_heads": 3}, r"4 attention heads are not a multiple of 3 key-value heads"),
    ("config.json", {"eos_token_id": "</s>"}, r"eos_token_id is '</s>', but a token id or a list of token ids"),
    ("config.json", {"eos_token_id": [1, None]}, r"eos_token_id is \[1, None\]"),
    ("config.json", {"bos_token_id": {}}, r"bos_token_id is \{\}"),
    ("config.json", {"bos_token_id": "x" * 5000}, r"bos_token_id is 'xxx.*\.\.\..*xxx'"),
    (
        "config.json",
        {"model_type": "qwen3", "use_sliding_window": True, "layer_types": 7},
        r"layer_types is 7, but a list",
    ),
    (
        "config.json",
        {"model_type": "phi3", "rope_parameters": None, "partial_rotary_factor": 1e300},
        r"partial_rotary_factor is 1e\+300, but a finite number",
    ),
    (
        "config.json",
        {"model_type": "phi3", "rope_parameters": None, "partial_rotary_factor": 3},
        r"partial_rotary_factor is 3\.0, but a number above 0 up to 1",
    ),
    (
        "config.json",
        {
            "model_type": "phi3",
            "rope_parameters": {"rope_type": "longrope", "short_factor": [1] * 8, "long_factor": [1] * 8},
            "original_max_position_embeddings": 1,
        },
        r"original_max_position_embeddings is 1, but longrope needs at least 2",
    ),
    (
        "config.json",
        {
            "rope_parameters": {
                "rope_type": "llama3",
                "factor": 2.0,
                "low_freq_factor": 4.0,
                "high_freq_factor": 4.0,
            }
        },
        r"high_freq_factor is 4\.0, but more than low_freq_factor",
    ),
    ("generation_config.json", {"do_sample": True, "temperature": "hot"}, r"temperature='hot' must be"),
    ("generation_config.json", {"eos_token_id": "</s>"}, r"generation_config\.json: field eos_token_id is '</s>'"),
    ("model.safetensors.index.json", {"weight_map": {"x": 5}}, r"weight_map must give a file for every tensor"),
    ("model.safetensors.index.json", {"weight_map": {"x": ["a"], "y": "b"}}, r"weight_map must give a file"),
]


@pytest.mark.parametrize(("name", "changes", "message"), WRONG_JSON)
def test_json_beside_the_weights(name: str, changes: dict[str, Any], message: str, folder: Path) -> None:
    file = folder / name
    good = file.read_text() if file.exists() else None
    file.write_text(json.dumps({**json.loads(good or "{}"), **changes}))
    try:
        with pytest.raises(InvalidModel, match=message) as caught:
            open_checkpoint(folder)
    finally:
        if good is None:
            file.unlink()
        else:
            file.write_text(good)
    assert str(folder) in str(caught.value)
    assert len(str(caught.value)) < 600


def test_rotations_are_made_for_the_length_that_memory_allows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = save_model(random_model("llama"), tmp_path)
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "max_position_embeddings": 2**31 - 1}))
    lengths: list[int] = []

    def counted(config: ModelConfig, max_positions: int, device: torch.device) -> tuple[torch.Tensor, None]:
        lengths.append(max_positions)
        return rope_table(config, min(max_positions, 4096)), None  # where the claim is believed, no memory is taken

    monkeypatch.setattr(decoder, "rope_tables", counted)
    monkeypatch.setattr(capacity, "spare_bytes", lambda device: 1 << 20)
    llm = LLM(str(folder), head=None, spec="off")
    assert max(lengths) == llm.max_model_len == len(llm.engine.runner.decoder.rope) < 4096
