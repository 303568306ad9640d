"""EAGLE-3 heads: those of its authors, of SpecForge, AngelSlim and NVIDIA, of DeepSpec, and in the speculators format;
and P-EAGLE heads, which are the same with `mask_hidden`, in that format and as vLLM reads them.

Ids of taps: a list at the top of the config, as vLLM and speculators write it, names the stream after so many layers.
One inside `eagle_config`, as SpecForge and NVIDIA write it, and DeepSpec's `target_layer_ids` number the layers from 0
and mean their outputs. Without a list the taps are those of EAGLE's authors."""

from __future__ import annotations

from typing import Any

from foredraft.heads.base import HeadConfig
from foredraft.heads.files import Tensors
from foredraft.heads.formats.published import (
    DEFAULT_DEPTH,
    Published,
    check_config,
    completed,
    drop_shared_embedding,
    found_biases,
    head_fields,
)
from foredraft.models.checkpoint import Checkpoint
from foredraft.models.fields import Fields, shown

_IDS = "eagle_aux_hidden_state_layer_ids"
_MASK = "mask_hidden"
_MASK_TOKENS = ("mask_token_id", "pard_token", "ptd_token_id")  # by whoever wrote the config
_PARALLEL = ("parallel_drafting", "ptd_token_id")  # which only P-EAGLE heads have
_FLAGS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")


def fits(published: Published) -> bool:
    if published.speculators_type is not None:
        return published.speculators_type in ("eagle3", "peagle")
    named = any(part in name.lower() for part in ("eagle3", "peagle") for name in published.architectures)
    return named or any(name.startswith("midlayer.") for name in published.names)


def read(published: Published, target: Checkpoint) -> tuple[HeadConfig, Tensors]:
    layers = published.layers()
    old = "midlayer" if any(name.startswith("midlayer.") for name in published.names) else "layers.0"
    tensors = {name.replace(f"{old}.", "midlayer.", 1): tensor for name, tensor in published.tensors().items()}
    nested, raw = published.section("eagle_config"), published.section("transformer_layer_config") or published.raw
    if Fields(published.file, nested).flag("use_aux_hidden_state", True) is False:
        raise published.refuse("eagle_config.use_aux_hidden_state is false, which is not supported; use another head.")
    flags = {name: Fields(published.file, {**nested, **published.raw}).flag(name, False) for name in _FLAGS}
    if published.speculators_type is not None and "norm_before_residual" not in published.raw:
        raise published.refuse(
            "norm_before_residual is missing in config.json, and engines differ in what that means; add it, with the "
            "value that the head was trained with."
        )
    if raw.get("tie_word_embeddings") is True and "lm_head.weight" not in tensors and "embed_tokens.weight" in tensors:
        tensors["lm_head.weight"] = tensors["embed_tokens.weight"]
    if _MASK in tensors:
        tensors[_MASK] = tensors[_MASK].flatten()  # some write it with leading ones
    drop_shared_embedding(tensors, target)
    config = HeadConfig.of_sizes(
        layers,
        target.config,
        kind="eagle",
        **head_fields(published, layers, target),
        **flags,
        **_masked(published),
        taps=_taps(published, target.config.num_layers),
        draft_vocab_size=published.fields.integer("draft_vocab_size", layers.vocab_size),
        block=published.speculative_tokens() or DEFAULT_DEPTH,
        shares_embedding="embed_tokens.weight" not in tensors,
        shares_output="lm_head.weight" not in tensors,
        qk_norm="midlayer.self_attn.q_norm.weight" in tensors or layers.qk_norm,
        biases=found_biases(published, [old], raw),
    )
    check_config(published.folder, config, target)
    return completed(
        published, config, tensors, ("lm_head.weight",), lambda name: name.replace("midlayer.", f"{old}.", 1)
    )


def _masked(published: Published) -> dict[str, Any]:
    """The fields of a P-EAGLE head that others do not have."""
    if _MASK not in published.names:
        if published.speculators_type == "peagle":
            raise published.missing(_MASK, "speculators_model_type peagle")
        for name in _PARALLEL:
            if published.raw.get(name) not in (None, False):
                raise published.missing(_MASK, f"{name} {shown(published.raw[name])}")
        return {}
    fields = Fields(published.file, {**published.raw, **published.section("dflash_config")})
    ids = next((found for name in _MASK_TOKENS if (found := fields.token_ids(name))), ())
    if len(ids) != 1:
        raise published.refuse("config.json does not say which token masks are (mask_token_id), but P-EAGLE needs one.")
    return {"block_input": "masked", "mask_token_id": ids[0]}


def _taps(published: Published, num_layers: int) -> tuple[int, ...]:
    top = published.ids(published.raw, _IDS)
    inner = published.ids(published.section("eagle_config"), _IDS) or published.ids(published.raw, "target_layer_ids")
    counted = None if inner is None else tuple(layer + 1 for layer in inner)
    if top is not None and counted is not None and top != counted:
        raise published.refuse(
            f"its two lists of taps disagree: the streams after {list(top)} layers, or after {list(counted)}; remove "
            "the wrong one from config.json."
        )
    return tuple(sorted(top or counted or (2, num_layers // 2, num_layers - 3)))  # as a run of the target meets them
