"""The frozen target as plain torch: residual streams and logits of whole batches, as fast as large matrices are.

It computes what models/decoder.py computes, from the same checkpoint, without a KV cache: every sequence is one row of
the batch, and nothing but earlier tokens of the row is seen.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from foredraft.errors import InvalidModel
from foredraft.heads.module import rotated
from foredraft.models.checkpoint import Checkpoint
from foredraft.models.rope import rope_tables


@dataclass(frozen=True)
class Features:
    """What a run leaves: residual streams by the number of layers they have passed, and the rows after the final norm,
    all [batch, length, hidden]."""

    streams: dict[int, Tensor]
    normed: Tensor

    def taps(self, layers: Sequence[int]) -> Tensor:
        """The streams side by side: [batch, length, taps × hidden]."""
        return torch.cat([self.streams[layer] for layer in layers], dim=-1)


_Projection = tuple[Tensor, Tensor | None]  # weight, bias


@dataclass(frozen=True)
class _Layer:
    input_norm: Tensor
    qkv: _Projection
    q_norm: Tensor | None
    k_norm: Tensor | None
    output: _Projection
    post_norm: Tensor
    gate_up: _Projection
    down: _Projection
    attention_update_norm: Tensor | None
    mlp_update_norm: Tensor | None


class FrozenTarget:
    """All weights dense: bfloat16 on a GPU, float32 on a CPU, unless a dtype is given. Heads compute in it too."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        device: torch.device,
        max_len: int,
        dtype: torch.dtype | None = None,
        progress: Callable[[int, int], None] | None = None,  # layers so far, layers in all
    ) -> None:
        self.config, self.device = checkpoint.config, device
        if self.config.experts is not None:
            raise InvalidModel(
                f"{checkpoint.path} is a mixture of experts, for which nothing can be trained yet; choose a model "
                "without experts, or a proposer that needs no training, such as suffix."
            )
        self.dtype = dtype or (torch.bfloat16 if device.type == "cuda" else torch.float32)
        names = checkpoint.names()

        def tensor(name: str) -> Tensor:
            return checkpoint.weight(name).dense().to(device, self.dtype)

        def vector(name: str) -> Tensor:
            return checkpoint.vector(name).to(device, self.dtype)

        def optional(name: str) -> Tensor | None:
            return vector(name) if name in names else None

        def joined(prefix: str, *projections: str) -> _Projection:
            weights = [tensor(f"{prefix}.{each}.weight") for each in projections]
            biases = [optional(f"{prefix}.{each}.bias") for each in projections]
            if all(bias is None for bias in biases):
                return torch.cat(weights), None
            filled = [weight.new_zeros(len(weight)) if bias is None else bias for weight, bias in zip(weights, biases)]
            return torch.cat(weights), torch.cat(filled)

        def layer(index: int) -> _Layer:
            if progress is not None:
                progress(index, self.config.num_layers)
            prefix = f"model.layers.{index}"
            return _Layer(
                input_norm=vector(f"{prefix}.input_layernorm.weight"),
                qkv=joined(f"{prefix}.self_attn", "q_proj", "k_proj", "v_proj"),
                q_norm=optional(f"{prefix}.self_attn.q_norm.weight"),
                k_norm=optional(f"{prefix}.self_attn.k_norm.weight"),
                output=joined(f"{prefix}.self_attn", "o_proj"),
                post_norm=vector(f"{prefix}.post_attention_layernorm.weight"),
                gate_up=joined(f"{prefix}.mlp", "gate_proj", "up_proj"),
                down=joined(f"{prefix}.mlp", "down_proj"),
                attention_update_norm=optional(f"{prefix}.self_attn.update_norm.weight"),
                mlp_update_norm=optional(f"{prefix}.mlp.update_norm.weight"),
            )

        self.embedding = tensor("model.embed_tokens.weight")
        self.head = self.embedding if self.config.tie_word_embeddings else tensor("lm_head.weight")
        self.layers = [layer(index) for index in range(self.config.num_layers)]
        self.norm = vector("model.norm.weight")
        rope, window_rope = rope_tables(self.config, max_len, device)
        self._rope = rope.to(self.dtype)
        self._window_rope = self._rope if window_rope is None else window_rope.to(self.dtype)

    @torch.no_grad()
    def run(self, tokens: Tensor, taps: frozenset[int]) -> Features:
        """Tokens [batch, length] through all layers."""
        config = self.config
        x = self.embed(tokens)
        if config.embedding_multiplier != 1:
            x = x * config.embedding_multiplier
        streams = {0: x} if 0 in taps else {}
        for index, layer in enumerate(self.layers):
            update = self._attend(self._normed(x, layer.input_norm), layer, index)
            if layer.attention_update_norm is not None:
                update = self._normed(update, layer.attention_update_norm)
            x = x + update if config.residual_multiplier == 1 else x + update * config.residual_multiplier
            gate, up = functional.linear(self._normed(x, layer.post_norm), *layer.gate_up).chunk(2, dim=-1)
            gate = functional.silu(gate) if config.activation == "silu" else functional.gelu(gate, approximate="tanh")
            update = functional.linear(gate * up, *layer.down)
            if layer.mlp_update_norm is not None:
                update = self._normed(update, layer.mlp_update_norm)
            x = x + update if config.residual_multiplier == 1 else x + update * config.residual_multiplier
            if index + 1 in taps:
                streams[index + 1] = x
        return Features(streams, self._normed(x, self.norm))

    def embed(self, tokens: Tensor) -> Tensor:
        """Rows of the embedding table, as they are."""
        return functional.embedding(tokens, self.embedding)

    def _normed(self, x: Tensor, weight: Tensor) -> Tensor:
        return functional.rms_norm(x, weight.shape, weight, self.config.rms_norm_eps)

    def _attend(self, x: Tensor, layer: _Layer, index: int) -> Tensor:
        config = self.config
        batch, length = x.shape[:2]
        heads, kv_heads = config.num_heads, config.num_kv_heads
        qkv = functional.linear(x, *layer.qkv).view(batch, length, -1, config.head_dim).transpose(1, 2)
        q, k, v = qkv.split([heads, kv_heads, kv_heads], dim=1)
        if layer.q_norm is not None:
            q = self._normed(q, layer.q_norm)
        if layer.k_norm is not None:
            k = self._normed(k, layer.k_norm)
        if index not in config.no_rope_layers:
            rope = self._window_rope if config.window_of_layer(index) else self._rope
            cos, sin = rope[:length].unbind(1)  # [length, rotary_dim / 2]
            q, k = rotated(q, cos, sin), rotated(k, cos, sin)
        window, mask = config.window_of_layer(index), None
        if 0 < window < length:
            places = torch.arange(length, device=x.device)
            distance = places[:, None] - places
            mask = (distance >= 0) & (distance < window)
        k, v = (part.repeat_interleave(heads // kv_heads, dim=1) for part in (k, v))
        y = functional.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=mask is None, scale=config.attention_scale
        )
        return functional.linear(y.transpose(1, 2).flatten(2), *layer.output)
