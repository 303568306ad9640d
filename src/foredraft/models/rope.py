"""Rotary position tables, with the ways in which models stretch them."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from foredraft.config import ModelConfig, RopeScaling

_PIECE = 1 << 16  # positions that are computed at once: a table needs little memory beside its own


def rope_table(config: ModelConfig, max_positions: int) -> Tensor:
    """cos and sin of every position: float32 [positions, 2, rotary_dim / 2]. Angles are float32, as the models were
    trained."""
    exponents = torch.arange(0, config.rotary_dim, 2, dtype=torch.int64).float() / config.rotary_dim
    frequencies = 1.0 / (config.rope_theta**exponents)
    magnitude = 1.0
    if config.rope_scaling is not None:
        frequencies, magnitude = _scaled(frequencies, config.rope_scaling, config, max_positions)
    table = torch.empty(max_positions, 2, len(frequencies))
    for piece in range(0, max_positions, _PIECE):
        positions = torch.arange(piece, min(piece + _PIECE, max_positions), dtype=torch.float32)
        angles = positions[:, None] * frequencies[None, :]
        table[piece : piece + _PIECE] = torch.stack([angles.cos(), angles.sin()], dim=1).mul_(magnitude)
    return table


def _scaled(frequencies: Tensor, scaling: RopeScaling, config: ModelConfig, max_positions: int) -> tuple[Tensor, float]:
    if scaling.kind == "linear":
        return frequencies / scaling.factor, 1.0
    if scaling.kind == "llama3":
        return _llama3(frequencies, scaling), 1.0
    if scaling.kind == "factors":
        return frequencies / torch.tensor(scaling.long_factor), scaling.attention_factor or 1.0
    return _longrope(frequencies, scaling, config, max_positions)


def _llama3(frequencies: Tensor, scaling: RopeScaling) -> Tensor:
    """Long waves are stretched by `factor`, short ones kept, those between blended."""
    context = scaling.original_max_position_embeddings
    wavelengths = 2 * math.pi / frequencies
    blend = (context / wavelengths - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    blend = blend.clamp(0, 1)
    return (1 - blend) * frequencies / scaling.factor + blend * frequencies


def _longrope(
    frequencies: Tensor, scaling: RopeScaling, config: ModelConfig, max_positions: int
) -> tuple[Tensor, float]:
    """One factor per frequency: the short list while the context in use fits the trained one, the long list beyond.

    The list is chosen once, by the longest sequence that this engine admits, so that a sequence's bits never depend on
    its length.
    """
    original = scaling.original_max_position_embeddings or config.max_position_embeddings
    factors = scaling.long_factor if max_positions > original else scaling.short_factor
    magnitude = scaling.attention_factor
    if magnitude is None:
        stretch = config.max_position_embeddings / original
        magnitude = 1.0 if stretch <= 1 else math.sqrt(1 + math.log(stretch) / math.log(original))
    return frequencies / torch.tensor(factors), magnitude
