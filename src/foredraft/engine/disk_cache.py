"""What is found out about a machine and a model once, and kept: one JSON file of results by key. Best effort."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import tempfile
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, TypeVar

import torch

from foredraft.backends.base import Backend
from foredraft.kernels.build import processor_features, processor_model
from foredraft.models.decoder import Decoder

T = TypeVar("T")


def machine_key(backend: Backend, decoder: Decoder, dtype: str, measured: object = None) -> str:
    """Names everything that a result may depend on: versions, device, backend, threads, the model's shapes and the
    kinds of its weights, and what was `measured` of it."""
    if backend.device.type == "cuda":
        device: object = torch.cuda.get_device_name(backend.device)
    else:  # the processor's kind, model and abilities, as far as it tells
        capability = torch.backends.cpu.get_cpu_capability()
        device = platform.machine(), processor_model(), capability, sorted(processor_features())
    code = (_version(), backend.name, backend.build, device, torch.get_num_threads())
    parts = (*code, dtype, decoder.config, decoder.weight_kinds, measured)
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:24]


def _version() -> str:
    try:
        return version("foredraft")
    except PackageNotFoundError:  # run from its sources
        return ""


def read(file: Path, key: str, parse: Callable[[Any], T | None]) -> T | None:
    """The result under a key, as `parse` understands it; None if there is none. What `parse` gives None for is damaged,
    and counts as not there."""
    content = _content(file)
    return parse(content[key]) if key in content else None


def write(file: Path, key: str, result: Any) -> None:
    """Add a result. In a read-only home it is found out again next time.

    The file changes as a whole, by a temporary file that no other process uses. Of two processes that write at once
    one may lose its result, which is then found out again.
    """
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=file.parent, prefix=f".{file.stem}-") as folder:
            whole = Path(folder) / file.name
            whole.write_text(json.dumps({**_content(file), key: result}), encoding="utf-8")
            os.replace(whole, file)
    except (OSError, RecursionError):  # what others wrote may be nested too deeply
        return


def _content(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}
