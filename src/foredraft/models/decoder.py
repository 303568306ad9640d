"""One decoder for the Llama family: how it is loaded, and the run through all layers (a layer: backends/base.py).

Architectures differ only in data: which biases and norms exist, which layers rotate, the multipliers of the config.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import count

import torch
from torch import Tensor

from foredraft.backends.base import (
    AttentionShape,
    Backend,
    Experts,
    Layer,
    LayerKV,
    Linear,
    Mlp,
    Stack,
    Taps,
    Weight,
    join,
)
from foredraft.batch import ForwardBatch
from foredraft.config import ModelConfig
from foredraft.errors import InvalidModel
from foredraft.models.checkpoint import Checkpoint
from foredraft.models.quantise import convert
from foredraft.models.rope import rope_tables

Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class DraftVocabulary:
    """The tokens of a model that knows fewer than its target, by the target's ids."""

    token_ids: Tensor  # [draft_vocab] int64: the token of every column of the logits
    rows: Tensor  # [target_vocab] int64: the row of the embedding for every token


@dataclass(frozen=True)
class Decoder:
    """A loaded model: embedding, layers, final norm, head, and the table of rotations."""

    config: ModelConfig
    embedding: Linear
    layers: tuple[Layer, ...]
    norm: Tensor
    head: Linear
    rope: Tensor  # [positions, 2, rotary_dim / 2]: cos, sin
    window_rope: Tensor | None = None  # of layers with a window, where they have rotations of their own
    vocabulary: DraftVocabulary | None = None  # None: tokens are rows of the embedding and columns of the logits

    def run(self, batch: ForwardBatch, kv: list[LayerKV], backend: Backend, taps: Taps | None = None) -> Tensor:
        """All rows through all layers and the final norm. The residual streams that are tapped are written on the
        way."""
        rows = batch.token_ids if self.vocabulary is None else self.vocabulary.rows[batch.token_ids]
        x = backend.embed(rows, self.embedding)
        if self.config.embedding_multiplier != 1:
            x = x * self.config.embedding_multiplier
        return backend.run_layers(x, self._stack, kv, batch, taps)[1]

    @cached_property
    def _stack(self) -> Stack:
        """One object for the life of the decoder: what a backend has found out about it, it need not find out again."""
        multiplier, eps = self.config.residual_multiplier, self.config.rms_norm_eps
        return Stack(self.layers, self.norm, self.rope, multiplier, eps, window_rope=self.window_rope)

    def with_positions(self, count: int) -> Decoder:
        """The same weights, with rotations for so many positions."""
        rope, window_rope = rope_tables(self.config, count, self.rope.device)
        return replace(self, rope=rope, window_rope=window_rope)

    @property
    def linears(self) -> list[Linear]:
        """All linear layers in order, the output head last."""
        return [*(linear for layer in self.layers for linear in layer.linears), self.head]

    @property
    def weight_kinds(self) -> list[tuple[str, ...]]:
        """The kinds of weights that the embedding and every linear layer are made of, in order."""
        return [linear.kinds for linear in (self.embedding, *self.linears)]

    def logits(self, normed: Tensor, backend: Backend) -> Tensor:
        """Float32 logits [rows, vocab] of rows that have gone through `run`."""
        logits = backend.logits(normed, self.head)
        return logits if self.config.logits_divisor == 1 else logits / self.config.logits_divisor


