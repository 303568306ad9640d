"""The CPU backend in C: checks tensors, hands their pointers to the kernels, and turns error codes into sentences.

The kernels give every row its own fixed sequence of operations, so a row's bits depend on that row alone. Activations
are float32; weights stay as they were packed (float32, bfloat16, 4 to 8 bits); K and V are float32 or bfloat16.

A small model runs some 300 verbs per token, so all layers of a run are one call (kernels/layers.c), and what does not
change between calls (layers, shapes, caches, the batch of a run) is checked and translated once and then remembered.
"""

from __future__ import annotations

import ctypes
import hashlib
import operator
import weakref
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Items
from ctypes import Structure, addressof, byref, c_int64, c_void_p
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from foredraft.backends.base import ROW_COUNTS, AttentionShape, LayerKV, Linear, Stack, T, Taps, Weight, move
from foredraft.backends.native_layers import StackDescription, TapsDescription, describe_shape, describe_stack
from foredraft.backends.native_library import (
    ERRORS,
    BatchDescription,
    CacheDescription,
    KVDescription,
    WeightDescription,
    load_library,
)
from foredraft.backends.native_memory import WeightMemory
from foredraft.backends.native_weights import BLOCK, KINDS, describe_plain
from foredraft.backends.tree_ops import TreeOps
from foredraft.batch import ForwardBatch, PackedBatch
from foredraft.config import QUANT_GROUP, check_threads
from foredraft.sampling.node_draws import LazyDraws, NodeDraw

PLANES = {"int8": 1, "int16": 2}  # activations that meet quantised weights -> bytes of each


@dataclass(frozen=True, eq=False)
class Packed:
    """A weight laid out by the kernels: its panels, and what the kernels need to know of them."""

    memory: Tensor
    outputs: int
    inputs: int
    reference: Any  # a ctypes pointer to the weight's description


def _pointer(name: str, tensor: Tensor, dtype: torch.dtype, *shape: int) -> int:
    """The address of a tensor that is exactly what a kernel expects."""
    if not isinstance(tensor, Tensor):
        raise ValueError(f"{name} must be a tensor, not {type(tensor).__name__}.")
    if tensor.dtype is not dtype or tensor.shape != shape or not tensor.is_contiguous() or not tensor.is_cpu:
        raise ValueError(
            f"{name} must be a contiguous {dtype} CPU tensor of shape {list(shape)}, "
            f"not {tensor.dtype} {list(tensor.shape)} on {tensor.device}."
        )
    return tensor.data_ptr()


def _matrix(name: str, tensor: Tensor) -> torch.Size:
    if not isinstance(tensor, Tensor) or tensor.dim() != 2:
        raise ValueError(f"{name} must be a matrix [rows, width].")
    return tensor.shape


def _check_parts(weight: Linear) -> None:
    if any(part.inputs != weight.inputs for part in weight.parts) or weight.outputs != sum(
        part.outputs for part in weight.parts
    ):
        parts = ", ".join(f"[{part.outputs}, {part.inputs}]" for part in weight.parts)
        raise ValueError(f"The parts {parts} do not make a layer [{weight.outputs}, {weight.inputs}].")


def _refusal(verb: str, code: int) -> Exception:
    kind = RuntimeError if code == 5 else ValueError
    return kind(f"The native kernel {verb} refused its input: {ERRORS.get(code, f'error {code}')}.")


