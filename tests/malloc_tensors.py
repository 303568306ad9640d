"""A pytest plugin for `make sanitize`: what the native kernels read and write lies in memory from malloc.

The address sanitizer watches malloc, but torch has an allocator of its own on some machines. Numpy has none.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from foredraft.backends.native import backend, describe, weights

_pointer = describe.pointer


def pytest_configure() -> None:
    for module in (backend, describe, weights):
        vars(module)["pointer"] = _pointer_into_malloc
    backend.torch = _Torch()  # type: ignore[assignment]


def _moved(tensor: Tensor) -> Tensor:
    """A contiguous copy whose memory ends where the tensor ends."""
    if tensor.numel() == 0:
        return tensor
    memory = np.empty(tensor.numel() * tensor.itemsize, np.uint8)
    return torch.from_numpy(memory).view(tensor.dtype).view(tensor.shape).copy_(tensor)


def _pointer_into_malloc(name: str, tensor: Tensor, dtype: torch.dtype, *shape: int) -> int:
    address = _pointer(name, tensor, dtype, *shape)
    if hasattr(tensor, "lies_in_malloc"):
        return address
    tensor.set_(_moved(tensor))
    tensor.lies_in_malloc = True  # type: ignore[attr-defined]
    return tensor.data_ptr()


class _Torch:
    """torch, for a module that asks it for memory."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    def empty(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return _moved(torch.empty(*shape, dtype=dtype))

    def empty_like(self, tensor: Tensor) -> Tensor:
        return _moved(torch.empty_like(tensor))
