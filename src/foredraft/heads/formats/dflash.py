"""DFlash and DSpark heads: those of z-lab and DeepSpec, and in the speculators format.

`target_layer_ids` number the target's layers from 0 and mean their outputs; -1 is the embedding. In the speculators
format, `aux_hidden_state_layer_ids` name the stream after so many layers. Without a list the taps are those of z-lab.
What z-lab nests in `dflash_config` may stand at the top too."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from foredraft.config import ModelConfig
from foredraft.heads.base import HeadConfig
from foredraft.heads.files import Tensors
from foredraft.heads.formats.published import (
    REMEDY,
    Published,
    check_config,
    completed,
    drop_shared_embedding,
    found_biases,
    head_fields,
)
from foredraft.models.checkpoint import Checkpoint
from foredraft.models.fields import Fields, shown

_PARTS_OF_OTHERS = ("conv", "selector", "causal_head")
_MASK = "mask_embedding.weight"
_CONFIDENCE = "confidence_head.proj"
_MARKOV = ("markov_head.markov_w1", "markov_head.markov_w2")
_BONUS_ANCHOR = "dspark_bonus_anchor"  # vLLM's opposite of sample_from_anchor
OTHER_WINDOWS = (
    "each row of its blocks has another sliding window, counted from the row where rows see those behind them too, "
    "or from the block where they do not, which is not supported; use a head without sliding windows."
)


def fits(published: Published) -> bool:
    if published.speculators_type is not None:
        return published.speculators_type in ("dflash", "dspark")
    named = any(name in ("DFlashDraftModel", "Qwen3DSparkModel") for name in published.architectures)
    is_other = published.projector == "domino"
    return named and not is_other and not any(name.startswith(_PARTS_OF_OTHERS) for name in published.names)


def read(published: Published, target: Checkpoint) -> tuple[HeadConfig, Tensors]:
    raw = published.section("transformer_layer_config") or published.raw
    options = {**raw, **published.raw, **published.section("dflash_config")}
    fields = Fields(published.file, options)
    tensors = published.tensors()
    for name in _MARKOV:
        if f"{name}.weight" in tensors:
            tensors[name] = tensors.pop(f"{name}.weight")
    has_markov, rank = _MARKOV[0] in tensors, fields.integer("markov_rank", 0)
    if rank and not has_markov:
        raise published.missing(f"{_MARKOV[0]}.weight", f"markov_rank {rank}")
    if has_markov and (kind := fields.text("markov_head_type", "vanilla")) not in ("vanilla", "gated"):
        raise published.refuse(f"markov_head_type is {shown(kind)}, but only vanilla and gated are supported.")
    from_anchor = _from_anchor(published, fields, has_markov)
    rows = fields.integer("block_size", most=1024)
    if rows == 1 and not from_anchor:
        raise fields.error("block_size", "is 1, but a block that does not sample from its anchor needs 2")
    layers, causal_layers = _attention(published, options, rows)
    mask = next(iter(fields.token_ids("mask_token_id")), None)
    if mask is None:
        raise fields.error("mask_token_id", "is missing")
    drop_shared_embedding(tensors, target)
    config = HeadConfig.of_sizes(
        layers,
        target.config,
        kind="dflash",
        **head_fields(published, layers, target),
        taps=_taps(published, options, target.config.num_layers, layers.num_layers),
        draft_vocab_size=fields.integer("draft_vocab_size", layers.vocab_size),
        block=rows - (not from_anchor),
        block_input="masked",
        mask_token_id=mask,
        correction="markov" if has_markov else "none",
        rank=(rank or tensors[_MARKOV[0]].shape[-1]) if has_markov else 0,
        shares_embedding="embed_tokens.weight" not in tensors,
        shares_output="lm_head.weight" not in tensors,
        biases=found_biases(published, ["layers.0"], raw),
        sample_from_anchor=from_anchor,
        causal_layers=causal_layers,
        markov_gate="markov_head.gate_proj.weight" in tensors,
        confidence=_confidence(published, tensors, fields, has_markov),
    )
    check_config(published.folder, config, target)
    if fields.integer("num_target_layers", config.target_num_layers) != config.target_num_layers:
        found = f"num_target_layers is {options['num_target_layers']}"
        raise published.refuse(f"{found}, but the model has {config.target_num_layers} layers; {REMEDY}.")
    if not config.shares_embedding:
        tensors[_MASK] = tensors["embed_tokens.weight"][mask : mask + 1]
    else:
        tensors[_MASK] = target.weight("model.embed_tokens.weight").rows(mask, mask + 1).dense()
    return completed(published, config, tensors, ("lm_head.weight", _MARKOV[1]), _named)


def _named(name: str) -> str:
    return f"{name}.weight" if name in _MARKOV else name


def _from_anchor(published: Published, fields: Fields, has_markov: bool) -> bool:
    """Whether the anchor's row predicts the token behind it, which two fields may say."""
    from_anchor = fields.flag("sample_from_anchor", not fields.flag(_BONUS_ANCHOR, not has_markov))
    if from_anchor == fields.flag(_BONUS_ANCHOR, not from_anchor):
        raise published.refuse(
            f"sample_from_anchor and {_BONUS_ANCHOR} are both {str(from_anchor).lower()}, but one is the opposite of "
            "the other; remove the wrong one from config.json."
        )
    return from_anchor


