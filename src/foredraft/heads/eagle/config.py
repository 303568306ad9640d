"""What an EAGLE head is on disk: a layer over the target's taps and the embedding of a token. Those of others may have
another width than their target, further layers behind the first, and more norms; or they are of EAGLE's first kind, or
draft all tokens in one run (P-EAGLE)."""

from __future__ import annotations

from foredraft.heads.base import BLOCK_INPUTS, HeadConfig, Rules, Shapes, layer_tensors


def layer_names(config: HeadConfig) -> list[str]:
    """How the names of the tensors of each layer begin."""
    return ["midlayer", *(f"layers.{index}" for index in range(1, config.num_layers))]


def _tensors(config: HeadConfig) -> Shapes:
    hidden, taps = config.hidden_size, len(config.taps) * config.target_hidden_size
    fused = config.fuses_embedding
    shapes: Shapes = {"fc.weight": (hidden, hidden + taps if fused else taps)}
    if "fc" in config.biases:
        shapes["fc.bias"] = (hidden,)
    for name in layer_names(config):
        inputs = 2 * hidden if name == "midlayer" and not fused else hidden
        shapes |= layer_tensors(name, config, inputs, config.qk_norm)
    if fused:
        del shapes["midlayer.input_layernorm.weight"]
    else:
        shapes |= {"midlayer.hidden_norm.weight": (hidden,), "norm.weight": (hidden,)}
    if config.norm_before_fc:
        shapes["input_norm.weight"] = (taps,)
    if config.block_input == "masked":
        shapes["mask_hidden"] = (taps,)
    if config.fc_norm:
        shapes |= {f"fc_norm.{index}.weight": (config.target_hidden_size,) for index in range(len(config.taps))}
    return shapes


RULES = Rules(
    _tensors,
    as_wide_as_target=True,
    block_inputs=BLOCK_INPUTS,
    variants=frozenset(
        {
            *("shares_embedding", "shares_output", "rope_scaling", "sliding_window", "sliding_layers", "biases"),
            *("qk_norm", "norm_before_fc", "fc_norm", "norm_before_residual", "norm_output", "fuses_embedding"),
            "mapped_vocab_size",
        }
    ),
)
