"""Tensors by their names in the Llama layout, packed as a backend runs them: linear layers, and layers made of them."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor

from foredraft.backends.base import Backend
from foredraft.backends.layers import AttentionShape, Experts, Layer, Linear, Mlp
from foredraft.backends.weight import Weight, join
from foredraft.config import ModelConfig


class PackedWeights(ABC):
    """Those of a model or of a head: where its tensors come from, and in which precision they run, is its own."""

    def __init__(self, backend: Backend) -> None:
        self.backend = backend

    @abstractmethod
    def vector(self, name: str) -> Tensor:
        """In float32, on the backend's device."""

    @abstractmethod
    def optional(self, name: str) -> Tensor | None:
        """A vector, where there is one of this name."""

    @abstractmethod
    def weight(self, name: str, is_head: bool) -> Weight:
        """A matrix in the precision that it runs in. 4 bits are not for output heads and tables, unless the file has
        them so."""

    def linear(self, *names: str, is_head: bool = False) -> Linear:
        """One layer out of matrices that read the same input, with the biases that they have."""
        weights = [self.weight(name, is_head) for name in names]
        biases = [self.optional(name.removesuffix("weight") + "bias") for name in names]
        if all(bias is None for bias in biases):
            return self.pack(weights)
        device = self.backend.device
        filled = [
            torch.zeros(w.outputs, device=device) if b is None else b for w, b in zip(weights, biases, strict=True)
        ]
        return self.pack(weights, torch.cat(filled))

    def pack(self, weights: list[Weight], bias: Tensor | None = None) -> Linear:
        """Weights that share their input one below the other; neighbours of the same kind become one part."""
        merged: list[list[Weight]] = []
        for weight in weights:
            if merged and merged[-1][0].kind == weight.kind:
                merged[-1].append(weight)
            else:
                merged.append([weight])
        parts = tuple(self.backend.pack(join(group, sum(weight.outputs for weight in group))) for group in merged)
        kinds = tuple(group[0].kind for group in merged)
        return Linear(parts, sum(weight.outputs for weight in weights), weights[0].inputs, bias, kinds)

    def layer(
        self, prefix: str, shape: AttentionShape, experts: Experts | None = None, activation: str = "silu"
    ) -> Layer:
        """The layer whose tensors have names that begin with `prefix`; with experts, if they are given, in place of an
        MLP."""
        attention, mlp = f"{prefix}.self_attn", f"{prefix}.mlp"
        return Layer(
            input_norm=self.optional(f"{prefix}.input_layernorm.weight"),
            qkv=self.linear(*(f"{attention}.{name}_proj.weight" for name in "qkv")),
            q_norm=self.optional(f"{attention}.q_norm.weight"),
            k_norm=self.optional(f"{attention}.k_norm.weight"),
            output=self.linear(f"{attention}.o_proj.weight"),
            post_norm=self.vector(f"{prefix}.post_attention_layernorm.weight"),
            mlp=experts or self.mlp(mlp),
            shape=shape,
            sinks=self.optional(f"{attention}.sinks.weight"),
            activation=activation,
            attention_update_norm=self.optional(f"{attention}.update_norm.weight"),
            mlp_update_norm=self.optional(f"{mlp}.update_norm.weight"),
        )

    def mlp(self, prefix: str) -> Mlp:
        return Mlp(
            gate_up=self.linear(f"{prefix}.gate_proj.weight", f"{prefix}.up_proj.weight"),
            down=self.linear(f"{prefix}.down_proj.weight"),
        )


def attention_shape(config: ModelConfig, layer: int) -> AttentionShape:
    return AttentionShape(
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        rotary_dim=0 if layer in config.no_rope_layers else config.rotary_dim,
        scale=config.attention_scale,
        window=config.window_of_layer(layer),
        norm_eps=config.rms_norm_eps,
    )
