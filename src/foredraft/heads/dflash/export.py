"""DFlash heads for other engines, as DSpark: there, too, the anchor's row predicts the token behind it, and a Markov
term may correct each row. A head without a correction has one of zeros.

Rows must be masked ones: engines know no norms of taps, and no rows that know the anchor and the last feature, and
neither can be folded into weights."""

from __future__ import annotations

import torch

from foredraft.errors import InvalidModel
from foredraft.heads.engines import Engine
from foredraft.heads.export import Head, Json, Layout, layer_fields, renamed, speculators_fields, vocabulary_tensors

_MASK = "mask_embedding.weight"
_W1, _W2 = "markov_head.markov_w1", "markov_head.markov_w2"
_EXPORTABLE = "`foredraft train dflash:input=masked,correction=markov`"


def layout(head: Head, engine: Engine) -> Layout:
    config = head.config
    _check(head, engine)
    tensors = renamed(head.tensors, {_W1: f"{_W1}.weight", _W2: f"{_W2}.weight"}) | vocabulary_tensors(head)
    del tensors[_MASK]
    if config.correction == "none":
        tensors[f"{_W1}.weight"] = torch.zeros(config.target_vocab_size, 1, dtype=head.dtype)
        tensors[f"{_W2}.weight"] = torch.zeros(config.draft_vocab_size, 1, dtype=head.dtype)
    block: Json = {
        "block_size": config.block,
        "mask_token_id": config.mask_token_id,
        "sample_from_anchor": True,
        "markov_rank": max(1, config.rank),
        "markov_head_type": "vanilla",
        "enable_confidence_head": False,
        "confidence_head_with_markov": False,
    }
    layers = layer_fields(head, "qwen3")
    if engine is Engine.speculators:
        fields = speculators_fields(head, "dspark", "DSparkSpeculator", layers, config.block) | block
        fields["aux_hidden_state_layer_ids"] = list(config.taps)
    else:
        fields = {"architectures": ["Qwen3DSparkModel"], **layers, **block, "dspark_bonus_anchor": False}
        fields |= {"draft_vocab_size": config.draft_vocab_size, "target_hidden_size": config.target_hidden_size}
        fields["eagle_aux_hidden_state_layer_ids"] = list(config.taps)
        fields["target_layer_ids"] = [tap - 1 for tap in config.taps]
    return Layout(fields, tensors, "dspark", config.block)


def _check(head: Head, engine: Engine) -> None:
    """Raise InvalidModel unless the engine has a place for every part."""
    config = head.config
    if config.block_input != "masked":
        raise InvalidModel(
            f"{engine.label} has no place for the norms of this DFlash head's taps, nor for rows that all know the "
            f"anchor and the last feature; train one without them: {_EXPORTABLE}."
        )
    if config.correction == "refiner":
        raise InvalidModel(f"{engine.label} has no place for a refiner; train a DFlash head without: {_EXPORTABLE}.")
    if engine is Engine.sglang:
        raise InvalidModel(
            "SGLang's DFlash and DSpark use the target's output head, but this head has its own; export it to vllm, or "
            "train one that it knows with `foredraft train eagle`."
        )
    if not torch.equal(head.tensors[_MASK][0], head.embedding[config.mask_token_id]):
        raise InvalidModel(
            f"{engine.label} takes the target's embedding of token {config.mask_token_id} for masks, but this head has "
            f"another; train one with {_EXPORTABLE}, which takes that."
        )
