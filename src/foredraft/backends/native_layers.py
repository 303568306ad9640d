"""What the kernels are told of a stack of layers, so that one call runs them all: pointers to everything they hold.

A description is as good as its stack: it holds none of its tensors. Tensors are checked here, once; how shapes fit
together is checked by the kernel, in every call.
"""

from __future__ import annotations

from collections.abc import Callable
from ctypes import POINTER, Structure, addressof, c_float, c_int32, c_int64, c_void_p
from ctypes import pointer as pointer_to
from typing import Any

import torch
from torch import Tensor

from foredraft.backends.base import AttentionShape, Layer, LayerKV, Linear, Stack

Pointer = Callable[..., int]  # name, tensor, dtype, *shape -> the address of a tensor that is exactly that


class AttentionDescription(Structure):
    _fields_ = [
        *((name, c_int64) for name in ("heads", "kv_heads", "head_dim", "rotary_dim", "window", "first_key")),
        *((name, c_float) for name in ("scale", "norm_eps")),
    ]


class _Projection(Structure):
    _fields_ = [
        ("parts", POINTER(c_void_p)),
        ("bias", c_void_p),
        *((name, c_int64) for name in ("num_parts", "outputs", "inputs")),
    ]


class _Layer(Structure):
    _fields_ = [
        *((name, c_void_p) for name in ("input_norm", "q_norm", "k_norm", "post_norm")),
        *((name, _Projection) for name in ("qkv", "output", "gate_up", "down")),
        ("shape", AttentionDescription),
    ]


class _Entry(Structure):
    _fields_ = [("embedding", _Projection), ("norm", c_void_p)]


class StackDescription(Structure):
    _fields_ = [
        ("layers", POINTER(_Layer)),
        *((name, c_void_p) for name in ("norm", "rope")),
        ("entry", POINTER(_Entry)),
        *((name, c_int64) for name in ("count", "width", "rope_positions", "rotary_dim")),
        *((name, c_float) for name in ("multiplier", "eps")),
    ]
    kv: tuple[LayerKV, ...] = ()  # of the last run
    caches: Any = None  # an array of pointers to their descriptions


class TapsDescription(Structure):
    _fields_ = [
        ("data", c_void_p),
        ("layers", POINTER(c_int64)),
        *((name, c_int64) for name in ("count", "slots")),
        ("is_bf16", c_int32),
    ]


def describe_shape(shape: AttentionShape) -> AttentionDescription:
    return AttentionDescription(
        *(shape.num_heads, shape.num_kv_heads, shape.head_dim, shape.rotary_dim, shape.window, shape.first_key),
        *(shape.scale, shape.norm_eps),
    )


def describe_stack(stack: Stack, pointer: Pointer) -> StackDescription:
    """`pointer` checks a tensor and gives its address. Raises ValueError for what no kernel should see."""
    if not stack.layers or stack.rope.dim() != 3:
        raise ValueError("A stack must have a layer, and its table of rotations three dimensions.")
    width, (positions, _, half) = stack.layers[0].output.outputs, stack.rope.shape

    def vector(name: str, values: Tensor | None, length: int) -> int | None:
        return None if values is None else pointer(name, values, torch.float32, length)

    def projection(linear: Linear) -> _Projection:
        parts = (c_void_p * len(linear.parts))(*(addressof(part.reference._obj) for part in linear.parts))
        bias = vector("bias", linear.bias, linear.outputs)
        return _Projection(parts, bias, len(linear.parts), linear.outputs, linear.inputs)

    def describe(layer: Layer) -> _Layer:
        return _Layer(
            vector("input_norm", layer.input_norm, width),
            vector("q_norm", layer.q_norm, layer.shape.head_dim),
            vector("k_norm", layer.k_norm, layer.shape.head_dim),
            vector("post_norm", layer.post_norm, width),
            *(projection(linear) for linear in (layer.qkv, layer.output, layer.gate_up, layer.down)),
            describe_shape(layer.shape),
        )

    def entry() -> Any:
        if stack.entry is None:
            return None
        return pointer_to(_Entry(projection(stack.entry.embedding), vector("entry norm", stack.entry.norm, width)))

    return StackDescription(
        (_Layer * len(stack.layers))(*map(describe, stack.layers)),
        vector("norm", stack.norm, width),
        pointer("rope", stack.rope, torch.float32, positions, 2, half),
        entry(),
        *(len(stack.layers), width, positions, 2 * half),
        *(stack.residual_multiplier, stack.norm_eps),
    )
