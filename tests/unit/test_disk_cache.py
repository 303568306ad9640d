"""What is kept on disk is found again for the same machine, model and measurement, and for no other."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from foredraft.backends.base import Linear
from foredraft.backends.torch import TorchBackend
from foredraft.engine import disk_cache
from foredraft.models.catalog import open_checkpoint
from foredraft.models.decoder import Decoder, load_decoder
from tests.tiny_models import random_model, save_model


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    folder = save_model(random_model("llama"), tmp_path_factory.mktemp("tiny"))
    return load_decoder(open_checkpoint(folder), "int4", 64, TorchBackend("int4", torch.device("cpu")))


def key(decoder: Decoder, measured: object = None) -> str:
    return disk_cache.machine_key(TorchBackend("int4", torch.device("cpu")), decoder, "int4", measured)


def of_another_kind(linear: Linear) -> Linear:
    return replace(linear, kinds=("q6",))


def test_weights_of_other_kinds_have_another_key(decoder: Decoder) -> None:
    assert set(decoder.weight_kinds) == {("q4",), ("q8",)}, "the head has 8 bits"
    last = replace(decoder.layers[-1], down=of_another_kind(decoder.layers[-1].down))
    other = replace(decoder, layers=(*decoder.layers[:-1], last))
    assert key(other) != key(decoder)
    assert key(replace(decoder)) == key(decoder)


def test_other_measurements_have_another_key(decoder: Decoder) -> None:
    assert key(decoder, "one") != key(decoder, "other")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("processor_model", lambda: "another processor"),
        ("processor_features", lambda: frozenset({"another"})),
        ("version", lambda package: f"another version of {package}"),
    ],
)
def test_other_processors_and_versions_have_another_key(
    decoder: Decoder, name: str, value: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    before = key(decoder)
    monkeypatch.setattr(disk_cache, name, value)
    assert key(decoder) != before


def test_what_cannot_be_read_is_not_there(tmp_path: Path) -> None:
    file = tmp_path / "some" / "file.json"
    assert disk_cache.read(file, "a") is None
    disk_cache.write(file, "a", [1, 2])
    disk_cache.write(file, "b", {"x": 1.5})
    assert (disk_cache.read(file, "a"), disk_cache.read(file, "b")) == ([1, 2], {"x": 1.5})
    file.write_text("{")
    assert disk_cache.read(file, "a") is None
