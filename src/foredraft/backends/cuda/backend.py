"""The GPU backend: Triton kernels behind the verbs of backends/base.py.

The residual stream is float32; what linear layers and attention read is rounded to bfloat16, and all their sums are
float32. A row's bits depend on that row alone: linear layers add over their inputs in an order that is fixed by the
layer's shape (linear, pack), attention over fixed blocks of keys (attention), norms row by row.

A run of few rows is replayed as a captured graph (graphs). Nothing in it waits for the device or depends on its
data: the number of rows is that of a bucket, and which keys they see is read on the device.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Items
from pathlib import Path
from weakref import WeakKeyDictionary

import torch
import triton  # type: ignore[import-not-found,unused-ignore]
from torch import Tensor
from torch.nn import functional

from foredraft.backends.base import Backend, HeadNorms, T, batches_of_layers, entered, next_norm, store_tap
from foredraft.backends.cuda import linear, rows
from foredraft.backends.cuda.attention import attend_split, attend_whole
from foredraft.backends.cuda.experts import Layers, layers_of, mix
from foredraft.backends.cuda.graphs import Graphs, Moves
from foredraft.backends.cuda.pack import Packed, pack
from foredraft.backends.cuda.plan import ROW_BUCKETS, Plan, Plans
from foredraft.backends.cuda.sample import Draws
from foredraft.backends.cuda.trees import CudaTreeOps
from foredraft.backends.layers import AttentionShape, Experts, LayerKV, Linear, Mlp, Stack, Taps
from foredraft.backends.tree_ops import TreeOps
from foredraft.backends.weight import Weight
from foredraft.batch import ForwardBatch, PackedBatch
from foredraft.sampling.draw import NodeDraw


class CudaBackend(Backend):
    """See backends/base.py for what each verb means. A batch is one that `prepare` made."""

    name = "cuda"
    runs_ahead = True
    row_counts: tuple[int, ...] = ROW_BUCKETS

    def __init__(self, dtype: str, device: torch.device) -> None:
        if device == torch.device("cuda"):  # whichever is current now
            device = torch.device("cuda", torch.cuda.current_device())
        self.device = device
        self._index = device.index if device.type == "cuda" else None
        self.activation_dtype = torch.float32
        self.kv_dtype = torch.float32 if dtype == "float32" else torch.bfloat16
        self.build = _build()
        self._plans = Plans(self.device, self.kv_dtype)
        self._graphs = Graphs()
        self._draws = Draws(self.device)
        self._moves = Moves(self.device)
        self._experts = WeakKeyDictionary[Experts, Layers]()
        self.tree_ops: TreeOps | None = CudaTreeOps()

    def prepare(self, batch: PackedBatch, shape: AttentionShape) -> Plan:
        self._select()
        return self._plans.plan(batch, shape)

    def replay(self, owner: object, plan: ForwardBatch, compute: Callable[[ForwardBatch], T]) -> T:
        self._select()
        return self._graphs.run(owner, _as_plan(plan), compute)

    def pack(self, weight: Weight) -> Packed:
        self._select()
        return pack(weight, self.device)

    def linear(self, x: Tensor, weight: Linear) -> Tensor:
        self._select()
        return rows.collect(linear.sums(x, weight))

    def logits(self, x: Tensor, weight: Linear) -> Tensor:
        sums = linear.sums(x, weight)
        return sums[0] if len(sums) == 1 else rows.collect(sums)

    def embed(self, token_ids: Tensor, weight: Linear) -> Tensor:
        return rows.embed(token_ids, weight)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return rows.add_norm(x, None, 1.0, weight, eps, self.kv_dtype).float()

    def add_rms_norm(
        self, x: Tensor, update: Tensor, multiplier: float, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        return x, rows.add_norm(x, update[None], multiplier, weight, eps, self.kv_dtype).float()

    def rope_and_store(
        self, qkv: Tensor, norms: HeadNorms, rope: Tensor, kv: LayerKV, shape: AttentionShape, batch: ForwardBatch
    ) -> Tensor:
        return rows.rope_and_store(qkv[None], norms, rope, kv, shape, batch.positions, batch.slots).float()

    def attend(
        self, q: Tensor, kv: LayerKV, shape: AttentionShape, batch: ForwardBatch, sinks: Tensor | None = None
    ) -> Tensor:
        return self._attend(q.to(self.kv_dtype), kv, shape, _as_plan(batch), sinks, self.kv_dtype).float()

    def _attend(
        self, q: Tensor, kv: LayerKV, shape: AttentionShape, plan: Plan, sinks: Tensor | None, dtype: torch.dtype
    ) -> Tensor:
        out = torch.empty_like(q, dtype=dtype)
        if plan.split is not None:
            attend_split(q, kv, shape, plan, sinks, plan.split, out)
        if plan.whole is not None:
            attend_whole(q, kv, shape, plan, sinks, plan.whole, out)
        return out

    def gated(self, gate_up: Tensor, activation: str = "silu") -> Tensor:
        return rows.gated(gate_up[None], torch.float32, activation)

    def mix_experts(self, x: Tensor, experts: Experts, activation: str) -> Tensor:
        if not len(x):
            return x
        return rows.collect(self._mix(x, experts, activation, slots=None))

    def _mix(self, x: Tensor, experts: Experts, activation: str, slots: Tensor | None) -> Tensor:
        if experts not in self._experts:
            self._experts[experts] = layers_of(experts)
        layers = self._experts[experts]
        x = linear.rounded(x, self._operand_dtype(layers.gate_up))
        return mix(x, experts, layers, self._operand_dtype(layers.down), activation, slots)

    def silu(self, x: Tensor) -> Tensor:
        return functional.silu(x)  # on a GPU every element is computed alike

    def dots(self, vectors: Tensor, lanes: Tensor, x: Tensor) -> Tensor:
        return rows.dots(vectors, lanes, x)

    def store(self, x: Tensor, cache: Tensor, column: int, slots: Tensor) -> None:
        rows.store(x, cache, column, slots)

    def move(self, caches: Items[Tensor], moves: Items[tuple[int, int]]) -> None:
        self._select()
        self._moves.move(caches, moves)

    def top(self, logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
        best = logits.topk(min(count, logits.shape[1]))
        return best.values, best.indices

    def run_layers(
        self, x: Tensor, stack: Stack, kv: Items[LayerKV], batch: ForwardBatch, taps: Taps | None = None
    ) -> tuple[Tensor, Tensor]:
        """x is changed in place. What a linear layer reads is stored as it reads it; the last norm as the last layer's
        would be."""
        plan, of = _as_plan(batch), self._operand_dtype
        layers, multiplier, eps = stack.layers, stack.residual_multiplier, stack.norm_eps
        store_tap(self, taps, 0, x, batch)
        first = layers[0].input_norm
        if stack.entry is None and first is not None:
            normed = rows.add_norm(x, None, 1.0, first, eps, of(layers[0].qkv))
        else:
            normed = entered(self, x, stack, batch)
        plans = batches_of_layers(kv, plan)
        for index, (layer, cache, its_plan) in enumerate(zip(layers, kv, plans, strict=True)):
            qkv = linear.sums(normed, layer.qkv)
            norms, rope = (layer.q_norm, layer.k_norm), stack.rope_of(layer)
            q = rows.rope_and_store(qkv, norms, rope, cache, layer.shape, plan.positions, its_plan.slots)
            attended = self._attend(q, cache, layer.shape, its_plan, layer.sinks, of(layer.output))
            update = self._normed_update(linear.sums(attended, layer.output), layer.attention_update_norm, eps)
            mlp = layer.mlp
            some_mlp = mlp if isinstance(mlp, Mlp) else mlp.each[0]
            normed = rows.add_norm(x, update, multiplier, layer.post_norm, eps, of(some_mlp.gate_up))
            if isinstance(mlp, Experts):
                update = self._mix(normed, mlp, layer.activation, plan.slots)
            else:
                update = self._run_mlp(normed, mlp, layer.activation)
            update = self._normed_update(update, layer.mlp_update_norm, eps)
            following = layers[min(index + 1, len(layers) - 1)]
            normed = rows.add_norm(x, update, multiplier, next_norm(stack, index), eps, of(following.qkv))
            store_tap(self, taps, index + 1, x, batch)
        return x, normed

    def _run_mlp(self, normed: Tensor, mlp: Mlp, activation: str) -> Tensor:
        dtype = self._operand_dtype(mlp.down)
        if linear.can_gate(mlp.gate_up):
            active = linear.gated(normed, mlp.gate_up, dtype, activation)
        else:
            active = rows.gated(linear.sums(normed, mlp.gate_up), dtype, activation)
        return linear.sums(active, mlp.down)

    def _normed_update(self, sums: Tensor, norm: Tensor | None, eps: float) -> Tensor:
        """What a block adds to the residual stream: [segments, rows, width], or one segment after a norm of its own."""
        return sums if norm is None else self.rms_norm(rows.collect(sums), norm, eps)[None]

    def _operand_dtype(self, weight: Linear) -> torch.dtype:
        return torch.float32 if self.kv_dtype is torch.float32 else linear.operand_dtype(weight)

    def warm_plans(self, shape: AttentionShape, block_size: int, max_keys: int) -> Iterator[Plan]:
        self._select()
        return self._plans.empty(shape, block_size, max_keys)

    def sample(self, logits: Tensor, nodes: Items[NodeDraw], replayed_rows: int = 0) -> list[int]:
        return self._draws.draw(logits, nodes, replayed_rows) if nodes else []

    def _select(self) -> None:
        """Kernels are launched on the current device of the thread."""
        if self._index is not None:
            torch.cuda.set_device(self._index)


def _as_plan(batch: ForwardBatch) -> Plan:
    assert isinstance(batch, Plan), "a batch goes through `prepare` first"
    return batch


def _build() -> str:
    """Names the kernels, whatever their files are called, and what compiles them."""
    digest = hashlib.sha256(f"{torch.__version__} {triton.__version__}".encode())
    for text in sorted(source.read_bytes() for source in Path(__file__).parent.glob("*.py")):
        digest.update(text)
    return digest.hexdigest()[:16]
