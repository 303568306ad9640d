"""Which package index has the PyTorch that this machine needs, as options for pip: `python tools/torch_index.py`.

On x86-64 Linux the build on PyPI brings gigabytes of CUDA libraries. Where there is no NVIDIA device, PyTorch's own
index of builds for CPUs serves better, if it can be reached. Everywhere else PyPI has the right one: nothing is
printed.
"""

import platform
import sys
from pathlib import Path
from urllib.error import URLError
from urllib.request import urlopen

CPU_BUILDS = "https://download.pytorch.org/whl/cpu"
_PATIENCE_S = 3


def wants_cpu_build(system: str, machine: str, has_nvidia: bool) -> bool:
    return system == "linux" and machine.lower() in ("x86_64", "amd64") and not has_nvidia


def can_be_reached(index: str) -> bool:
    try:
        with urlopen(f"{index}/torch/", timeout=_PATIENCE_S) as page:
            return bool(page.status == 200)
    except (URLError, TimeoutError, OSError):
        return False


if __name__ == "__main__":
    has_nvidia = Path("/proc/driver/nvidia/version").exists() or Path("/dev/nvidiactl").exists()
    if wants_cpu_build(sys.platform, platform.machine(), has_nvidia) and can_be_reached(CPU_BUILDS):
        print(f"--index-url {CPU_BUILDS} --extra-index-url https://pypi.org/simple")