def load_decoder(
    checkpoint: Checkpoint,
    dtype: str,
    max_positions: int,
    backend: Backend,
    progress: Progress | None = None,
    rounds_all: bool = False,
) -> Decoder:
    """Read, convert and pack all weights. `dtype` is one of config.DTYPES.

    For int4, the embedding and the output head stay at 8 bits unless the file has them in 4, and so does every tensor
    that a 4-bit file keeps at more: whoever made that file knew where to spend bits. `rounds_all` is for a model whose
    time is worth more than its accuracy: only the embedding keeps its 8 bits, of which a run reads a few rows.
    """
    config, names = checkpoint.config, checkpoint.names()
    least_bits = 8 if checkpoint.precision == "int4" and not rounds_all else 4
    places = count(1)

    def tell() -> None:
        if progress is not None:
            progress(next(places), len(names))

    def read(name: str, least_bits: int = least_bits) -> Weight:
        tell()
        return convert(checkpoint.weight(name), dtype, least_bits)

    def vector(name: str) -> Tensor:
        tell()
        return checkpoint.vector(name).to(backend.device)

    def optional(name: str) -> Tensor | None:
        return vector(name) if name in names else None

    def linear(*projections: str) -> Linear:
        """One layer out of several projections that read the same input; neighbours of one kind are packed together."""
        weights = [read(projection) for projection in projections]
        biases = [optional(projection.removesuffix("weight") + "bias") for projection in projections]
        bias = None
        if any(b is not None for b in biases):
            filled = [torch.zeros(w.outputs) if b is None else b for w, b in zip(weights, biases, strict=True)]
            bias = torch.cat([b.to(backend.device) for b in filled])
        return pack_linear(weights, bias, backend)

    def layer(index: int) -> Layer:
        prefix = f"model.layers.{index}"
        experts = read_experts(f"{prefix}.mlp") if config.has_experts(index) else None
        return read_layer(prefix, attention_shape(config, index), vector, optional, linear, experts, config.activation)

    def read_experts(prefix: str) -> Experts:
        shape, name = config.experts, f"{prefix}.router.weight"
        assert shape is not None
        weight = convert(checkpoint.weight(name), "float32")  # few numbers, on which much depends
        bias = optional(f"{prefix}.router.bias")
        if not weight.values.isfinite().all() or (bias is not None and not bias.isfinite().all()):
            raise InvalidModel(
                f"{checkpoint.path}: tensor {name!r} or its bias holds numbers that are not finite, so no expert can "
                "be chosen; download or convert the model again."
            )
        tell()
        each = (read_mlp(f"{prefix}.experts.{expert}", linear) for expert in range(shape.count))
        return Experts(pack_linear([weight], bias, backend), tuple(each), shape.num_chosen, shape.normalised)

    embedding = head = pack_linear([read("model.embed_tokens.weight", least_bits=8)], None, backend)
    if not config.tie_word_embeddings:
        head = pack_linear([read("lm_head.weight", least_bits=4 if rounds_all else 8)], None, backend)
    rope, window_rope = rope_tables(config, max_positions, backend.device)
    return Decoder(
        config=config,
        embedding=embedding,
        layers=tuple(layer(index) for index in range(config.num_layers)),
        norm=vector("model.norm.weight"),
        head=head,
        rope=rope,
        window_rope=window_rope,
    )


def read_layer(
    prefix: str,
    shape: AttentionShape,
    vector: Callable[[str], Tensor],
    optional: Callable[[str], Tensor | None],
    linear: Callable[..., Linear],
    experts: Experts | None = None,
    activation: str = "silu",
) -> Layer:
    """The layer whose tensors have names that begin with `prefix`, in the Llama layout; with experts, if they are
    given, in place of an MLP."""
    attention, mlp = f"{prefix}.self_attn", f"{prefix}.mlp"
    return Layer(
        input_norm=optional(f"{prefix}.input_layernorm.weight"),
        qkv=linear(f"{attention}.q_proj.weight", f"{attention}.k_proj.weight", f"{attention}.v_proj.weight"),
        q_norm=optional(f"{attention}.q_norm.weight"),
        k_norm=optional(f"{attention}.k_norm.weight"),
        output=linear(f"{attention}.o_proj.weight"),
        post_norm=vector(f"{prefix}.post_attention_layernorm.weight"),
        mlp=experts or read_mlp(mlp, linear),
        shape=shape,
        sinks=optional(f"{attention}.sinks.weight"),
        activation=activation,
        attention_update_norm=optional(f"{attention}.update_norm.weight"),
        mlp_update_norm=optional(f"{mlp}.update_norm.weight"),
    )


def read_mlp(prefix: str, linear: Callable[..., Linear]) -> Mlp:
    return Mlp(
        gate_up=linear(f"{prefix}.gate_proj.weight", f"{prefix}.up_proj.weight"),
        down=linear(f"{prefix}.down_proj.weight"),
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


def pack_linear(weights: list[Weight], bias: Tensor | None, backend: Backend) -> Linear:
    """Pack weights that share their input one below the other; neighbours of the same kind become one part."""
    merged: list[list[Weight]] = []
    for weight in weights:
        if merged and merged[-1][0].kind == weight.kind:
            merged[-1].append(weight)
        else:
            merged.append([weight])
    parts = tuple(backend.pack(join(group, sum(weight.outputs for weight in group))) for group in merged)
    kinds = tuple(group[0].kind for group in merged)
    return Linear(parts, sum(weight.outputs for weight in weights), weights[0].inputs, bias, kinds)
