"""The CPU backend in C: checks tensors, hands their pointers to the kernels, and turns error codes into sentences.

The kernels give every row its own fixed sequence of operations, so a row's bits depend on that row alone. Activations
are float32; weights stay as they were packed (float32, bfloat16, 4 to 8 bits); K and V are float32 or bfloat16.

A small model runs some 300 verbs per token, so all layers of a run are one call (kernels/layers.c), and what does not
change between calls (layers, shapes, caches, the batch of a run) is checked and translated once and then remembered.
"""

from __future__ import annotations

import ctypes
import operator
import weakref
from collections.abc import Callable
from collections.abc import Sequence as Items
from ctypes import Structure, addressof, byref, c_int64, c_void_p, cast
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from foredraft.backends.base import Backend, HeadNorms
from foredraft.backends.layers import (
    ACTIVATIONS,
    AttentionShape,
    Experts,
    LayerKV,
    Linear,
    Stack,
    Taps,
    window_map_of,
)
from foredraft.backends.native.describe import (
    describe_batch,
    describe_experts,
    describe_shape,
    describe_stack,
    matrix,
    pointer,
)
from foredraft.backends.native.header import STRUCTURES
from foredraft.backends.native.library import ERRORS, OUT_OF_MEMORY, load_library
from foredraft.backends.native.sample import Draws, likely, logit_rows
from foredraft.backends.native.trees import HeadMemory, NativeTrees
from foredraft.backends.native.weights import BLOCK, KINDS, Packed, WeightMemory, describe_plain
from foredraft.backends.tree_growth import TapsHead
from foredraft.backends.weight import Weight
from foredraft.batch import ForwardBatch
from foredraft.config import QUANT_GROUP, check_threads
from foredraft.sampling.draw import NodeDraw
from foredraft.sampling.likely import Drawing

PLANES = {"int8": 1, "int16": 2}  # activations that meet quantised weights -> bytes of each


def _check_parts(weight: Linear) -> None:
    if any(part.inputs != weight.inputs for part in weight.parts) or weight.outputs != sum(
        part.outputs for part in weight.parts
    ):
        parts = ", ".join(f"[{part.outputs}, {part.inputs}]" for part in weight.parts)
        raise ValueError(f"The parts {parts} do not make a layer [{weight.outputs}, {weight.inputs}].")


