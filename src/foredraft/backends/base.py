"""The verbs a backend offers: packed linear layers, norms, rope and KV store, paged tree attention, gated activation,
and the draw of a token; and the run through many layers, which `run_layers` below puts together from the others.

A backend owns the numerics of one device. Everything above it (decoder, runner, engine) is device-blind.
With `exact`, the bits of a row depend on that row alone, never on how many rows share the call or where it stands.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from collections.abc import Sequence as Items
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from foredraft.batch import ForwardBatch, PackedBatch
from foredraft.sampling.draw import LazyDraws, NodeDraw, Tokens

if TYPE_CHECKING:
    from foredraft.backends.tree_ops import TreeOps

T = TypeVar("T")
HeadNorms = tuple[Tensor | None, Tensor | None]  # weights [head_dim] of the norms of q and of k; None: there is none


# Twice what the codes of MXFP4 stand for: a sign, two bits of exponent, one of mantissa.
MX4_VALUES = (0.0, 1.0, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0, -0.0, -1.0, -2.0, -3.0, -4.0, -6.0, -8.0, -12.0)


@dataclass(frozen=True)
class Weight:
    """A linear layer's weight as the model file gives it, row-major [outputs, inputs], before packing.

    kind   values                           scales and minimums
    "f32"  float32                          none
    "bf16" bfloat16                         none
    "q8"   int8 codes                       scales
    "q6"   int8 codes -32..31               scales, of blocks too
    "q5"   uint8 codes 0..31                scales and minimums
    "q5k"  uint8 codes 0..31                scales and minimums, of blocks too
    "q4"   uint8 codes 0..15                scales and minimums
    "q4k"  uint8 codes 0..15                scales and minimums, of blocks too
    "mx4"  uint8 codes 0..15 of MX4_VALUES  exponents

    A weight is scale * code + minimum. Scales and minimums are float16 [outputs, inputs / 32]; where blocks have
    theirs, float16 [outputs, inputs / 256], they are int8 and what counts is the product. The scales of q6 are
    [outputs, inputs / 16]. Those of mx4 are uint8 and stand for 2**(exponent - 128).
    """

    kind: str
    values: Tensor
    scales: Tensor | None = None
    minimums: Tensor | None = None
    block_scales: Tensor | None = None
    block_minimums: Tensor | None = None

    @property
    def outputs(self) -> int:
        return self.values.shape[0]

    @property
    def inputs(self) -> int:
        return self.values.shape[1]

    @property
    def parts(self) -> tuple[Any, ...]:
        """All tensors, a row for each output; None for those that the kind has not."""
        return self.values, self.scales, self.minimums, self.block_scales, self.block_minimums

    def rows(self, start: int, stop: int) -> Weight:
        """Some of the outputs."""
        parts: list[Any] = [None if part is None else part[start:stop] for part in self.parts]
        return Weight(self.kind, *parts)

    def dense(self) -> Tensor:
        """The float32 matrix that this weight stands for."""
        if self.scales is None:
            return self.values.float()
        if self.kind == "mx4":
            values = torch.tensor(MX4_VALUES)[self.values.int()].view(self.outputs, self.scales.shape[1], -1)
            return torch.ldexp(values, self.scales.int()[:, :, None] - 128).view(self.outputs, self.inputs)
        groups = self.values.view(self.outputs, self.scales.shape[1], -1).float()
        dense = groups * _factors(self.scales, self.block_scales)[:, :, None]
        if self.minimums is not None:
            dense = dense + _factors(self.minimums, self.block_minimums)[:, :, None]
        return dense.view(self.outputs, self.inputs)


def _factors(of_groups: Tensor, of_blocks: Tensor | None) -> Tensor:
    """float32 [outputs, groups]; the products are exact."""
    if of_blocks is None:
        return of_groups.float()
    return (of_groups.view(*of_blocks.shape, -1).float() * of_blocks.float()[:, :, None]).flatten(1)


def plain_weight(values: Tensor) -> Weight:
    """Of a matrix of floats; those of 16 bits other than bfloat16 become float32."""
    return Weight("bf16", values) if values.dtype == torch.bfloat16 else Weight("f32", values.float())


def join(pieces: Iterable[Weight], outputs: int) -> Weight:
    """Weights of one kind one below the other. Each is copied as it comes, so they need not exist all at once."""
    whole: list[Any] = []
    kind, filled = "", 0
    for piece in pieces:
        if piece.outputs == outputs:
            return piece
        if not whole:
            kind = piece.kind
            whole = [None if part is None else part.new_empty(outputs, part.shape[1]) for part in piece.parts]
        for target, part in zip(whole, piece.parts, strict=True):
            if part is not None:
                _bytes(target)[filled : filled + piece.outputs] = _bytes(part)
        filled += piece.outputs
    assert filled == outputs
    return Weight(kind, *whole)


def _bytes(tensor: Tensor) -> NDArray[np.uint8]:
    """For copies by numpy, on this thread: waking torch's other threads for each small piece would cost more."""
    return tensor.view(torch.uint8).numpy()


@dataclass(frozen=True)
class Linear:
    """A packed linear layer: consecutive output slices, each packed by the backend, and an optional float32 bias."""

    parts: tuple[Any, ...]
    outputs: int
    inputs: int
    bias: Tensor | None = None
    kinds: tuple[str, ...] = ()  # of the weights that the parts were packed from


