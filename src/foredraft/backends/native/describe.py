"""From tensors to what the kernels are told of them: pointers to a batch, and to a whole stack of layers for one call.

A description is as good as what it describes: it holds none of its tensors. Tensors are checked here, once; how shapes
fit together is checked by the kernel, in every call.
"""

from __future__ import annotations

from ctypes import Structure, addressof, c_void_p
from ctypes import pointer as pointer_to
from typing import Any

import torch
from torch import Tensor

from foredraft.backends.layers import ACTIVATIONS, AttentionShape, Experts, Layer, Linear, Mlp, Stack
from foredraft.backends.native.header import STRUCTURES
from foredraft.batch import ForwardBatch, PackedBatch


def pointer(name: str, tensor: Tensor, dtype: torch.dtype, *shape: int) -> int:
    """The address of a tensor that is exactly what a kernel expects."""
    if not isinstance(tensor, Tensor):
        raise ValueError(f"{name} must be a tensor, not {type(tensor).__name__}.")
    if tensor.dtype is not dtype or tensor.shape != shape or not tensor.is_contiguous() or not tensor.is_cpu:
        raise ValueError(
            f"{name} must be a contiguous {dtype} CPU tensor of shape {list(shape)}, "
            f"not {tensor.dtype} {list(tensor.shape)} on {tensor.device}."
        )
    return tensor.data_ptr()


def matrix(name: str, tensor: Tensor) -> torch.Size:
    if not isinstance(tensor, Tensor) or tensor.dim() != 2:
        raise ValueError(f"{name} must be a matrix [rows, width].")
    return tensor.shape


def describe_shape(shape: AttentionShape) -> Structure:
    return STRUCTURES["fd_attention"](
        *(shape.num_heads, shape.num_kv_heads, shape.head_dim, shape.rotary_dim, shape.window, shape.first_key),
        *(shape.scale, shape.norm_eps),
    )


def describe_projection(linear: Linear) -> Structure:
    parts = (c_void_p * len(linear.parts))(*(addressof(part.reference._obj) for part in linear.parts))
    bias = None if linear.bias is None else pointer("bias", linear.bias, torch.float32, linear.outputs)
    return STRUCTURES["fd_projection"](parts, bias, len(linear.parts), linear.outputs, linear.inputs)


def _mlp(mlp: Mlp) -> Structure:
    return STRUCTURES["fd_mlp"](describe_projection(mlp.gate_up), describe_projection(mlp.down))


def describe_experts(experts: Experts) -> Structure:
    """Raises ValueError for what no kernel should see."""
    if not experts.each:
        raise ValueError("There must be an expert.")
    count = len(experts.each)
    return STRUCTURES["fd_experts"](
        describe_projection(experts.router),
        (STRUCTURES["fd_mlp"] * count)(*map(_mlp, experts.each)),
        *(count, experts.num_chosen, experts.each[0].down.inputs),
        experts.normalised,
    )


def describe_stack(stack: Stack) -> Structure:
    """Raises ValueError for what no kernel should see."""
    if not stack.layers or stack.rope.dim() != 3:
        raise ValueError("A stack must have a layer, and its table of rotations three dimensions.")
    width, (positions, _, half) = stack.layers[0].output.outputs, stack.rope.shape

    def vector(name: str, values: Tensor | None, length: int) -> int | None:
        return None if values is None else pointer(name, values, torch.float32, length)

    def describe(layer: Layer) -> Structure:
        if isinstance(layer.mlp, Experts):
            mlp, experts = STRUCTURES["fd_mlp"](), pointer_to(describe_experts(layer.mlp))
        else:
            mlp, experts = _mlp(layer.mlp), None
        return STRUCTURES["fd_layer"](
            vector("input_norm", layer.input_norm, width),
            vector("q_norm", layer.q_norm, layer.shape.head_dim),
            vector("k_norm", layer.k_norm, layer.shape.head_dim),
            vector("sinks", layer.sinks, layer.shape.num_heads),
            vector("post_norm", layer.post_norm, width),
            vector("attention_update_norm", layer.attention_update_norm, width),
            vector("mlp_update_norm", layer.mlp_update_norm, width),
            *(describe_projection(layer.qkv), describe_projection(layer.output), mlp, experts),
            describe_shape(layer.shape),
            ACTIVATIONS.index(layer.activation),
        )

    window_rope = None
    if stack.window_rope is not None:
        window_rope = pointer("window_rope", stack.window_rope, torch.float32, positions, 2, half)
    entry: Any = None
    if stack.entry is not None:
        embedding, norm = describe_projection(stack.entry.embedding), vector("entry norm", stack.entry.norm, width)
        entry = pointer_to(STRUCTURES["fd_entry"](embedding, norm))
    return STRUCTURES["fd_stack"](
        (STRUCTURES["fd_layer"] * len(stack.layers))(*map(describe, stack.layers)),
        vector("norm", stack.norm, width),
        pointer("rope", stack.rope, torch.float32, positions, 2, half),
        window_rope,
        entry,
        *(len(stack.layers), width, positions, 2 * half),
        *(stack.residual_multiplier, stack.norm_eps),
    )


def describe_packed(batch: PackedBatch) -> Structure:
    """What `describe_batch` says of its tensors."""
    rows, (sequences, width), depth = batch.num_rows, batch.block_tables.shape, batch.paths.shape[1]
    wide, narrow, tables, paths = (
        each.ctypes.data for each in (batch.wide, batch.narrow, batch.block_tables, batch.paths)
    )
    return STRUCTURES["fd_batch"](
        *(wide + 8 * rows * place for place in range(3)),
        *(narrow, tables, narrow + 4 * rows, paths, narrow + 8 * rows),
        *(rows, sequences, width, depth, batch.block_size),
    )


def describe_batch(batch: ForwardBatch) -> Structure:
    rows, (sequences, width) = batch.num_rows, matrix("block_tables", batch.block_tables)
    _, depth = matrix("paths", batch.paths)
    return STRUCTURES["fd_batch"](
        pointer("token_ids", batch.token_ids, torch.int64, rows),
        pointer("positions", batch.positions, torch.int64, rows),
        pointer("slots", batch.slots, torch.int64, rows),
        pointer("sequences", batch.sequences, torch.int32, rows),
        pointer("block_tables", batch.block_tables, torch.int32, sequences, width),
        pointer("prefix_lens", batch.prefix_lens, torch.int32, rows),
        pointer("paths", batch.paths, torch.int32, rows, depth),
        pointer("path_lens", batch.path_lens, torch.int32, rows),
        *(rows, sequences, width, depth, batch.block_size),
    )
