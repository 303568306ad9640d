"""What a backend runs: packed linear layers, the transformer layers that are made of them, and the stack of these."""

from __future__ import annotations

from array import array
from collections.abc import Sequence as Items
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

# What a gate may go through: x / (1 + exp(-x)), or the approximation of x * P(normal < x) by tanh. "clamped" is that of
# gpt-oss: gate / (1 + exp(-1.702 * gate)) * (up + 1) for a gate of at most 7 and an up between -7 and 7.
ACTIVATIONS = ("silu", "gelu_tanh", "clamped")


@dataclass(frozen=True)
class Linear:
    """A packed linear layer: consecutive output slices, each packed by the backend, and an optional float32 bias."""

    parts: tuple[Any, ...]
    outputs: int
    inputs: int
    bias: Tensor | None = None
    kinds: tuple[str, ...] = ()  # of the weights that the parts were packed from


class WindowMap:
    """Where blocks lie in the caches of layers with a window, which have room for fewer: block -> window block, or -1
    for a block that has none. The host writes it, runs read it on the device, where it stays at one address."""

    def __init__(self, host: array[int], device: torch.device) -> None:
        self._host = torch.frombuffer(host, dtype=torch.int32)  # the same memory
        self._told = self._host.clone()
        self.on_device = self._host if device.type == "cpu" else self._host.to(device)  # [blocks] int32

    def tell_device(self) -> None:
        """Before a run: let the device know of what has changed since the last one."""
        if self.on_device is not self._host and not torch.equal(self._host, self._told):
            self._told.copy_(self._host)
            self.on_device.copy_(self._told)


@dataclass(frozen=True)
class LayerKV:
    """K and V of one layer: each [blocks * block_size, kv_heads, head_dim] in the backend's KV dtype."""

    k: Tensor
    v: Tensor
    window_map: WindowMap | None = None  # of a layer that keeps only what its windows reach; None: it has all blocks


def window_map_of(kv: Items[LayerKV]) -> WindowMap | None:
    """That of the layers that have one; it is the same for all."""
    return next((cache.window_map for cache in kv if cache.window_map is not None), None)


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
