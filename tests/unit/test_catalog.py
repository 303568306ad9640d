"""Finding and fetching models, without a network: pip and the hub are replaced by local stand-ins."""

from __future__ import annotations

import hashlib
import os
import sys
import threading
import zipfile
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub.errors import LocalEntryNotFoundError
from huggingface_hub.utils._xet_progress_reporting import _finish_transfer_bar, _update_transfer_bar
from huggingface_hub.utils.tqdm import _create_progress_bar

from foredraft.errors import InvalidModel
from foredraft.models import catalog, wheel
from foredraft.models.gguf.checkpoint import GGUFCheckpoint
from foredraft.models.known_models import MODELS, CatalogueModel
from foredraft.models.sources import HubFile, WheelFile
from tests.gguf_files import MINIMAL, minimal_tensors, write_gguf

DATA = bytes(range(256)) * 1000
MEMBER = "package/model.gguf"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("LOCALAPPDATA" if sys.platform == "win32" else "XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "foredraft" / "models"


@pytest.fixture
def model(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> CatalogueModel:
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
    entry = CatalogueModel(
        name="small",
        aliases=("tiny",),
        licence="MIT",
        original="org/small",
        source=WheelFile(
            folder="small",
            requirement="small-model==1.0",
            download_bytes=file.stat().st_size,
            member=MEMBER,
            sha256=hashlib.sha256(DATA).hexdigest(),
            size_bytes=len(DATA),
        ),
    )
    monkeypatch.setattr(catalog, "MODELS", (entry,))
    return entry


def source_of(model: CatalogueModel) -> WheelFile:
    assert isinstance(model.source, WheelFile)
    return model.source


def with_source(model: CatalogueModel, **changes: Any) -> CatalogueModel:
    return replace(model, source=replace(source_of(model), **changes))


def test_fetch_once(model: CatalogueModel, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert model.path is None
    seen: list[tuple[int, int]] = []
    path = catalog.resolve("small", lambda done, total: seen.append((done, total)))
    assert path.read_bytes() == DATA
    assert path == model.path == cache / "small" / "model.gguf"
    assert list(path.parent.iterdir()) == [path], "nothing is left behind"
    assert seen[-1] == (source_of(model).download_bytes,) * 2
    assert all(0 <= done <= total for done, total in seen)

    monkeypatch.setattr(wheel, "fetch_member", lambda *arguments: pytest.fail("fetched twice"))
    assert catalog.resolve("Tiny") == path


def test_a_half_written_file_is_fetched_again(model: CatalogueModel) -> None:
    source_of(model).cached_file.parent.mkdir(parents=True)
    source_of(model).cached_file.write_bytes(DATA[:100])
    assert catalog.resolve("small").read_bytes() == DATA


def test_wrong_content_is_refused(model: CatalogueModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(catalog, "MODELS", (with_source(model, sha256="0" * 64),))
    with pytest.raises(InvalidModel, match=r"has SHA-256 .* but 0+ was expected"):
        catalog.resolve("small")
    assert not source_of(model).cached_file.exists()
    assert list(source_of(model).cached_file.parent.iterdir()) == []


def test_wheel_without_the_file(model: CatalogueModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(catalog, "MODELS", (with_source(model, member="package/other.gguf"),))
    with pytest.raises(InvalidModel, match=r"does not hold package/other\.gguf"):
        catalog.resolve("small")


def test_package_that_pip_cannot_find(model: CatalogueModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(catalog, "MODELS", (with_source(model, requirement="no-such-model==1.0"),))
    with pytest.raises(InvalidModel, match=r"pip could not download no-such-model==1\.0 \(ERROR: .*check the network"):
        catalog.resolve("small")


def test_python_without_pip(model: CatalogueModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wheel.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(InvalidModel, match=r"needs pip; run .* -m ensurepip"):
        catalog.resolve("small")


def test_folder_that_cannot_be_written(model: CatalogueModel, cache: Path) -> None:
    cache.parent.parent.mkdir(parents=True)
    cache.parent.write_text("a file where the folder should be")
    with pytest.raises(InvalidModel, match=r"small-model==1\.0 cannot be stored in"):
        catalog.resolve("small")


def test_two_fetches_at_once(model: CatalogueModel) -> None:
    results: list[Path] = []
    threads = [threading.Thread(target=lambda: results.append(catalog.resolve("small"))) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [source_of(model).cached_file] * 3
    assert source_of(model).cached_file.read_bytes() == DATA


def test_the_first_entry_is_the_default_model() -> None:
    entry = MODELS[0]
    assert entry.name == catalog.DEFAULT_MODEL == "smollm2-135m"
    assert entry.licence == "Apache-2.0"
    assert entry.size_bytes == 98_362_432
    assert source_of(entry).sha256.startswith("b179c952")


def test_entries_do_not_contradict_each_other() -> None:
    names = [name for entry in MODELS for name in entry.names]
    assert len(set(names)) == len(names) and all(name == name.lower() for name in names)
    by_name = {entry.name: entry for entry in MODELS}
    for entry in MODELS:
        assert entry.draft is None or by_name[entry.draft].size_bytes < entry.size_bytes
        assert catalog.check_name(entry.name) == entry.name
        for repository in (entry.original, *entry.heads):
            assert catalog.check_name(repository) == repository, "it is a hub id"


def test_the_default_model_is_the_pinned_file(default_model: Path) -> None:
    assert hashlib.sha256(default_model.read_bytes()).hexdigest() == source_of(MODELS[0]).sha256


def test_a_file_of_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fetched once, by every name; then it is taken from the hub's cache, where there is no network."""
    source = HubFile("org/small-GGUF", "small.gguf", 7)
    small = CatalogueModel("small", ("small:1b",), "MIT", "org/small", source)
    monkeypatch.setattr(catalog, "MODELS", (small,))
    fetched: list[tuple[str, str]] = []
    monkeypatch.setattr(huggingface_hub, "try_to_load_from_cache", lambda *place: str(tmp_path) if fetched else None)

    def hf_hub_download(repo_id: str, filename: str) -> str:
        fetched.append((repo_id, filename))
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", hf_hub_download)
    assert small.path is None
    assert catalog.resolve("small:1B") == catalog.resolve("small") == small.path == tmp_path
    assert fetched == [("org/small-GGUF", "small.gguf")]


def test_paths_are_taken_as_they_are(tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "model.gguf", MINIMAL, minimal_tensors())
    assert catalog.resolve(file) == file
    assert catalog.resolve(str(tmp_path)) == tmp_path
    assert isinstance(catalog.open_checkpoint(file), GGUFCheckpoint)


def test_hub_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    queried: dict[str, Any] = {}

    def snapshot_download(**options: Any) -> str:
        queried.update(options)
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    assert catalog.resolve("org/some-model") == tmp_path
    assert queried["repo_id"] == "org/some-model"
    assert "*.safetensors" in queried["allow_patterns"]
    assert not any(pattern.endswith((".bin", ".pt", ".py")) for pattern in queried["allow_patterns"])
    assert "tqdm_class" not in queried, "nobody watches, so the hub's library draws its own bar"


@pytest.mark.parametrize("name", ["org/some-model", "org/some-model/file.gguf"])
def test_the_hub_tells_its_bytes_and_draws_nothing(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A stand-in with the bars of the hub's library: its own functions make and move them."""

    def download(tqdm_class: type[Any], **options: Any) -> str:
        make = partial(_create_progress_bar, cls=tqdm_class, log_level=20)
        network = make(name="network", desc="Downloading", total=0, initial=0, unit="B", unit_scale=True)
        files = make(name="files", desc="Reconstructing", total=100, initial=10, unit="B", unit_scale=True)
        with tqdm_class(total=3, desc="Fetching 3 files") as count:
            files.update(30)
            files.total = 200  # another file has begun
            _update_transfer_bar(network, 90)
            count.update(1)
            files.update(160)
        _finish_transfer_bar(network)
        network.set_description_str("Download complete")
        for bar in (network, files):
            bar.set_postfix_str("1 MB/s", refresh=False)
            bar.close()
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    seen: list[tuple[int, int]] = []
    assert catalog.resolve(name, lambda *now: seen.append(now)) == tmp_path
    assert seen[0] == (40, 100) and seen[-1] == (200, 200)
    assert seen == sorted(seen) and all(done <= total for done, total in seen)
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize("name", ["org/some-model/sub/file.Q4_0.gguf", "org/some-model:sub/file.Q4_0.gguf"])
def test_hub_file(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    queried: list[str] = []

    def hf_hub_download(repo_id: str, filename: str) -> str:
        queried.extend((repo_id, filename))
        return str(tmp_path / filename)

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", hf_hub_download)
    assert catalog.resolve(name) == tmp_path / "sub/file.Q4_0.gguf"
    assert queried == ["org/some-model", "sub/file.Q4_0.gguf"]


def test_hub_that_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    def snapshot_download(**options: Any) -> str:
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
