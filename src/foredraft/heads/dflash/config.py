"""What a DFlash head is on disk: some layers of any width, what their rows start from, and a correction."""

from __future__ import annotations

from foredraft.heads.base import BLOCK_INPUTS, CORRECTIONS, HeadConfig, Rules, Shapes, layer_tensors


def _tensors(config: HeadConfig) -> Shapes:
    hidden, target, rank = config.hidden_size, config.target_hidden_size, config.rank
    shapes: Shapes = {
        "fc.weight": (hidden, len(config.taps) * target),
        "hidden_norm.weight": (hidden,),
        "norm.weight": (hidden,),
    }
    if config.block_input == "masked":
        shapes["mask_embedding.weight"] = (1, hidden)  # the embedding of mask_token_id
    else:
        shapes |= {f"tap_norms.{index}.weight": (target,) for index in range(len(config.taps))}
        shapes["anchor_proj.weight"] = (hidden, target)
        shapes["feature_proj.weight"] = (hidden, hidden)
        shapes["mask_embedding.weight"] = (config.block, hidden)
    for index in range(config.num_layers):
        shapes |= layer_tensors(f"layers.{index}", config, inputs=hidden, qk_norm=True)
    if config.correction == "markov":
        shapes["markov_head.markov_w1"] = (config.target_vocab_size, rank)
        shapes["markov_head.markov_w2"] = (config.draft_vocab_size, rank)
    if config.markov_gate:
        shapes["markov_head.gate_proj.weight"] = (rank, hidden + rank)
        shapes["markov_head.gate_proj.bias"] = (rank,)
    if config.confidence != "none":
        width = hidden + rank * (config.confidence == "row and code")
        shapes |= {"confidence_head.proj.weight": (1, width), "confidence_head.proj.bias": (1,)}
    if config.correction == "refiner":
        shapes["refiner.in_proj.weight"] = (rank, hidden)
        shapes["refiner.table.weight"] = (config.target_vocab_size + 1, rank)  # the last row: previous token unknown
        shapes["refiner.out_proj.weight"] = (hidden, rank)
    return shapes


RULES = Rules(
    _tensors,
    corrections=CORRECTIONS,
    block_inputs=BLOCK_INPUTS,
    variants=frozenset(
        {
            *("shares_embedding", "shares_output", "rope_scaling", "sliding_window", "sliding_layers", "biases"),
            *("sample_from_anchor", "causal_layers", "markov_gate", "confidence"),
        }
    ),
)
