"""EAGLE heads of the first kind, which EAGLE-2 drafts with too: those of its authors."""

from __future__ import annotations

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


def fits(published: Published) -> bool:
    """Its config is that of a plain model: the tensors tell."""
    is_model = any(name.endswith("ForCausalLM") for name in published.architectures)
    return is_model and "fc.weight" in published.names and "layers.0.input_layernorm.weight" not in published.names


def read(published: Published, target: Checkpoint) -> tuple[HeadConfig, Tensors]:
    layers = published.layers()
    tensors = {name.replace("layers.0.", "midlayer.", 1): tensor for name, tensor in published.tensors().items()}
    has_bias = published.fields.flag("bias", True)  # as the authors' own code takes it
    drop_shared_embedding(tensors, target)
    config = HeadConfig.of_sizes(
        layers,
        target.config,
        kind="eagle",
        **head_fields(published, layers, target),
        fuses_embedding=True,
        taps=(target.config.num_layers,),
        draft_vocab_size=layers.vocab_size,
        block=DEFAULT_DEPTH,
        shares_embedding="embed_tokens.weight" not in tensors,
        shares_output="lm_head.weight" not in tensors,
        qk_norm=layers.qk_norm,
        biases=(*found_biases(published, ["layers.0"], published.raw), *["fc"] * has_bias),
    )
    check_config(published.folder, config, target)
    return completed(
        published, config, tensors, ("lm_head.weight",), lambda name: name.replace("midlayer.", "layers.0.", 1)
    )
