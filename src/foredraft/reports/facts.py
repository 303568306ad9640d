"""Where something was measured, and with what: the machine and the versions, as far as they matter for speed."""

from __future__ import annotations

import os
import platform
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from foredraft.llm import LLM

_CONTAINER_LIMIT = Path("/sys/fs/cgroup/memory.max")
PACKAGES = ("foredraft", "torch", "numpy", "tokenizers")


def describe_machine(llm: LLM) -> dict[str, Any]:
    import torch

    device = llm.engine.runner.backend.device
    return {
        "cpu": cpu_name(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "memory_gb": round(memory_bytes() / 1e9, 1),
        "system": f"{platform.system()} {platform.machine()}",
        "device": str(device),
        "accelerator": None if device.type == "cpu" else torch.cuda.get_device_name(device),
    }


def memory_bytes() -> int:
    """What this machine has, or what a container lets its processes have of it."""
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        return min(physical, int(_CONTAINER_LIMIT.read_text()))
    except (OSError, ValueError):  # there is none, or it is "max"
        return physical


def describe_versions() -> dict[str, str]:
    from importlib.metadata import PackageNotFoundError, version  # takes 20 ms, which `--help` need not pay

    versions = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            continue
    return versions


def file_name(name: str) -> str:
    """A file or folder without where it lies: a report travels, and that is nobody's business."""
    return Path(name).name if Path(name).exists() else name


def cpu_name() -> str:
    """The processor's name as the system tells it, else its architecture."""
    try:
        told = subprocess.run(["lscpu"], capture_output=True, text=True, env={**os.environ, "LC_ALL": "C"}).stdout
    except OSError:
        told = ""
    names = [line.partition(":")[2].strip() for line in told.splitlines() if line.startswith("Model name")]
    return names[0] if names and names[0] not in ("", "-") else platform.processor() or platform.machine()