@dataclass(frozen=True)
class LayerKV:
    """K and V of one layer for all blocks: each [blocks * block_size, kv_heads, head_dim] in the backend's KV dtype."""

    k: Tensor
    v: Tensor


@dataclass(frozen=True)
class AttentionShape:
    """What attention and rope need to know of a layer."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    rotary_dim: int  # 0: this layer sees no positions
    scale: float
    window: int  # sliding window in tokens, 0: unlimited
    norm_eps: float
    # Keys before this place of the sequence do not exist: an EAGLE head has none for its first token.
    first_key: int = 0


@dataclass(frozen=True)
class Mlp:
    """The MLP of a layer, or one of its experts."""

    gate_up: Linear
    down: Linear


@dataclass(frozen=True, eq=False)
class Experts:
    """MLPs of which a router chooses a few for every row. What they give is added up, each with its probability among
    all experts or, where they are normalised, among the chosen ones."""

    router: Linear  # a score for every expert
    each: tuple[Mlp, ...]
    num_chosen: int  # by a row; the best scores, and among equals those of the first experts
    normalised: bool

    @property
    def linears(self) -> list[Linear]:
        return [self.router, *(linear for mlp in self.each for linear in (mlp.gate_up, mlp.down))]


@dataclass(frozen=True)
class Layer:
    """The weights of one transformer layer, packed."""

    input_norm: Tensor | None  # None, of a first layer only: q, k and v read the residual stream as it is
    qkv: Linear
    q_norm: Tensor | None
    k_norm: Tensor | None
    output: Linear
    post_norm: Tensor
    mlp: Mlp | Experts
    shape: AttentionShape
    sinks: Tensor | None = None  # [heads]: scores that take their share of attention and give nothing (gpt-oss)
    activation: str = "silu"  # of the gate: one of ACTIVATIONS
    # Norms of what attention and the MLP add to the residual stream (Gemma); None: it is added as it is.
    attention_update_norm: Tensor | None = None
    mlp_update_norm: Tensor | None = None

    @property
    def linears(self) -> list[Linear]:
        """In the order in which a row meets them."""
        mlp = self.mlp.linears if isinstance(self.mlp, Experts) else [self.mlp.gate_up, self.mlp.down]
        return [self.qkv, self.output, *mlp]


@dataclass(frozen=True, eq=False)
class Entry:
    """What the first layer of an EAGLE head reads instead of the normed residual stream: the embedding of the row's
    token after the layer's own norm, and behind it the residual stream, after another norm if there is one."""

    embedding: Linear
    norm: Tensor | None


@dataclass(frozen=True, eq=False)
class Stack:
    """Layers one after the other, and what they share."""

    layers: tuple[Layer, ...]
    norm: Tensor  # after the last layer
    rope: Tensor  # [positions, 2, rotary_dim / 2]: cos, sin
    residual_multiplier: float
    norm_eps: float
    entry: Entry | None = None
    window_rope: Tensor | None = None  # of layers with a window (Gemma); None: they rotate as the others

    def rope_of(self, layer: Layer) -> Tensor:
        return self.rope if self.window_rope is None or not layer.shape.window else self.window_rope


@dataclass(frozen=True, eq=False)
class Taps:
    """Where the residual stream goes that a run has after some layers: one row per slot, as many columns per layer as
    the model is wide. Tap k is the stream after k layers: 0 is the embedding, and the last one has passed no norm
    yet."""

    layers: tuple[int, ...]  # ascending
    cache: Tensor  # [slots, len(layers) * hidden] in the backend's KV dtype, or in that of its activations


# What a gate may go through: x / (1 + exp(-x)), or the approximation of x * P(normal < x) by tanh. "clamped" is that of
# gpt-oss: gate / (1 + exp(-1.702 * gate)) * (up + 1) for a gate of at most 7 and an up between -7 and 7.
ACTIVATIONS = ("silu", "gelu_tanh", "clamped")
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

    def likely(self, logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """`top`, with probabilities instead of logits."""
        values, columns = self.top(logits, count)
        return (values - logits.logsumexp(1, keepdim=True)).exp(), columns

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
    for index, layer in enumerate(layers):
        qkv = backend.linear(normed, layer.qkv)
        rope = stack.rope_of(layer)
        q = backend.rope_and_store(qkv, (layer.q_norm, layer.k_norm), rope, kv[index], layer.shape, batch)
        update = backend.linear(backend.attend(q, kv[index], layer.shape, batch, layer.sinks), layer.output)
        if layer.attention_update_norm is not None:
            update = backend.rms_norm(update, layer.attention_update_norm, eps)
        x, normed = backend.add_rms_norm(x, update, multiplier, layer.post_norm, eps)
        update = run_mlp(backend, normed, layer.mlp, layer.activation)
        if layer.mlp_update_norm is not None:
            update = backend.rms_norm(update, layer.mlp_update_norm, eps)
        x, normed = backend.add_rms_norm(x, update, multiplier, next_norm(stack, index), eps)
        store_tap(backend, taps, index + 1, x, batch)
    return x, normed


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
