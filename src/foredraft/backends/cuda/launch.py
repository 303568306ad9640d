# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, import-not-found, import-untyped"
"""What all GPU kernels share: how one begins while the one before it still runs, and how they are compiled.

Kernels are launched with programmatic dependent launch where the device has it (compute capability 9): a kernel may
start while the one before it runs, and waits for that one's end in `begin`. Only then does it let the next one start,
so what kernels before the last one wrote may be read before `begin`: weights, caches of earlier runs, and plans, which
are never written by the kernel just before. A copy, such as the upload of a plan, ends before the kernel behind it
starts.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

LARGEST = 65504.0  # float16
_LARGEST = tl.constexpr(LARGEST)
LINES = tl.constexpr(8)  # of 128 bytes, that are fetched of every row of a weight


@triton.jit
def begin(PDL: tl.constexpr):
    """To be called by every program before it reads or writes what other kernels write or read, and before it ends."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()


@triton.jit
def stored(values, out):
    """`values` as `out` holds them. What float16 cannot hold becomes its largest number; what is no number stays none,
    so that a request learns of it."""
    if out.dtype.element_ty == tl.float16:
        values = tl.clamp(values, -_LARGEST, _LARGEST, propagate_nan=tl.PropagateNan.ALL)
    return values.to(out.dtype.element_ty)


@triton.jit
def stored_as_bfloat16(values, out):
    """`values` as `out` holds them, rounded to bfloat16 where that is float16: the bits of a linear layer that follows
    are those that it has with values of the cache's dtype."""
    if out.dtype.element_ty == tl.float16:
        values = values.to(tl.bfloat16).to(tl.float32)
    return stored(values, out)


@triton.jit
def activated(gate, up, out, ACTIVATION: tl.constexpr):
    """activation(gate) * up as `out` holds it; see layers.ACTIVATIONS. gelu by tanh is written by exp:
    z / (1 + exp(-2 * y)) for y = sqrt(2 / pi) * (z + 0.044715 * z**3)."""
    inner = gate
    if ACTIVATION == "gelu_tanh":
        inner = (gate + gate * gate * gate * 0.044715) * 1.5957691216057308
    if ACTIVATION == "clamped":
        gate = tl.minimum(gate, 7.0, propagate_nan=tl.PropagateNan.ALL)
        up = tl.clamp(up, -7.0, 7.0, propagate_nan=tl.PropagateNan.ALL) + 1
        inner = gate * 1.702
    return stored(gate / (1 + tl.exp(-inner)) * up, out)


@triton.jit
def prefetch(places, PDL: tl.constexpr):
    """The lines at `places` come to the cache, which takes no time where there is something else to wait for."""
    if PDL:
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.u32 $0, 0;",
            "=r,l",
            [places.to(tl.int64)],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )


@triton.jit
def prefetch_rows(rows, length, PDL: tl.constexpr):
    """The first lines of a weight's `rows` [outputs, 1], which are `length` values long."""
    LINE: tl.constexpr = 1024 // rows.dtype.element_ty.primitive_bitwidth
    prefetch(rows + tl.minimum(tl.arange(0, LINES) * LINE, length - 1)[None, :], PDL)


@lru_cache
def options(device: torch.device) -> dict[str, Any]:
    """How kernels are compiled for a device. Products and sums stay two roundings: a compiler that is free to fuse them
    may do so in one kernel and not in another, and the same row would get other bits."""
    dependent = device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)
    return {"enable_fp_fusion": False, "launch_pdl": dependent, "PDL": dependent}
