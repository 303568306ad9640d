"""The verbs a backend offers: packed linear layers, norms, rope and KV store, paged tree attention, gated activation,
and the draw of a token; and the run through many layers, which `run_layers` below puts together from the others.

A backend owns the numerics of one device. Everything above it (decoder, runner, engine) is device-blind.
With `exact`, the bits of a row depend on that row alone, never on how many rows share the call or where it stands.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from collections.abc import Sequence as Items
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import torch
from torch import Tensor

from foredraft.backends.layers import AttentionShape, Experts, LayerKV, Linear, Mlp, Stack, Taps, window_map_of
from foredraft.backends.weight import Weight
from foredraft.batch import ForwardBatch, PackedBatch
from foredraft.sampling.draw import LazyDraws, NodeDraw, Tokens
from foredraft.sampling.likely import Drawing, likely

if TYPE_CHECKING:
    from foredraft.backends.tree_growth import TapsHead, TreeGrower
    from foredraft.backends.tree_ops import TreeOps

T = TypeVar("T")
B = TypeVar("B", bound=ForwardBatch)
HeadNorms = tuple[Tensor | None, Tensor | None]  # weights [head_dim] of the norms of q and of k; None: there is none
ROW_COUNTS = (1, 2, 4, 8, 16, 32, 64)


class Backend(Protocol):
    """See the module docstring for the contract. Activations are [rows, width] in `activation_dtype`; logits are
    float32. Verbs with a body are in plain torch, for backends that have nothing better."""

    name: str
    build: str  # names the very code that computes: what was found out about another build need not hold for this one
    device: torch.device
    activation_dtype: torch.dtype
    kv_dtype: torch.dtype
    tree_ops: TreeOps | None = None  # grow draft trees on the device; None where the host may well do it level by level
    runs_ahead: bool = False  # whether runs are only begun when a call returns, and the host may do something else
    # Runs of so many rows must give a row the same bits: start-up compares them.
    row_counts: tuple[int, ...] = ROW_COUNTS

    def pack(self, weight: Weight) -> Any:
        """Lay a weight out for `linear`; done once, at load."""

    def linear(self, x: Tensor, weight: Linear) -> Tensor:
        """x [rows, inputs] -> [rows, outputs]."""

    def embed(self, token_ids: Tensor, weight: Linear) -> Tensor:
        """The weight's rows `token_ids`, dequantised: [rows, inputs]."""

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """x / rms(x) * weight over the last dimension, reduced in float32."""

    def add_rms_norm(
        self, x: Tensor, update: Tensor, multiplier: float, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        """y = x + multiplier * update; returns (y, rms_norm(y)). May overwrite x."""

    def rope_and_store(
        self, qkv: Tensor, norms: HeadNorms, rope: Tensor, kv: LayerKV, shape: AttentionShape, batch: ForwardBatch
    ) -> Tensor:
        """Split qkv [rows, (heads + 2 * kv_heads) * head_dim]; norm q and k per head where they have norms;
        rotate the first rotary_dim of each head by `rope` [positions, 2, rotary_dim / 2] (cos, sin; half-split
        pairs) at batch.positions; write k and v at batch.slots. Returns q [rows, heads * head_dim]."""

    def attend(
        self, q: Tensor, kv: LayerKV, shape: AttentionShape, batch: ForwardBatch, sinks: Tensor | None = None
    ) -> Tensor:
        """Each row over the keys that `batch` lets it see, in text order: [rows, heads * head_dim]. The softmax and all
        sums are float32, reduced over fixed-size key blocks in order, so a row's bits depend on its keys alone. `sinks`
        are as in Layer."""

    def gated(self, gate_up: Tensor, activation: str = "silu") -> Tensor:
        """activation(left half) * right half: [rows, 2 * width] -> [rows, width]; see ACTIVATIONS."""

    def mix_experts(self, x: Tensor, experts: Experts, activation: str) -> Tensor:
        """What the experts of every row add to it: [rows, width]. A row's bits depend on that row alone, whichever
        experts other rows choose. An expert that no row chooses is not read."""

    def silu(self, x: Tensor) -> Tensor:
        """x / (1 + exp(-x)), of any shape."""

    def dots(self, vectors: Tensor, lanes: Tensor, x: Tensor) -> Tensor:
        """Every row of x [rows, width] times the vectors of its lane: vectors [lanes, count, width], lanes [rows]
        int64 -> float32 [rows, count]."""

    def logits(self, x: Tensor, weight: Linear) -> Tensor:
        """The output head: [rows, inputs] -> float32 [rows, outputs]."""
        return self.linear(x, weight).float()

    def store(self, x: Tensor, cache: Tensor, column: int, slots: Tensor) -> None:
        """x [rows, width] to cache[slots, column : column + width], in the cache's dtype. A row that only fills a plan
        up has the slot -1 and is stored nowhere."""
        cache[:, column : column + x.shape[1]][slots] = x.to(cache.dtype)

    def read(self, cache: Tensor, parts: Tensor | None, slots: Tensor) -> Tensor:
        """Some parts of a cache [slots, parts, width], or all, at some slots: [rows, parts × width] as activations."""
        rows = cache[slots]
        return (rows if parts is None else rows[:, parts]).flatten(1).to(self.activation_dtype)

    def read_previous(self, cache: Tensor, parts: Tensor | None, batch: ForwardBatch) -> Tensor:
        """`read` at `batch.previous_slots`."""
        return self.read(cache, parts, batch.previous_slots)

    def move(self, caches: Items[Tensor], moves: Items[tuple[int, int]]) -> None:
        """Copy what caches [parts, slots, ...] hold from slot to slot, for each of the moves (source, target). All
        sources are read before any target is written."""
        move(caches, torch.tensor(moves, device=self.device).T)

    def top(self, logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """The largest `count` of every row of logits [rows, columns], all where there are fewer, and their columns:
        [rows, count] each. Largest first, and among equals, but for those on a GPU, the lowest column first."""

    def likely(
        self, logits: Tensor, drawings: Items[Drawing], count: int, token_ids: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """The `count` tokens that the drawing of every row most probably gives: their shares and their columns, [rows,
        count] each. Without a temperature the share is that of exp(logit), else of exp(logit + temperature * gumbel)
        among the largest logits that reach the floor. A token that cannot be drawn has the share 0. `token_ids` names
        the columns: [columns], [rows, columns], or None for their own numbers."""
        return likely(self.top, logits, drawings, count, token_ids)

    def run_layers(
        self, x: Tensor, stack: Stack, kv: Items[LayerKV], batch: ForwardBatch, taps: Taps | None = None
    ) -> tuple[Tensor, Tensor]:
        """x through all layers: the bits of the function `run_layers`. Returns x and its norm. May overwrite x."""
        return run_layers(self, x, stack, kv, batch, taps)

    def prepare(self, batch: PackedBatch, shape: AttentionShape) -> ForwardBatch:
        """The plan of one run through layers of this shape: the batch on this device, maybe with further rows that read
        and write nothing, and with the logits of all rows wanted."""
        return batch.tensors() if self.device.type == "cpu" else batch.tensors().to(self.device)

    def replay(self, owner: object, plan: ForwardBatch, compute: Callable[[ForwardBatch], T]) -> T:
        """compute(plan), or what it gives by the replay of a graph that was captured for `owner` and this shape. The
        result holds until the next run."""
        return compute(plan)

    def warm_plans(self, shape: AttentionShape, block_size: int, max_keys: int) -> Iterable[ForwardBatch]:
        """Plans that read and write nothing. A model that runs each of them once, and draws from its logits, makes no
        later run of at most `max_keys` keys wait for a graph or a compiler. None where neither is needed."""
        return ()

    def tree_grower(self, head: TapsHead) -> TreeGrower | None:
        """What grows whole trees with a head in one call; None where it is asked level by level."""
        return None

    def sample(self, logits: Tensor, nodes: Items[NodeDraw], replayed_rows: int = 0) -> Tokens:
        """The token of every node, drawn from its row of logits [rows, vocab]: that of `sampling.draw` on every
        backend, or NOT_FINITE. May be drawn only when it is read. `replayed_rows` is that of the plan whose run gave
        the logits."""
        return LazyDraws(logits, nodes)


def run_layers(
    backend: Backend, x: Tensor, stack: Stack, kv: Items[LayerKV], batch: ForwardBatch, taps: Taps | None = None
) -> tuple[Tensor, Tensor]:
    """What a layer is: the verb of this name, verb by verb. A backend may do the same in fewer calls."""
    layers, multiplier, eps = stack.layers, stack.residual_multiplier, stack.norm_eps
    store_tap(backend, taps, 0, x, batch)
    normed = entered(backend, x, stack, batch)
    seen_by = batches_of_layers(kv, batch)
    for index, layer in enumerate(layers):
        qkv = backend.linear(normed, layer.qkv)
        rope = stack.rope_of(layer)
        q = backend.rope_and_store(qkv, (layer.q_norm, layer.k_norm), rope, kv[index], layer.shape, seen_by[index])
        update = backend.linear(backend.attend(q, kv[index], layer.shape, seen_by[index], layer.sinks), layer.output)
        if layer.attention_update_norm is not None:
            update = backend.rms_norm(update, layer.attention_update_norm, eps)
        x, normed = backend.add_rms_norm(x, update, multiplier, layer.post_norm, eps)
        update = run_mlp(backend, normed, layer.mlp, layer.activation)
        if layer.mlp_update_norm is not None:
            update = backend.rms_norm(update, layer.mlp_update_norm, eps)
        x, normed = backend.add_rms_norm(x, update, multiplier, next_norm(stack, index), eps)
        store_tap(backend, taps, index + 1, x, batch)
    return x, normed


def batches_of_layers(kv: Items[LayerKV], batch: B) -> list[B]:
    """The batch as each layer has it: in window blocks where its cache has those. They are looked up once for all."""
    window_map = window_map_of(kv)
    if window_map is None:
        return [batch] * len(kv)
    in_windows = batch.in_window_blocks(window_map.on_device)
    return [batch if cache.window_map is None else in_windows for cache in kv]


def run_mlp(backend: Backend, x: Tensor, mlp: Mlp | Experts, activation: str) -> Tensor:
    """What an MLP, or the experts of each row, make of normed rows."""
    if isinstance(mlp, Experts):
        return backend.mix_experts(x, mlp, activation)
    return backend.linear(backend.gated(backend.linear(x, mlp.gate_up), activation), mlp.down)


def entered(backend: Backend, x: Tensor, stack: Stack, batch: ForwardBatch) -> Tensor:
    """What the first layer of a stack reads: [rows, width], with an entry [rows, 2 × width]."""
    entry, eps = stack.entry, stack.norm_eps

    def normed(rows: Tensor, norm: Tensor | None) -> Tensor:
        return rows if norm is None else backend.rms_norm(rows, norm, eps)

    if entry is None:
        return normed(x, stack.layers[0].input_norm)
    embedded = normed(backend.embed(batch.token_ids, entry.embedding), stack.layers[0].input_norm)
    return torch.cat([embedded, normed(x, entry.norm)], dim=1)


def next_norm(stack: Stack, index: int) -> Tensor:
    """The norm of what a layer leaves: the one that the next layer reads it through, or the last one."""
    if index + 1 == len(stack.layers):
        return stack.norm
    norm = stack.layers[index + 1].input_norm
    assert norm is not None, "only a first layer may have none"
    return norm


@torch.inference_mode()
def move(caches: Items[Tensor], slots: Tensor) -> None:
    """The verb of this name, in plain torch: from slots[0] to slots[1]."""
    sources, targets = slots
    for cache in caches:
        cache.index_copy_(1, targets, cache.index_select(1, sources))


def store_tap(backend: Backend, taps: Taps | None, depth: int, x: Tensor, batch: ForwardBatch) -> None:
    """Store the residual stream after `depth` layers, if it is tapped there."""
    if taps is not None and depth in taps.layers:
        backend.store(x, taps.cache, taps.layers.index(depth) * x.shape[1], batch.slots)
