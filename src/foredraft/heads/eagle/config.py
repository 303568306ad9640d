"""What an EAGLE head is on disk: a layer over the target's taps and the embedding of a token. Those of others may have
another width than their target, further layers behind the first, and more norms."""

from __future__ import annotations

from foredraft.heads.base import HeadConfig, Rules, Shapes, layer_tensors


def layer_names(config: HeadConfig) -> list[str]:
    """How the names of the tensors of each layer begin."""
    return ["midlayer", *(f"layers.{index}" for index in range(1, config.num_layers))]


def _tensors(config: HeadConfig) -> Shapes:
    hidden, taps = config.hidden_size, len(config.taps)
    shapes: Shapes = {
        "fc.weight": (hidden, taps * config.target_hidden_size),
        "midlayer.hidden_norm.weight": (hidden,),
        "norm.weight": (hidden,),
    }
    for name in layer_names(config):
        inputs = 2 * hidden if name == "midlayer" else hidden
        shapes |= layer_tensors(name, config, inputs, config.qk_norm)
    if config.norm_before_fc:
        shapes["input_norm.weight"] = (taps * config.target_hidden_size,)
    if config.fc_norm:
        shapes |= {f"fc_norm.{index}.weight": (config.target_hidden_size,) for index in range(taps)}
    return shapes


RULES = Rules(
    _tensors,
    as_wide_as_target=True,
    variants=frozenset(
        {
            *("shares_embedding", "shares_output", "rope_scaling", "sliding_window", "sliding_layers", "biases"),
            *("qk_norm", "norm_before_fc", "fc_norm", "norm_before_residual", "norm_output"),
        }
    ),
)
