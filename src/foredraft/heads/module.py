"""What heads are made of as torch modules, whose tensors have the names of their files. Weights are float32 masters;
everything computes in the dtype of its input."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional

from foredraft.heads.base import HeadConfig
from foredraft.heads.weights import layer_config
from foredraft.models.rope import rope_frequencies

KeysValues = tuple[Tensor, Tensor]  # each [batch, kv_heads, length, head_dim]


class Module(nn.Module):
    """A module that gives one tensor."""

    __call__: Callable[..., Tensor]


class Linear(Module):
    """y = x · weight^T (+ bias). `scale` is the standard deviation at the start, times 1 / sqrt(inputs); 0 is zero."""

    def __init__(self, inputs: int, outputs: int, bias: bool = False, scale: float = 1.0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(outputs, inputs) * (scale * inputs**-0.5))
        self.bias = nn.Parameter(torch.zeros(outputs)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        bias = None if self.bias is None else self.bias.to(x.dtype)
        return functional.linear(x, self.weight.to(x.dtype), bias)


class Table(Module):
    """A row for each index; `scale` is the standard deviation at the start."""

    def __init__(self, rows: int, width: int, scale: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(rows, width) * scale)

    def forward(self, indices: Tensor) -> Tensor:
        return functional.embedding(indices, self.weight)


class RMSNorm(Module):
    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return functional.rms_norm(x, self.weight.shape, self.weight.to(x.dtype), self.eps)


class Mlp(Module):
    """The gated feed-forward part of a layer."""

    def __init__(self, config: HeadConfig) -> None:
        super().__init__()
        self.gate_proj = Linear(config.hidden_size, config.intermediate_size)
        self.up_proj = Linear(config.hidden_size, config.intermediate_size)
        self.down_proj = Linear(config.intermediate_size, config.hidden_size, scale=0.0)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))


class Attention(nn.Module):
    """Rotary attention with grouped keys. `inputs` is the width of the rows that q, k and v are made of."""

    frequencies: Tensor

    def __init__(self, config: HeadConfig, inputs: int, qk_norm: bool) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        frequencies, self.magnitude = rope_frequencies(layer_config(config), 0)
        self.register_buffer("frequencies", frequencies, persistent=False)
        self.groups = config.num_heads // config.num_kv_heads
        self.q_proj = Linear(inputs, config.num_heads * config.head_dim)
        self.k_proj = Linear(inputs, config.num_kv_heads * config.head_dim)
        self.v_proj = Linear(inputs, config.num_kv_heads * config.head_dim)
        self.o_proj = Linear(config.num_heads * config.head_dim, config.hidden_size, scale=0.0)
        self.q_norm = RMSNorm(config.head_dim, config.norm_eps) if qk_norm else None
        self.k_norm = RMSNorm(config.head_dim, config.norm_eps) if qk_norm else None

    def keys_values(self, x: Tensor, positions: Tensor) -> KeysValues:
        """K and V of rows [batch, length, inputs] at `positions` [batch or 1, length]."""
        k, v = self._heads(self.k_proj(x)), self._heads(self.v_proj(x))
        if self.k_norm is not None:
            k = self.k_norm(k)
        return self._rotate(k, positions), v

    def attend(self, x: Tensor, positions: Tensor, past: list[KeysValues], mask: Tensor | None) -> Tensor:
        """Rows [batch, length, inputs] over the keys of `past`, one after the other. `mask` is true where a row sees a
        key, [batch or 1, 1, length, keys]; None is causal, for as many keys as rows."""
        q = self._heads(self.q_proj(x))
        if self.q_norm is not None:
            q = self.q_norm(q)
        q = self._rotate(q, positions)
        k = torch.cat([k for k, _ in past], dim=2) if len(past) > 1 else past[0][0]
        v = torch.cat([v for _, v in past], dim=2) if len(past) > 1 else past[0][1]
        k, v = (part.repeat_interleave(self.groups, dim=1) for part in (k, v))
        y = functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None)
        return self.o_proj(y.transpose(1, 2).flatten(2))

    def _rotate(self, x: Tensor, positions: Tensor) -> Tensor:
        """Rotary positions on [batch, heads, length, head_dim]: the first half of a head turns with its second half."""
        angles = positions[:, None, :, None].float() * self.frequencies  # [batch or 1, 1, length, half]
        cos, sin = (part.to(x.dtype) for part in (angles.cos() * self.magnitude, angles.sin() * self.magnitude))
        return rotated(x, cos, sin)

    def _heads(self, x: Tensor) -> Tensor:
        heads: Tensor = x.unflatten(2, (-1, self.head_dim)).transpose(1, 2)
        return heads


class DecoderLayer(Module):
    """A layer whose keys are those of a context, and those of its rows themselves."""

    def __init__(self, config: HeadConfig, qk_norm: bool) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.norm_eps)
        self.self_attn = Attention(config, config.hidden_size, qk_norm)
        self.mlp = Mlp(config)

    def forward(self, x: Tensor, positions: Tensor, context: list[KeysValues], mask: Tensor | None) -> Tensor:
        """Rows [batch, length, hidden]. The keys that `mask` is about are the context's, then those of the rows."""
        return self.step(x, positions, context, mask)[0]

    def step(
        self, x: Tensor, positions: Tensor, context: list[KeysValues], mask: Tensor | None
    ) -> tuple[Tensor, KeysValues]:
        """The same, and the rows' own K and V."""
        normed = self.input_layernorm(x)
        own = self.self_attn.keys_values(normed, positions)
        x = x + self.self_attn.attend(normed, positions, [*context, own], mask)
        return x + self.mlp(self.post_attention_layernorm(x)), own


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Dimensions beyond twice those of `cos` and `sin` stay as they are."""
    half = cos.shape[-1]
    left, right, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return torch.cat([left * cos - right * sin, right * cos + left * sin, rest], dim=-1)


class HeadModule(nn.Module):
    """A head in training. All have the tensors d2t and t2d, which name the draft vocabulary."""

    config: HeadConfig
    d2t: Tensor
    t2d: Tensor
    norm: RMSNorm
    lm_head: Linear

    def __init__(self, config: HeadConfig) -> None:
        super().__init__()
        self.config = config
        self.register_buffer("d2t", torch.zeros(config.draft_vocab_size, dtype=torch.int64))
        self.register_buffer("t2d", torch.zeros(config.target_vocab_size, dtype=torch.bool))
        self.t2d[: config.draft_vocab_size] = True

    def set_vocabulary(self, token_ids: Tensor) -> None:
        """`token_ids`: the target's ids of the draft vocabulary, rising [draft_vocab]."""
        self.d2t.copy_(token_ids - torch.arange(len(token_ids), device=token_ids.device))
        self.t2d.zero_()
        self.t2d[token_ids] = True

    @property
    def token_ids(self) -> Tensor:
        """The target's ids of the draft vocabulary [draft_vocab]."""
        return self.d2t + torch.arange(len(self.d2t), device=self.d2t.device)

    @property
    def own_ids(self) -> Tensor:
        """Those of the tokens that `lm_head` has rows for."""
        return self.token_ids
