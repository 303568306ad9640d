"""The parts of a decoder layer in plain PyTorch, each with the convention it follows."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from tests.published.shapes import Config, Tensors


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


def linear(x: Tensor, tensors: Tensors, name: str) -> Tensor:
    """`name.weight` [out, in] and, where the file has one, `name.bias`."""
    return F.linear(x, tensors[f"{name}.weight"], tensors.get(f"{name}.bias"))


@dataclass(frozen=True)
class Rope:
    """Rotary embedding of the first 2·len(frequencies) dimensions of a head."""

    frequencies: Tensor  # [rotated / 2], radians for each position
    scale: float = 1.0  # of sine and cosine: YaRN's attention factor
    pairs_adjacent: bool = False  # True: dimension 2i with 2i+1 (GGUF); False: i with i + rotated/2 (transformers)

    def __call__(self, x: Tensor, positions: Tensor) -> Tensor:
        """x [rows, heads, head_dim], positions [rows]."""
        angles = positions[:, None, None].float() * self.frequencies
        cosine, sine = angles.cos() * self.scale, angles.sin() * self.scale
        rotated = 2 * len(self.frequencies)
        turned, rest = x[..., :rotated], x[..., rotated:]
        if self.pairs_adjacent:
            first, second = turned[..., 0::2], turned[..., 1::2]
        else:
            first, second = turned.chunk(2, dim=-1)
        one, two = first * cosine - second * sine, second * cosine + first * sine
        joined = torch.stack((one, two), dim=-1).flatten(-2) if self.pairs_adjacent else torch.cat((one, two), dim=-1)
        return torch.cat((joined, rest), dim=-1)


def rope_of(config: Config, head_dim: int, default_theta: float = 10_000.0) -> Rope:
    """The rope that a config says, in its older form (`rope_theta`, `rope_scaling`) or newer (`rope_parameters`).

    Formulas: transformers modeling_rope_utils.py. Where a config names no theta it is 10,000, whatever the target's.
    """
    scaling: dict[str, Any] = config.get("rope_parameters") or config.get("rope_scaling") or {}
    theta = scaling.get("rope_theta") or config.get("rope_theta") or default_theta
    dim = int(head_dim * (scaling.get("partial_rotary_factor") or config.get("partial_rotary_factor") or 1.0))
    plain = theta ** -(torch.arange(0, dim, 2).float() / dim)
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    if kind == "default":
        return Rope(plain)
    factor = scaling["factor"]
    if kind == "linear":
        return Rope(plain / factor)
    trained = scaling["original_max_position_embeddings"]
    if kind == "llama3":
        # Short waves stay, waves longer than the trained length / low are slowed by `factor`, a ramp lies between.
        low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
        turns = trained * plain / (2 * math.pi)
        kept = ((turns - low) / (high - low)).clamp(0, 1)
        return Rope(plain * (kept + (1 - kept) / factor))
    assert kind == "yarn", kind
    fast, slow = scaling.get("beta_fast") or 32, scaling.get("beta_slow") or 1

    def dimension(turns: float) -> float:
        return dim * math.log(trained / (turns * 2 * math.pi)) / (2 * math.log(theta))

    first, last = max(math.floor(dimension(fast)), 0), min(math.ceil(dimension(slow)), dim - 1)
    slowed = ((torch.arange(dim // 2).float() - first) / max(last - first, 0.001)).clamp(0, 1)
    scale = scaling.get("attention_factor") or 0.1 * math.log(factor) + 1.0
    return Rope(plain * ((1 - slowed) + slowed / factor), scale)


@dataclass(frozen=True)
class Heads:
    """The shape of attention."""

    heads: int
    kv_heads: int
    head_dim: int
    eps: float

    @classmethod
    def of(cls, config: Config) -> Heads:
        heads = config["num_attention_heads"]
        return cls(
            heads,
            config.get("num_key_value_heads") or heads,
            config.get("head_dim") or config["hidden_size"] // heads,
            config["rms_norm_eps"],
        )


def per_head(x: Tensor, heads: int, tensors: Tensors, norm: str, eps: float) -> Tensor:
    """[rows, heads, head_dim], each head normed where the file has `norm.weight`: before rope, as in Qwen3."""
    x = x.unflatten(-1, (heads, -1))
    weight = tensors.get(f"{norm}.weight")
    return x if weight is None else rms_norm(x, weight, eps)


def attend(query: Tensor, key: Tensor, value: Tensor, seen: Tensor) -> Tensor:
    """[rows, heads · head_dim]; `seen` [rows, keys]; head h reads key/value head h // (heads / kv_heads)."""
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
    scores = torch.einsum("rhd,khd->hrk", query, key) / math.sqrt(query.shape[-1])
    weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
    return torch.einsum("hrk,khd->rhd", weights, value).flatten(1)


def causal(rows: int) -> Tensor:
    return torch.ones(rows, rows, dtype=torch.bool).tril()


def self_attention(x: Tensor, positions: Tensor, tensors: Tensors, name: str, heads: Heads, rope: Rope) -> Tensor:
    """Causal attention of all rows of a sequence, from the names that Llama and Qwen files use."""
    query = per_head(linear(x, tensors, f"{name}.q_proj"), heads.heads, tensors, f"{name}.q_norm", heads.eps)
    key = per_head(linear(x, tensors, f"{name}.k_proj"), heads.kv_heads, tensors, f"{name}.k_norm", heads.eps)
    value = linear(x, tensors, f"{name}.v_proj").unflatten(-1, (heads.kv_heads, -1))
    mixed = attend(rope(query, positions), rope(key, positions), value, causal(len(x)))
    return linear(mixed, tensors, f"{name}.o_proj")


def mlp(x: Tensor, tensors: Tensors, name: str) -> Tensor:
    gated = F.silu(linear(x, tensors, f"{name}.gate_proj")) * linear(x, tensors, f"{name}.up_proj")
    return linear(gated, tensors, f"{name}.down_proj")


def decoder_layer(x: Tensor, positions: Tensor, tensors: Tensors, name: str, heads: Heads, rope: Rope) -> Tensor:
    """A layer as of Llama: norm, attention, add; norm, MLP, add."""
    normed = rms_norm(x, tensors[f"{name}.input_layernorm.weight"], heads.eps)
    x = x + self_attention(normed, positions, tensors, f"{name}.self_attn", heads, rope)
    normed = rms_norm(x, tensors[f"{name}.post_attention_layernorm.weight"], heads.eps)
    return x + mlp(normed, tensors, f"{name}.mlp")