def _taps(published: Published, options: dict[str, Any], num_layers: int, num_own_layers: int) -> tuple[int, ...]:
    streams = published.ids(options, "aux_hidden_state_layer_ids")
    outputs = published.ids(options, "target_layer_ids")
    if outputs is not None:
        return tuple(layer + 1 for layer in outputs)
    if streams is not None:
        return streams
    if published.speculators_type is not None:
        raise published.fields.error("aux_hidden_state_layer_ids", "is missing")
    if num_own_layers == 1:
        return (num_layers // 2 + 1,)
    # As many as the head has layers, evenly from the target's second layer to its third last.
    step = (num_layers - 4) / (num_own_layers - 1)
    return tuple(round(1 + index * step) + 1 for index in range(num_own_layers))


def _attention(published: Published, options: dict[str, Any], rows: int) -> tuple[ModelConfig, tuple[int, ...]]:
    """The layers, with the windows that our attention has to have, and in which of them rows see only those before."""
    layers, fields = published.layers(), Fields(published.file, options)
    every = tuple(range(layers.num_layers))
    if published.speculators_type is not None:
        if not layers.sliding_layers:
            return layers, ()
        if not fields.flag("sliding_window_non_causal", False):
            raise published.refuse(OTHER_WINDOWS)
        # Theirs counts tokens before the block, for all of its rows alike; ours ends with the last key.
        assert layers.sliding_window is not None
        return replace(layers, sliding_window=layers.sliding_window + rows), ()
    is_named = bool(options.get("layer_types"))
    if not is_named and fields.flag("use_swa", False):
        window = fields.integer("swa_window_size", fields.integer("sliding_window"))
        layers = replace(layers, sliding_window=window, sliding_layers=every)
    is_causal = fields.flag("is_causal", fields.flag("causal", False))
    if is_causal or not layers.sliding_layers:
        return layers, every if is_causal else ()
    if not is_named or "is_causal" in options or "causal" in options:
        raise published.refuse(OTHER_WINDOWS)
    return layers, layers.sliding_layers  # which are causal unless the config says otherwise


def _confidence(published: Published, tensors: dict[str, Tensor], fields: Fields, has_markov: bool) -> str:
    """What the confidence output reads; one that the config switches off is left out. Its bias may be missing."""
    if not fields.flag("enable_confidence_head", True):
        for name in ("weight", "bias"):
            tensors.pop(f"{_CONFIDENCE}.{name}", None)
    if f"{_CONFIDENCE}.weight" not in tensors:
        if fields.flag("enable_confidence_head", False):
            raise published.missing(f"{_CONFIDENCE}.weight", "enable_confidence_head true")
        return "none"
    tensors.setdefault(f"{_CONFIDENCE}.bias", torch.zeros(1))
    return "row and code" if fields.flag("confidence_head_with_markov", has_markov) else "row"