class NativeBackend(Backend):
    """See backends/base.py for what each verb means."""

    name = "native"

    def __init__(self, dtype: str, threads: int, activations: str = "int8", library: ctypes.CDLL | None = None) -> None:
        found = library or load_library()
        if found is None:
            raise RuntimeError("The native kernels are not built; run: python -m foredraft.kernels.build")
        check_threads(threads)
        self.device = torch.device("cpu")
        self.activation_dtype = torch.float32
        self.kv_dtype = torch.float32 if dtype == "float32" else torch.bfloat16
        # On all of these depend the bits of a row, and what it costs: the sources, the level and its compiler.
        self.build = f"{found.fd_sources().decode()} {found.fd_build().decode()} {activations}"
        self._library = found
        self._planes = PLANES[activations]
        self._memory = WeightMemory()
        self._references: dict[int, Any] = {}  # id of a shape, cache or batch -> what the kernels need to know of it
        self._caches = weakref.WeakKeyDictionary[Stack, tuple[tuple[LayerKV, ...], Any, tuple[int | None, int]]]()
        self._call("set_threads", threads)

    def _call(self, verb: str, *arguments: Any) -> None:
        """Run a kernel; its error code becomes a sentence."""
        if code := getattr(self._library, f"fd_{verb}")(*arguments):
            kind = RuntimeError if code == OUT_OF_MEMORY else ValueError
            raise kind(f"The native kernel {verb} refused its input: {ERRORS.get(code, f'error {code}')}.")

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
        kind, (outputs, inputs) = KINDS[weight.kind], matrix("weight", weight.values)
        size = self._library.fd_packed_bytes(kind.number, outputs, inputs)
        if size < 0:
            raise ValueError(
                f"A {weight.kind} weight [{outputs}, {inputs}] cannot be packed: inputs come in "
                f"{'blocks' if kind.blocks else 'groups'} of {BLOCK if kind.blocks else QUANT_GROUP}."
            )
        memory = self._memory.take(size)
        plain = byref(describe_plain(weight))
        self._call("pack", kind.number, outputs, inputs, plain, memory.data_ptr())
        description = STRUCTURES["fd_weight"](memory.data_ptr(), outputs, inputs, kind.number, self._planes)
        return Packed(memory, outputs, inputs, byref(description))

    def linear(self, x: Tensor, weight: Linear) -> Tensor:
        rows, _ = matrix("x", x)
        outputs = weight.outputs
        source = pointer("x", x, torch.float32, rows, weight.inputs)
        bias = None if weight.bias is None else pointer("bias", weight.bias, torch.float32, outputs)
        y = torch.empty(rows, outputs, dtype=torch.float32)
        target, column = y.data_ptr(), 0
        _check_parts(weight)
        for part in weight.parts if rows else ():
            part_bias = None if bias is None else bias + 4 * column
            self._call("linear", part.reference, source, rows, part_bias, target + 4 * column, outputs)
            column += part.outputs
        return y

    def embed(self, token_ids: Tensor, weight: Linear) -> Tensor:
        rows = len(token_ids)
        ids = pointer("token_ids", token_ids, torch.int64, rows)
        y = torch.empty(rows, weight.inputs, dtype=torch.float32)
        _check_parts(weight)
        first = 0
        for part in weight.parts if rows else ():
            self._call("embed", part.reference, first, weight.outputs, ids, rows, y.data_ptr())
            first += part.outputs
        return y

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        rows, width = matrix("x", x)
        source = pointer("x", x, torch.float32, rows, width)
        scale = pointer("weight", weight, torch.float32, width)
        y = torch.empty_like(x)
        if rows:
            self._call("rms_norm", source, scale, eps, rows, width, y.data_ptr())
        return y

    def add_rms_norm(
        self, x: Tensor, update: Tensor, multiplier: float, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        rows, width = matrix("x", x)
        target = pointer("x", x, torch.float32, rows, width)
        source = pointer("update", update, torch.float32, rows, width)
        scale = pointer("weight", weight, torch.float32, width)
        y = torch.empty_like(x)
        if rows:
            self._call("add_rms_norm", target, source, multiplier, scale, eps, rows, width, y.data_ptr())
        return x, y

    def gated(self, gate_up: Tensor, activation: str = "silu") -> Tensor:
        rows, both = matrix("gate_up", gate_up)
        if both % 2:
            raise ValueError(f"gate_up must have an even width, not {both}.")
        source = pointer("gate_up", gate_up, torch.float32, rows, both)
        y = torch.empty(rows, both // 2, dtype=torch.float32)
        if rows and both:
            self._call("gated", source, rows, both // 2, ACTIVATIONS.index(activation), y.data_ptr())
        return y

    def mix_experts(self, x: Tensor, experts: Experts, activation: str) -> Tensor:
        rows, _ = matrix("x", x)
        source = pointer("x", x, torch.float32, rows, experts.router.inputs)
        y = torch.empty_like(x)
        description = self._reference(experts, describe_experts)
        if rows:
            self._call("mix_experts", description, source, rows, ACTIVATIONS.index(activation), y.data_ptr())
        return y

    def silu(self, x: Tensor) -> Tensor:
        source = pointer("x", x, torch.float32, *x.shape)
        y = torch.empty_like(x)
        self._call("silu", source, x.numel(), y.data_ptr())
        return y

    def dots(self, vectors: Tensor, lanes: Tensor, x: Tensor) -> Tensor:
        num_lanes, count, width = vectors.shape
        rows, _ = matrix("x", x)
        given = pointer("vectors", vectors, torch.float32, num_lanes, count, width), num_lanes, count, width
        of_rows = pointer("lanes", lanes, torch.int64, rows), pointer("x", x, torch.float32, rows, width), rows
        y = torch.empty(rows, count, dtype=torch.float32)
        if rows:
            self._call("dots", *given, *of_rows, y.data_ptr())
        return y

    def rope_and_store(
        self, qkv: Tensor, norms: HeadNorms, rope: Tensor, kv: LayerKV, shape: AttentionShape, batch: ForwardBatch
    ) -> Tensor:
        rows, width = batch.num_rows, shape.num_heads * shape.head_dim
        source = pointer("qkv", qkv, torch.float32, rows, width + 2 * shape.num_kv_heads * shape.head_dim)
        scales = [
            None if norm is None else pointer(name, norm, torch.float32, shape.head_dim)
            for name, norm in zip(("q_norm", "k_norm"), norms, strict=True)
        ]
        angles, positions = None, 0
        if shape.rotary_dim:
            positions = rope.shape[0]
            angles = pointer("rope", rope, torch.float32, positions, 2, shape.rotary_dim // 2)
        q = torch.empty(rows, width, dtype=torch.float32)
        if rows:
            where = self._where(kv, shape, batch)
            self._call("rope_and_store", source, *scales, angles, positions, *where, q.data_ptr())
        return q

    def attend(
        self, q: Tensor, kv: LayerKV, shape: AttentionShape, batch: ForwardBatch, sinks: Tensor | None = None
    ) -> Tensor:
        rows, width = batch.num_rows, shape.num_heads * shape.head_dim
        source = pointer("q", q, torch.float32, rows, width)
        weights = None if sinks is None else pointer("sinks", sinks, torch.float32, shape.num_heads)
        out = torch.empty_like(q)
        if rows:
            self._call("attend", source, weights, *self._where(kv, shape, batch), out.data_ptr())
        return out

    def _where(self, kv: LayerKV, shape: AttentionShape, batch: ForwardBatch) -> tuple[Any, Any, Any]:
        """What kernels are told of a layer's cache, of its shape, and of the batch."""
        references = self._reference(kv, self._describe_kv), self._reference(shape, describe_shape)
        return *references, self._reference(batch, describe_batch)

    def read(self, cache: Tensor, parts: Tensor | None, slots: Tensor) -> Tensor:
        at = pointer("slots", slots, torch.int64, len(slots))
        return self._read("read", cache, parts, len(slots), at, len(slots))

    def read_previous(self, cache: Tensor, parts: Tensor | None, batch: ForwardBatch) -> Tensor:
        where = self._reference(batch, describe_batch)
        return self._read("read_previous", cache, parts, batch.num_rows, where)

    def _read(self, verb: str, cache: Tensor, parts: Tensor | None, rows: int, *where: Any) -> Tensor:
        description = self._reference(cache, self._describe_cache)
        count = cache.shape[1] if parts is None else len(parts)
        chosen = None if parts is None else pointer("parts", parts, torch.int64, count)
        y = torch.empty(rows, count * cache.shape[2], dtype=torch.float32)
        self._call(verb, description, chosen, count, *where, y.data_ptr())
        return y

    def move(self, caches: Items[Tensor], moves: Items[tuple[int, int]]) -> None:
        slots = (c_int64 * (2 * len(moves)))(*chain.from_iterable(moves))
        for cache in caches:
            data = pointer("cache", cache, cache.dtype, *cache.shape)
            size = cache.stride(1) * cache.element_size()
            self._call("move", data, *cache.shape[:2], size, slots, len(moves))

    def likely(
        self, logits: Tensor, drawings: Items[Drawing], count: int, token_ids: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        return likely(self._call, logits, drawings, count, token_ids)

    def top(self, logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
        rows, columns, stride = logit_rows(logits)
        count = min(count, columns)
        values, places = torch.empty(rows, count), torch.empty(rows, count, dtype=torch.int64)
        if rows:
            found = values.data_ptr(), places.data_ptr()
            self._call("top", logits.data_ptr(), rows, columns, stride, count, False, *found)
        return values, places

    def run_layers(
        self, x: Tensor, stack: Stack, kv: Items[LayerKV], batch: ForwardBatch, taps: Taps | None = None
    ) -> tuple[Tensor, Tensor]:
        rows, (_, width) = batch.num_rows, matrix("x", x)
        target = pointer("x", x, torch.float32, rows, width)
        description = self._reference(stack, describe_stack)
        if width != description._obj.width or len(kv) != len(stack.layers):
            raise ValueError(f"x {list(x.shape)} and {len(kv)} caches do not fit the stack of layers.")
        caches, window_map = self._caches_of(stack, kv)
        if taps is not None and taps.cache.shape[1:] != (len(taps.layers) * width,):
            raise ValueError(f"taps of {list(taps.cache.shape)} do not fit x {list(x.shape)}.")
        normed = torch.empty_like(x)
        if rows:
            where = byref(describe_batch(batch))
            tapped = None if taps is None else self._reference(taps, self._describe_taps)
            self._call("run_layers", description, caches, where, *window_map, tapped, target, normed.data_ptr())
        return x, normed

    def _caches_of(self, stack: Stack, kv: Items[LayerKV]) -> tuple[Any, tuple[int | None, int]]:
        """An array of pointers to the descriptions of a stack's caches, and the window map that some of them have, with
        its length. They mostly stay the same from run to run."""
        known, caches, window_map = self._caches.get(stack, ((), None, (None, 0)))
        if len(known) != len(kv) or not all(map(operator.is_, known, kv)):
            addresses = [addressof(self._reference(cache, self._describe_kv)._obj) for cache in kv]
            caches, window_map = (c_void_p * len(kv))(*addresses), (None, 0)
            if (found := window_map_of(kv)) is not None:
                count = len(found.on_device)
                window_map = pointer("window_map", found.on_device, torch.int32, count), count
            self._caches[stack] = tuple(kv), caches, window_map
        return caches, window_map

    def tree_grower(self, head: TapsHead) -> NativeTrees | None:
        caches, window_map = self._caches_of(head.stack, head.kv)
        if window_map != (None, 0):
            return None
        taps, stack = self._describe_cache(head.taps), describe_stack(head.stack)
        kept, outputs = self._describe_taps(head.outputs), self._describe_cache(head.outputs.cache[:, None])
        return NativeTrees(self._call, head, HeadMemory(taps, stack, caches, kept, outputs))

    def sample(self, logits: Tensor, nodes: Items[NodeDraw], replayed_rows: int = 0) -> Draws:
        return Draws(self._call, logits, nodes)

    def _describe_kv(self, kv: LayerKV) -> Structure:
        if kv.k.dim() != 3:
            raise ValueError("k must be [slots, kv_heads, head_dim].")
        k, v = (pointer(name, side, self.kv_dtype, *kv.k.shape) for name, side in (("k", kv.k), ("v", kv.v)))
        return STRUCTURES["fd_kv"](k, v, *kv.k.shape, self.kv_dtype is torch.bfloat16, kv.window_map is not None)

    def _describe_taps(self, taps: Taps) -> Structure:
        dtype = self._kept_as(taps.cache)
        data = pointer("taps", taps.cache, dtype, *matrix("taps", taps.cache))
        count, slots = len(taps.layers), len(taps.cache)
        layers = cast((c_int64 * count)(*taps.layers), c_void_p)  # it keeps the array
        return STRUCTURES["fd_taps"](data, layers, count, slots, dtype is torch.bfloat16)

    def _describe_cache(self, cache: Tensor) -> Structure:
        if cache.dim() != 3:
            raise ValueError("cache must be [slots, parts, width].")
        dtype = self._kept_as(cache)
        data = pointer("cache", cache, dtype, *cache.shape)
        return STRUCTURES["fd_cache"](data, *cache.shape, dtype is torch.bfloat16)

    def _kept_as(self, cache: Tensor) -> torch.dtype:
        """What a cache of rows must hold: activations as they are, or as K and V are kept."""
        return self.activation_dtype if cache.dtype is self.activation_dtype else self.kv_dtype
