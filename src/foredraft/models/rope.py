"""Rotary position tables, with the ways in which models stretch them."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from foredraft.config import ModelConfig, RopeScaling

_PIECE = 1 << 16  # positions that are computed at once: a table needs little memory beside its own


def rope_tables(config: ModelConfig, max_positions: int, device: torch.device) -> tuple[Tensor, Tensor | None]:
    """The rotations of all layers, and of those with a window where they have their own."""
    table = rope_table(config, max_positions).to(device)
    if config.window_rope_theta is None:
        return table, None
    of_windows = replace(config, rope_theta=config.window_rope_theta, rope_scaling=None)
    return table, rope_table(of_windows, max_positions).to(device)


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
    if scaling.kind == "yarn":
        return _yarn(frequencies, scaling, config), scaling.attention_factor or 1.0
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


def _yarn(frequencies: Tensor, scaling: RopeScaling, config: ModelConfig) -> Tensor:
    """Waves that turn less than `beta_slow` times within the trained context are stretched by `factor`, those that turn
    more than `beta_fast` times are kept, and a ramp over the dimensions lies between."""

    def dimension(turns: float) -> float:
        """Whose wave turns so often within the trained context."""
        wavelength = scaling.original_max_position_embeddings / (2 * math.pi * turns)
        return config.rotary_dim * math.log(wavelength) / (2 * math.log(config.rope_theta))

    first, last = dimension(scaling.beta_fast), dimension(scaling.beta_slow)
    if scaling.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, config.rotary_dim - 1)
    ramp = (torch.arange(len(frequencies), dtype=torch.float32) - first) / max(last - first, 0.001)
    stretched = ramp.clamp(0, 1)
    return frequencies * (1 - stretched) + frequencies / scaling.factor * stretched


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
