"""Which backend serves: the one place that knows them all."""

from __future__ import annotations

import importlib.util
import logging
import os
import platform
import sys

import torch

from foredraft.backends.base import Backend
from foredraft.backends.torch import TorchBackend
from foredraft.config import MAX_THREADS
from foredraft.errors import InvalidParameter
from foredraft.kernels.build import levels

log = logging.getLogger(__name__)

BACKENDS = ("native", "torch", "cuda")
OLDEST_CUDA = (8, 0)  # compute capability: the first with bfloat16 matrix instructions


def native_is_built() -> bool:
    """Whether the C kernels were built for this machine."""
    from foredraft.backends.native.library import load_library

    return load_library() is not None


def how_to_get_kernels() -> str:
    """What a person does about missing native kernels, in a sentence."""
    if not levels():
        return f"There are none for {platform.machine()} processors."
    return (
        "To get them, install a C compiler (Debian, Ubuntu: apt install gcc libc6-dev; Fedora: dnf install gcc; macOS: "
        f"xcode-select --install) and run: {sys.executable or 'python'} -m foredraft.kernels.build"
    )


def usable_cores() -> int:
    """How many cores this process may run on, where the system tells; no more than the kernels can use."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(cores, MAX_THREADS)


def choose_device(name: str) -> torch.device:
    """`auto` is the first CUDA device, else the CPU."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError:
        raise InvalidParameter(f"device={name!r} is not known; use auto, cpu or cuda.") from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise InvalidParameter("device='cuda' was asked for, but torch sees no CUDA device; use auto or cpu.")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise InvalidParameter(f"device={name!r} is not there: torch sees {torch.cuda.device_count()} CUDA device(s).")
    if device.type not in ("cpu", "cuda"):
        raise InvalidParameter(f"device={name!r} is not supported; use auto, cpu or cuda.")
    return device


def choose_backend(
    name: str, dtype: str, device: torch.device, threads: int | None, activations: str = "auto"
) -> Backend:
    """`auto` is the native kernels on a CPU for which they were built, the CUDA kernels on a GPU that can run them,
    else torch. `activations` are a choice of the native kernels alone; `auto` is their fastest."""
    threads = usable_cores() if threads is None else threads
    if name not in ("auto", *BACKENDS):
        raise InvalidParameter(f"backend={name!r} is not known; use auto, {', '.join(BACKENDS)}.")
    if device.type == "cpu":
        torch.set_num_threads(threads)
        if name in ("auto", "native") and native_is_built():
            from foredraft.backends.native.backend import NativeBackend

            return NativeBackend(dtype, threads, "int8" if activations == "auto" else activations)
        if name == "auto":
            log.warning(
                "The fast kernels are missing on this machine, so torch's serve: many times slower, and the first "
                "start takes a minute or more. %s",
                how_to_get_kernels(),
            )
    if name == "native" and device.type != "cpu":
        raise InvalidParameter(
            f"backend='native' runs on the CPU, not on {device}; use device='cpu' or backend='torch'."
        )
    if name == "native":
        raise InvalidParameter(
            "backend='native' was asked for, but its kernels are missing on this machine; use backend='torch'. "
            + how_to_get_kernels()
        )
    if activations != "auto":
        raise InvalidParameter(
            f"activations={activations!r} needs the native kernels, which do not serve here; use activations='auto'."
        )
    if device.type == "cuda" and name != "torch":
        problem = _cuda_problem(device)
        if problem is None:
            from foredraft.backends.cuda.backend import CudaBackend

            return CudaBackend(dtype, device)
        if name == "cuda":
            raise InvalidParameter(f"backend='cuda' cannot run here: {problem}; use backend='torch'.")
        log.warning("The fast kernels cannot run on %s (%s), so torch's serve.", device, problem)
    if name == "cuda" and device.type != "cuda":
        raise InvalidParameter(f"backend='cuda' runs on a GPU, not on {device}; use device='cuda' or backend='auto'.")
    return TorchBackend(dtype, device)


def _cuda_problem(device: torch.device) -> str | None:
    """Why the CUDA kernels cannot run on a device; None where they can."""
    capability = torch.cuda.get_device_capability(device)
    if capability < OLDEST_CUDA:
        have, need = (".".join(map(str, version)) for version in (capability, OLDEST_CUDA))
        return f"{torch.cuda.get_device_name(device)} has compute capability {have}, and {need} is needed"
    if importlib.util.find_spec("triton") is None:
        return "the package triton is not installed"
    return None
