"""EAGLE heads of the first kind, which EAGLE-2 drafts with too: those of its authors, and in the speculators format,
where those of HASS are the same with a bias."""

from __future__ import annotations

from collections.abc import Mapping

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

_AUTHORS = {"layers.0.": "midlayer."}  # how our names begin, by theirs
_SPECULATORS = {"transformer.": "midlayer.", "fusion_fc.": "fc."}


def fits(published: Published) -> bool:
    """Where its config is that of a plain model, the tensors tell."""
    if published.speculators_type is not None:
        return published.speculators_type == "eagle"
    is_model = any(name.endswith("ForCausalLM") for name in published.architectures)
    return is_model and "fc.weight" in published.names and "layers.0.input_layernorm.weight" not in published.names


def read(published: Published, target: Checkpoint) -> tuple[HeadConfig, Tensors]:
    layers, raw = published.layers(), published.section("transformer_layer_config") or published.raw
    if published.fields.flag("layernorms", False):
        raise published.refuse(
            "layernorms is true, so that it has norms of its embedding and of its output, which are not supported; use "
            "an EAGLE head without them."
        )
    is_authors = published.speculators_type is None
    beginnings = _AUTHORS if is_authors else _SPECULATORS
    theirs = {our: their for their, our in beginnings.items()}
    tensors = {_replaced(name, beginnings): tensor for name, tensor in published.tensors().items()}
    # A field that is left out is what their own code takes it for.
    has_bias = published.fields.flag("bias", True) if is_authors else published.fields.flag("fusion_bias", False)
    drop_shared_embedding(tensors, target)
    config = HeadConfig.of_sizes(
        layers,
        target.config,
        kind="eagle",
        **head_fields(published, layers, target),
        fuses_embedding=True,
        taps=(target.config.num_layers,),
        draft_vocab_size=layers.vocab_size,
        block=published.speculative_tokens() or DEFAULT_DEPTH,
        shares_embedding="embed_tokens.weight" not in tensors,
        shares_output="lm_head.weight" not in tensors,
        qk_norm=layers.qk_norm,
        biases=(*found_biases(published, ["layers.0", "transformer"], raw), *["fc"] * has_bias),
    )
    check_config(published.folder, config, target)
    return completed(published, config, tensors, ("lm_head.weight",), lambda name: _replaced(name, theirs))


def _replaced(name: str, beginnings: Mapping[str, str]) -> str:
    found = (new + name.removeprefix(old) for old, new in beginnings.items() if name.startswith(old))
    return next(found, name)
