"""What heads were measured to reach, kept on disk for those whose own config says nothing of it."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from foredraft.engine import disk_cache
from foredraft.engine.head_fit import Rates
from foredraft.heads.files import HeadFiles
from foredraft.models.sources import cache_folder


def with_kept_acceptance(heads: Mapping[str, HeadFiles]) -> dict[str, HeadFiles]:
    """The heads, with what was measured of those that do not say it themselves."""
    found = {kind: disk_cache.read(_file(), _key(files), _parse) for kind, files in heads.items()}
    return {
        kind: replace(files, config=replace(files.config, acceptance=files.config.acceptance or found[kind] or ()))
        for kind, files in heads.items()
    }


def keep_acceptance(heads: Mapping[str, HeadFiles], kind: str, rates: Rates) -> None:
    """Keep what was measured of a head, unless its config says it."""
    if kind in heads and not heads[kind].config.acceptance:
        disk_cache.write(_file(), _key(heads[kind]), list(rates))


def _file() -> Path:
    return cache_folder().parent / "acceptance.json"


def _key(files: HeadFiles) -> str:
    """Names a head by where it lies and when it was written, and its target by its sizes."""
    place = files.folder.resolve()
    parts = sorted(place.glob("*.safetensors")) if place.is_dir() else [place]
    written = [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in parts if file.is_file()]
    config = replace(files.config, acceptance=())
    return hashlib.sha256(repr((str(place), written, config)).encode()).hexdigest()[:24]


def _parse(value: Any) -> Rates | None:
    is_rates = isinstance(value, list) and all(isinstance(rate, float) and 0 <= rate <= 1 for rate in value)
    return tuple(value) if is_rates else None
