"""Where the Triton kernels are tested: on a CUDA device, or with TRITON_INTERPRET=1 slowly on the CPU."""

from __future__ import annotations

import os

import pytest
import torch
from torch import Tensor

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = torch.device("cpu" if INTERPRETED else "cuda")
needs_kernels = [
    pytest.mark.gpu,
    pytest.mark.skipif(not INTERPRETED and not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def small(rows: int, *shape: int) -> Tensor:
    return torch.randn(rows, *shape, device=DEVICE)
