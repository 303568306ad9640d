"""What a distilled draft model is on disk: a decoder with the embeddings of the target's most frequent tokens."""

from __future__ import annotations

from foredraft.heads.base import HeadConfig, Rules, Shapes, layer_tensors


def _tensors(config: HeadConfig) -> Shapes:
    hidden = config.hidden_size
    shapes: Shapes = {
        "embed_tokens.weight": (config.draft_vocab_size, hidden),  # the output head too
        "unknown_proj.weight": (hidden, config.target_hidden_size),  # the embedding of other tokens, from the target's
        "norm.weight": (hidden,),
    }
    for index in range(config.num_layers):
        shapes |= layer_tensors(f"layers.{index}", config, inputs=hidden)
    return shapes


RULES = Rules(_tensors, reads_taps=False)
