"""What is kept on disk is found again for the same machine, model and measurement, and for no other."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from foredraft.backends.layers import Linear, Mlp
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
    mlp = decoder.layers[-1].mlp
    assert isinstance(mlp, Mlp)
    last = replace(decoder.layers[-1], mlp=replace(mlp, down=of_another_kind(mlp.down)))
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


def as_written(value: Any) -> Any:
    return value


def test_results_are_kept_by_key(tmp_path: Path) -> None:
    file = tmp_path / "some" / "file.json"
    assert disk_cache.read(file, "a", as_written) is None
    disk_cache.write(file, "a", [1, 2])
    disk_cache.write(file, "b", {"x": 1.5})
    assert disk_cache.read(file, "a", as_written) == [1, 2]
    assert disk_cache.read(file, "b", as_written) == {"x": 1.5}
    assert disk_cache.read(file, "c", lambda value: pytest.fail("there is nothing to parse")) is None
    assert list(file.parent.iterdir()) == [file], "nothing else is left behind"


DAMAGED = [b"", b"{", b"[]", b"5", b"null", b"\xff\xfe", b"[" * 100_000, b'{"a": ' * 100_000, b'{"b": 1}']


@pytest.mark.parametrize("content", DAMAGED, ids=lambda content: repr(content[:8]))
def test_what_cannot_be_read_is_not_there_and_is_replaced(content: bytes, tmp_path: Path) -> None:
    file = tmp_path / "file.json"
    file.write_bytes(content)
    assert disk_cache.read(file, "a", as_written) is None
    disk_cache.write(file, "a", 1)
    assert disk_cache.read(file, "a", as_written) == 1


def test_a_value_that_the_parser_refuses_is_not_there(tmp_path: Path) -> None:
    file = tmp_path / "file.json"
    disk_cache.write(file, "a", "damaged")
    assert disk_cache.read(file, "a", lambda value: value if isinstance(value, int) else None) is None


def test_a_folder_that_cannot_be_written_is_no_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")
    disk_cache.write(tmp_path / "file" / "cache.json", "a", 1)
    assert disk_cache.read(tmp_path / "file" / "cache.json", "a", as_written) is None


def test_writers_at_the_same_time_never_leave_a_broken_file(tmp_path: Path) -> None:
    """Each writes long values many times, while the file is read all the time."""
    file = tmp_path / "file.json"
    disk_cache.write(file, "first", 0)
    failures: list[BaseException] = []

    def write(name: str) -> None:
        try:
            for count in range(50):
                disk_cache.write(file, name, [count] * 2000)
        except BaseException as error:
            failures.append(error)

    writers = [threading.Thread(target=write, args=(f"writer {index}",)) for index in range(4)]
    for writer in writers:
        writer.start()
    while any(writer.is_alive() for writer in writers):
        assert "first" in json.loads(file.read_text())
    assert not failures
    assert set(json.loads(file.read_text())) <= {"first", *(f"writer {index}" for index in range(4))}
    assert list(tmp_path.iterdir()) == [file]
