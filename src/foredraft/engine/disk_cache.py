"""What is found out about a machine and a model once, and kept: one JSON file of results by key. Best effort."""

from __future__ import annotations

import hashlib
import json
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from foredraft.backends.base import Backend
from foredraft.kernels.build import processor_features, processor_model
from foredraft.models.decoder import Decoder


def machine_key(backend: Backend, decoder: Decoder, dtype: str, measured: object = None) -> str:
    """Names everything that a result may depend on: versions, device, backend, threads, the model's shapes and the
    kinds of its weights, and what was `measured` of it."""
    device: object = torch.cuda.get_device_name(backend.device) if backend.device.type == "cuda" else _processor()
    code = (_version(), backend.name, backend.build, device, torch.get_num_threads())
    parts = (*code, dtype, decoder.config, decoder.weight_kinds, measured)
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:24]


def _version() -> str:
    try:
        return version("foredraft")
    except PackageNotFoundError:  # run from its sources
        return ""


def _processor() -> tuple[object, ...]:
    """The processor's kind, model and abilities, as far as it tells."""
    capability = torch.backends.cpu.get_cpu_capability()
    return platform.machine(), processor_model(), capability, sorted(processor_features())


def read(file: Path, key: str) -> Any:
    """The result under a key; None if there is none, or no file that can be read."""
    return _content(file).get(key)


def write(file: Path, key: str, result: Any) -> None:
    """Add a result. In a read-only home it is found out again next time."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        partial = file.with_suffix(".part")
        partial.write_text(json.dumps({**_content(file), key: result}))
        partial.replace(file)
    except OSError:
        return


def _content(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(file.read_text())
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}
