"""Which tensors a head of each kind has, and the shape of each. The names are those that vLLM reads."""

from __future__ import annotations

from foredraft.models.heads.config import HeadConfig

Shapes = dict[str, tuple[int, ...]]

D2T, T2D = "d2t", "t2d"  # int64 [draft_vocab]: target id = i + d2t[i]; bool [target_vocab]


def tensor_shapes(config: HeadConfig) -> Shapes:
    """Every tensor of a head, nothing else."""
    of_kind = _OF_KIND[config.kind](config)
    vocabulary: Shapes = {D2T: (config.draft_vocab_size,), T2D: (config.target_vocab_size,)}
    return of_kind | vocabulary


def _eagle(config: HeadConfig) -> Shapes:
    hidden = config.hidden_size
    return {
        "fc.weight": (hidden, len(config.taps) * config.target_hidden_size),
        **_layer("midlayer", config, inputs=2 * hidden),
        "midlayer.hidden_norm.weight": (hidden,),
        "norm.weight": (hidden,),
        "lm_head.weight": (config.draft_vocab_size, hidden),
    }


def _medusa(config: HeadConfig) -> Shapes:
    hidden = config.hidden_size
    shapes: Shapes = {"norm.weight": (hidden,), "lm_head.weight": (config.draft_vocab_size, hidden)}
    for offset in range(config.block):
        for layer in range(config.num_layers):
            shapes[f"blocks.{offset}.layers.{layer}.weight"] = (hidden, hidden)
            shapes[f"blocks.{offset}.layers.{layer}.bias"] = (hidden,)
    return shapes


def _dflash(config: HeadConfig) -> Shapes:
    hidden, target, rank = config.hidden_size, config.target_hidden_size, config.rank
    shapes: Shapes = {
        "fc.weight": (hidden, len(config.taps) * target),
        "hidden_norm.weight": (hidden,),
        "norm.weight": (hidden,),
        "lm_head.weight": (config.draft_vocab_size, hidden),
    }
    if config.block_input == "masked":
        shapes["mask_embedding.weight"] = (1, hidden)  # the target's, of mask_token_id
    else:
        shapes |= {f"tap_norms.{index}.weight": (target,) for index in range(len(config.taps))}
        shapes["anchor_proj.weight"] = (hidden, target)
        shapes["feature_proj.weight"] = (hidden, hidden)
        shapes["mask_embedding.weight"] = (config.block, hidden)
    for index in range(config.num_layers):
        shapes |= _layer(f"layers.{index}", config, inputs=hidden)
        shapes[f"layers.{index}.self_attn.q_norm.weight"] = (config.head_dim,)
        shapes[f"layers.{index}.self_attn.k_norm.weight"] = (config.head_dim,)
    if config.correction == "markov":
        shapes["markov_head.markov_w1"] = (config.target_vocab_size, rank)
        shapes["markov_head.markov_w2"] = (config.draft_vocab_size, rank)
    if config.correction == "refiner":
        shapes["refiner.in_proj.weight"] = (rank, hidden)
        shapes["refiner.table.weight"] = (config.target_vocab_size + 1, rank)  # the last row: previous token unknown
        shapes["refiner.out_proj.weight"] = (hidden, rank)
    return shapes


def _draft_model(config: HeadConfig) -> Shapes:
    hidden = config.hidden_size
    shapes: Shapes = {
        "embed_tokens.weight": (config.draft_vocab_size, hidden),  # the output head too
        "unknown_proj.weight": (hidden, config.target_hidden_size),  # the embedding of other tokens, from the target's
        "norm.weight": (hidden,),
    }
    for index in range(config.num_layers):
        shapes |= _layer(f"layers.{index}", config, inputs=hidden)
    return shapes


_OF_KIND = {"eagle": _eagle, "medusa": _medusa, "dflash": _dflash, "draft_model": _draft_model}


def _layer(prefix: str, config: HeadConfig, inputs: int) -> Shapes:
    """A decoder layer whose q, k and v read rows of `inputs`."""
    hidden, inner = config.hidden_size, config.intermediate_size
    queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    return {
        f"{prefix}.input_layernorm.weight": (hidden,),
        f"{prefix}.post_attention_layernorm.weight": (hidden,),
        f"{prefix}.self_attn.q_proj.weight": (queries, inputs),
        f"{prefix}.self_attn.k_proj.weight": (keys, inputs),
        f"{prefix}.self_attn.v_proj.weight": (keys, inputs),
        f"{prefix}.self_attn.o_proj.weight": (hidden, queries),
        f"{prefix}.mlp.gate_proj.weight": (inner, hidden),
        f"{prefix}.mlp.up_proj.weight": (inner, hidden),
        f"{prefix}.mlp.down_proj.weight": (hidden, inner),
    }
