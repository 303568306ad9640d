# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, import-not-found, import-untyped"
"""What all GPU kernels share: how one begins while the one before it still runs, and how they are compiled.

Kernels are launched with programmatic dependent launch where the device has it (compute capability 9): each lets the
next one start at once, and waits for the one before it to end before it touches what that one writes. What it reads of
the weights may be fetched before.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

LINES = tl.constexpr(8)  # of 128 bytes, that are fetched of every row of a weight


@triton.jit
def begin(PDL: tl.constexpr):
    """To be called by every program before it reads or writes what other kernels write or read."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()


@triton.jit
def begin_with_weight(rows, length, PDL: tl.constexpr, BO: tl.constexpr):
    """`begin`, and meanwhile the first lines of a weight's `rows` [BO, 1], which are `length` values long, come to the
    cache."""
    if PDL:
        gdc_launch_dependents()
        LINE: tl.constexpr = 1024 // rows.dtype.element_ty.primitive_bitwidth
        places = rows + tl.minimum(tl.arange(0, LINES) * LINE, length - 1)[None, :]
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.u32 $0, 0;",
            "=r,l",
            [places.to(tl.int64)],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
        gdc_wait()


@lru_cache
def options(device: torch.device) -> dict[str, Any]:
    """How kernels are compiled for a device. Products and sums stay two roundings: a compiler that is free to fuse them
    may do so in one kernel and not in another, and the same row would get other bits."""
    dependent = device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)
    return {"enable_fp_fusion": False, "launch_pdl": dependent, "PDL": dependent}
