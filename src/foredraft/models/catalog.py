"""Where models come from: the catalogue, files and folders here, and the Hugging Face hub."""

from __future__ import annotations

import difflib
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING

from foredraft.errors import InvalidModel
from foredraft.models.known_models import MODELS, CatalogueModel
from foredraft.models.sources import Progress, fetch_hub_file, fetch_hub_folder

if TYPE_CHECKING:
    from foredraft.models.checkpoint import Checkpoint

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


def resolve(name_or_path: str | os.PathLike[str], progress: Progress | None = None) -> Path:
    """The file or folder of a model, fetched first where needed; `progress` watches the download."""
    text = check_name(name_or_path)
    if model := in_catalogue(text):
        return model.path or model.source.fetch(progress)
    path = Path(text).expanduser()
    if path.exists():
        return path
    if file := _HUB_FILE.fullmatch(text):
        return fetch_hub_file(file[1], file[2], progress)
    return fetch_hub_folder(text, _HUB_PATTERNS, _HUB_IGNORED, progress)


def check_name(name_or_path: str | os.PathLike[str], what: str = "model") -> str:
    """The name of a model, or of what else is named like one, as text; raises InvalidModel where none can have it.
    Fetches nothing."""
    text = os.fspath(name_or_path) if isinstance(name_or_path, str | os.PathLike) else name_or_path
    if not isinstance(text, str):
        raise InvalidModel(f"{what}={text!r} is not the name of a {what}; give {ALLOWED}.")
    path = Path(text).expanduser()
    is_here = in_catalogue(text) is not None or (text and path.exists())
    is_hub_file = _HUB_FILE.fullmatch(text) and not path.parent.is_dir()
    is_hub_id = _HUB_ID.fullmatch(text) and not text.startswith(".") and path.suffix != ".gguf"
    if not (is_here or is_hub_file or is_hub_id):
        names = [name for model in MODELS for name in model.names]
        close = difflib.get_close_matches(text.lower(), names, n=1)
        suggestion = f" (did you mean {close[0]!r}?)" if close else ""
        raise InvalidModel(f"There is no {what} {text!r}{suggestion}; give {ALLOWED}.")
    return text


def in_catalogue(name: str) -> CatalogueModel | None:
    return next((model for model in MODELS if name.lower() in model.names), None)


def hub_name(name_or_path: str) -> str:
    """The name by which other engines find a model: the hub id of a model of the catalogue, else the name itself, and
    for what lies here its whole path."""
    if model := in_catalogue(name_or_path):
        return model.original
    path = Path(name_or_path).expanduser()
    return str(path.resolve()) if path.exists() else name_or_path


def open_checkpoint(path: Path) -> Checkpoint:
    """A GGUF file or a safetensors folder, with its header read and checked."""
    if path.is_dir():
        from foredraft.models.safetensors.checkpoint import SafetensorsCheckpoint

        return SafetensorsCheckpoint(path)
    if path.suffix.lower() in _PICKLE_SUFFIXES:
        raise InvalidModel(
            f"{path} is a pickle, which can run any code when it is opened, so it is refused; "
            "use the .safetensors or .gguf version of the model."
        )
    if path.suffix.lower() == ".safetensors":
        raise InvalidModel(f"{path} needs the config.json beside it; give the folder {path.parent} instead.")
    from foredraft.models.gguf.checkpoint import GGUFCheckpoint

    return GGUFCheckpoint(path)
