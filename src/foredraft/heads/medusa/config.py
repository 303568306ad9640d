"""What a Medusa head is on disk: some layers per offset, as wide as its target."""

from __future__ import annotations

from foredraft.heads.base import HeadConfig, Rules, Shapes


def _tensors(config: HeadConfig) -> Shapes:
    hidden = config.hidden_size
    shapes: Shapes = {"norm.weight": (hidden,)}
    for offset in range(config.block):
        for layer in range(config.num_layers):
            shapes[f"blocks.{offset}.layers.{layer}.weight"] = (hidden, hidden)
            shapes[f"blocks.{offset}.layers.{layer}.bias"] = (hidden,)
    return shapes


RULES = Rules(_tensors, as_wide_as_target=True, variants=frozenset({"shares_output", "output_per_offset"}))