class NativeBackend:
    """See backends/base.py for what each verb means."""

    name = "native"
    tree_ops: TreeOps | None = None
    row_counts: tuple[int, ...] = ROW_COUNTS

    def __init__(self, dtype: str, threads: int, activations: str = "int8", library: ctypes.CDLL | None = None) -> None:
        found = library or load_library()
        if found is None:
            raise RuntimeError("The native kernels are not built; run: python -m foredraft.kernels.build")
        check_threads(threads)
        self.device = torch.device("cpu")
        self.activation_dtype = torch.float32
        self.kv_dtype = torch.float32 if dtype == "float32" else torch.bfloat16
        digest = hashlib.sha256(Path(found._name).read_bytes()).hexdigest()[:16]
        self.build = f"{digest}-{activations}"  # of both depend the bits of a row, and what it costs
        self._library = found
        self._planes = PLANES[activations]
        self._memory = WeightMemory()
        self._references: dict[int, Any] = {}  # id of a shape, cache or batch -> what the kernels need to know of it
        if code := found.fd_set_threads(threads):
            raise _refusal("set_threads", code)

    def _reference(self, owner: Any, describe: Callable[[Any], Structure]) -> Any:
        """The ctypes pointer that stands for `owner`, made when it is first seen and forgotten when it is gone."""
        reference = self._references.get(id(owner))
        if reference is None:
            reference = self._references[id(owner)] = byref(describe(owner))
            weakref.finalize(owner, self._references.pop, id(owner), None).atexit = False
        return reference

    def pack(self, weight: Weight) -> Packed:
        if weight.kind not in KINDS:
            raise ValueError(f"A weight of kind {weight.kind!r} is not known; the kinds are {', '.join(KINDS)}.")
        kind, (outputs, inputs) = KINDS[weight.kind], _matrix("weight", weight.values)
        size = self._library.fd_packed_bytes(kind.number, outputs, inputs)
        if size < 0:
            raise ValueError(
                f"A {weight.kind} weight [{outputs}, {inputs}] cannot be packed: inputs come in "
                f"{'blocks' if kind.blocks else 'groups'} of {BLOCK if kind.blocks else QUANT_GROUP}."
            )
        memory = self._memory.take(size)
        plain = byref(describe_plain(weight, _pointer))
        if code := self._library.fd_pack(kind.number, outputs, inputs, plain, memory.data_ptr()):
            raise _refusal("pack", code)
        description = WeightDescription(memory.data_ptr(), outputs, inputs, kind.number, self._planes)
        return Packed(memory, outputs, inputs, byref(description))

    def linear(self, x: Tensor, weight: Linear) -> Tensor:
        rows, _ = _matrix("x", x)
        outputs = weight.outputs
        source = _pointer("x", x, torch.float32, rows, weight.inputs)
        bias = None if weight.bias is None else _pointer("bias", weight.bias, torch.float32, outputs)
        y = torch.empty(rows, outputs, dtype=torch.float32)
        target, column = y.data_ptr(), 0
        _check_parts(weight)
        for part in weight.parts:
            part_bias = None if bias is None else bias + 4 * column
            if rows and (
                code := self._library.fd_linear(part.reference, source, rows, part_bias, target + 4 * column, outputs)
            ):
                raise _refusal("linear", code)
            column += part.outputs
        return y

    def logits(self, x: Tensor, weight: Linear) -> Tensor:
        return self.linear(x, weight)

    def embed(self, token_ids: Tensor, weight: Linear) -> Tensor:
        rows = len(token_ids)
        ids = _pointer("token_ids", token_ids, torch.int64, rows)
        y = torch.empty(rows, weight.inputs, dtype=torch.float32)
        _check_parts(weight)
        first = 0
        for part in weight.parts if rows else ():
            if code := self._library.fd_embed(part.reference, first, weight.outputs, ids, rows, y.data_ptr()):
                raise _refusal("embed", code)
            first += part.outputs
        return y

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        rows, width = _matrix("x", x)
        source = _pointer("x", x, torch.float32, rows, width)
        scale = _pointer("weight", weight, torch.float32, width)
        y = torch.empty_like(x)
        if rows and (code := self._library.fd_rms_norm(source, scale, eps, rows, width, y.data_ptr())):
            raise _refusal("rms_norm", code)
        return y

    def add_rms_norm(
        self, x: Tensor, update: Tensor, multiplier: float, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        rows, width = _matrix("x", x)
        target = _pointer("x", x, torch.float32, rows, width)
        source = _pointer("update", update, torch.float32, rows, width)
        scale = _pointer("weight", weight, torch.float32, width)
        y = torch.empty_like(x)
        arguments = (target, source, multiplier, scale, eps, rows, width, y.data_ptr())
        if rows and (code := self._library.fd_add_rms_norm(*arguments)):
            raise _refusal("add_rms_norm", code)
        return x, y

    def gated(self, gate_up: Tensor) -> Tensor:
        rows, both = _matrix("gate_up", gate_up)
        if both % 2:
            raise ValueError(f"gate_up must have an even width, not {both}.")
        source = _pointer("gate_up", gate_up, torch.float32, rows, both)
        y = torch.empty(rows, both // 2, dtype=torch.float32)
        if rows and both and (code := self._library.fd_gated(source, rows, both // 2, y.data_ptr())):
            raise _refusal("gated", code)
        return y

    def silu(self, x: Tensor) -> Tensor:
        source = _pointer("x", x, torch.float32, *x.shape)
        y = torch.empty_like(x)
        if code := self._library.fd_silu(source, x.numel(), y.data_ptr()):
            raise _refusal("silu", code)
        return y

    def dots(self, vectors: Tensor, lanes: Tensor, x: Tensor) -> Tensor:
        num_lanes, count, width = vectors.shape
        rows, _ = _matrix("x", x)
        given = _pointer("vectors", vectors, torch.float32, num_lanes, count, width), num_lanes, count, width
        of_rows = _pointer("lanes", lanes, torch.int64, rows), _pointer("x", x, torch.float32, rows, width), rows
        y = torch.empty(rows, count, dtype=torch.float32)
        if rows and (code := self._library.fd_dots(*given, *of_rows, y.data_ptr())):
            raise _refusal("dots", code)
        return y

    def rope_and_store(
        self,
        qkv: Tensor,
        q_norm: Tensor | None,
        k_norm: Tensor | None,
        rope: Tensor,
        kv: LayerKV,
        shape: AttentionShape,
        batch: ForwardBatch,
    ) -> Tensor:
        rows, width = batch.num_rows, shape.num_heads * shape.head_dim
        source = _pointer("qkv", qkv, torch.float32, rows, width + 2 * shape.num_kv_heads * shape.head_dim)
        q_scale = None if q_norm is None else _pointer("q_norm", q_norm, torch.float32, shape.head_dim)
        k_scale = None if k_norm is None else _pointer("k_norm", k_norm, torch.float32, shape.head_dim)
        angles, positions = None, 0
        if shape.rotary_dim:
            positions = rope.shape[0]
            angles = _pointer("rope", rope, torch.float32, positions, 2, shape.rotary_dim // 2)
        q = torch.empty(rows, width, dtype=torch.float32)
        if rows and (
            code := self._library.fd_rope_and_store(
                *(source, q_scale, k_scale, angles, positions),
                *(self._reference(kv, self._describe_kv), self._reference(shape, describe_shape)),
                *(self._reference(batch, _describe_batch), q.data_ptr()),
            )
        ):
            raise _refusal("rope_and_store", code)
        return q

    def attend(self, q: Tensor, kv: LayerKV, shape: AttentionShape, batch: ForwardBatch) -> Tensor:
        rows, width = batch.num_rows, shape.num_heads * shape.head_dim
        source = _pointer("q", q, torch.float32, rows, width)
        out = torch.empty_like(q)
        if rows and (
            code := self._library.fd_attend(
                *(source, self._reference(kv, self._describe_kv), self._reference(shape, describe_shape)),
                *(self._reference(batch, _describe_batch), out.data_ptr()),
            )
        ):
            raise _refusal("attend", code)
        return out

    def store(self, x: Tensor, cache: Tensor, column: int, slots: Tensor) -> None:
        cache[:, column : column + x.shape[1]][slots] = x.to(cache.dtype)

    def read(self, cache: Tensor, parts: Tensor | None, slots: Tensor) -> Tensor:
        at = _pointer("slots", slots, torch.int64, len(slots))
        return self._read(self._library.fd_read, cache, parts, len(slots), at, len(slots))

    def read_previous(self, cache: Tensor, parts: Tensor | None, batch: ForwardBatch) -> Tensor:
        where = self._reference(batch, _describe_batch)
        return self._read(self._library.fd_read_previous, cache, parts, batch.num_rows, where)

    def _read(self, kernel: Any, cache: Tensor, parts: Tensor | None, rows: int, *where: Any) -> Tensor:
        description = self._reference(cache, self._describe_cache)
        count = cache.shape[1] if parts is None else len(parts)
        chosen = None if parts is None else _pointer("parts", parts, torch.int64, count)
        y = torch.empty(rows, count * cache.shape[2], dtype=torch.float32)
        if code := kernel(description, chosen, count, *where, y.data_ptr()):
            raise _refusal("read", code)
        return y

    def move(self, caches: Items[Tensor], moves: Items[tuple[int, int]]) -> None:
        move(caches, torch.tensor(moves, device=self.device).T)

    def top(self, logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
        return self._top(logits, count, False)

    def likely(self, logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
        return self._top(logits, count, True)

    def _top(self, logits: Tensor, count: int, probabilities: bool) -> tuple[Tensor, Tensor]:
        rows, columns = _matrix("logits", logits)
        if logits.dtype is not torch.float32 or not logits.is_cpu or logits.stride(1) != 1:
            raise ValueError(f"logits must be float32 rows in CPU memory, not {logits.dtype} on {logits.device}.")
        stride = logits.stride(0) if rows > 1 else columns  # rows may be part of wider ones
        count = min(count, columns)
        values, places = torch.empty(rows, count), torch.empty(rows, count, dtype=torch.int64)
        found = (values.data_ptr(), places.data_ptr())
        if rows and (
            code := self._library.fd_top(logits.data_ptr(), rows, columns, stride, count, probabilities, *found)
        ):
            raise _refusal("top", code)
        return values, places

    def run_layers(
        self, x: Tensor, stack: Stack, kv: Items[LayerKV], batch: ForwardBatch, taps: Taps | None = None
    ) -> tuple[Tensor, Tensor]:
        rows, (_, width) = batch.num_rows, _matrix("x", x)
        target = _pointer("x", x, torch.float32, rows, width)
        description = self._reference(stack, _describe_stack)
        if width != description._obj.width or len(kv) != len(stack.layers):
            raise ValueError(f"x {list(x.shape)} and {len(kv)} caches do not fit the stack of layers.")
        caches = self._caches_of(description._obj, kv)
        if taps is not None and taps.cache.shape[1:] != (len(taps.layers) * width,):
            raise ValueError(f"taps of {list(taps.cache.shape)} do not fit x {list(x.shape)}.")
        normed = torch.empty_like(x)
        if rows and (
            code := self._library.fd_run_layers(
                *(description, caches, byref(_describe_batch(batch))),
                None if taps is None else self._reference(taps, self._describe_taps),
                *(target, normed.data_ptr()),
            )
        ):
            raise _refusal("run_layers", code)
        return x, normed

    def _caches_of(self, stack: StackDescription, kv: Items[LayerKV]) -> Any:
        """The descriptions of a stack's caches, one behind the other. They stay the same from run to run."""
        if len(stack.kv) != len(kv) or not all(map(operator.is_, stack.kv, kv)):
            addresses = [addressof(self._reference(cache, self._describe_kv)._obj) for cache in kv]
            stack.kv, stack.caches = tuple(kv), (c_void_p * len(kv))(*addresses)
        return stack.caches

    def prepare(self, batch: PackedBatch, shape: AttentionShape) -> ForwardBatch:
        return batch.tensors()

    def replay(self, owner: object, plan: ForwardBatch, compute: Callable[[ForwardBatch], T]) -> T:
        return compute(plan)

    def warm_plans(self, shape: AttentionShape, block_size: int, max_keys: int) -> Iterable[ForwardBatch]:
        return ()

    def sample(self, logits: Tensor, nodes: Items[NodeDraw]) -> Items[int]:
        return LazyDraws(logits, nodes, self.draw)

    def draw(self, logits: Tensor, floor: float, temperature: float, key: int) -> int:
        source = _pointer("logits", logits, torch.float32, len(logits))
        token: int = self._library.fd_draw(source, len(logits), floor, temperature, key)
        if token < 0:
            raise ValueError(f"No logit reaches the floor {floor}, so there is no token to draw.")
        return token

    def _describe_kv(self, kv: LayerKV) -> KVDescription:
        if kv.k.dim() != 3:
            raise ValueError("k must be [slots, kv_heads, head_dim].")
        k, v = (_pointer(name, side, self.kv_dtype, *kv.k.shape) for name, side in (("k", kv.k), ("v", kv.v)))
        return KVDescription(k, v, *kv.k.shape, self.kv_dtype is torch.bfloat16)

    def _describe_taps(self, taps: Taps) -> TapsDescription:
        dtype = self._kept_as(taps.cache)
        data = _pointer("taps", taps.cache, dtype, *_matrix("taps", taps.cache))
        layers = (c_int64 * len(taps.layers))(*taps.layers)
        return TapsDescription(data, layers, len(layers), len(taps.cache), dtype is torch.bfloat16)

    def _describe_cache(self, cache: Tensor) -> CacheDescription:
        if cache.dim() != 3:
            raise ValueError("cache must be [slots, parts, width].")
        dtype = self._kept_as(cache)
        return CacheDescription(_pointer("cache", cache, dtype, *cache.shape), *cache.shape, dtype is torch.bfloat16)

    def _kept_as(self, cache: Tensor) -> torch.dtype:
        """What a cache of rows must hold: activations as they are, or as K and V are kept."""
        return self.activation_dtype if cache.dtype is self.activation_dtype else self.kv_dtype


def _describe_stack(stack: Stack) -> StackDescription:
    return describe_stack(stack, _pointer)


def _describe_batch(batch: ForwardBatch) -> BatchDescription:
    rows, (sequences, width) = batch.num_rows, _matrix("block_tables", batch.block_tables)
    _, depth = _matrix("paths", batch.paths)
    return BatchDescription(
        _pointer("token_ids", batch.token_ids, torch.int64, rows),
        _pointer("positions", batch.positions, torch.int64, rows),
        _pointer("slots", batch.slots, torch.int64, rows),
        _pointer("sequences", batch.sequences, torch.int32, rows),
        _pointer("block_tables", batch.block_tables, torch.int32, sequences, width),
        _pointer("prefix_lens", batch.prefix_lens, torch.int32, rows),
        _pointer("paths", batch.paths, torch.int32, rows, depth),
        _pointer("path_lens", batch.path_lens, torch.int32, rows),
        *(rows, sequences, width, depth, batch.block_size),
    )
