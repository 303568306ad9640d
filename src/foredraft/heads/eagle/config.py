"""What an EAGLE head is on disk: one layer as wide as its target, over the target's taps."""

from __future__ import annotations

from foredraft.heads.base import HeadConfig, Rules, Shapes, layer_tensors


def _tensors(config: HeadConfig) -> Shapes:
    hidden = config.hidden_size
    return {
        "fc.weight": (hidden, len(config.taps) * config.target_hidden_size),
        **layer_tensors("midlayer", config, inputs=2 * hidden),
        "midlayer.hidden_norm.weight": (hidden,),
        "norm.weight": (hidden,),
        "lm_head.weight": (config.draft_vocab_size, hidden),
    }


RULES = Rules(_tensors, as_wide_as_target=True, most_layers=1)
