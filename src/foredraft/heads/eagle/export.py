"""EAGLE-3 heads for other engines. The tensors are theirs already; what differs is how each numbers the taps.

Tap k is the residual stream after k layers. vLLM and speculators give it the id k. SGLang names the layer whose output
it is, counted from 0, so its id is k - 1."""

from __future__ import annotations

import torch

from foredraft.errors import InvalidModel
from foredraft.heads.base import MAPPED, OUTPUT_MAP
from foredraft.heads.eagle.module import EagleModule
from foredraft.heads.engines import Engine
from foredraft.heads.export import (
    Head,
    Json,
    Layout,
    Tensors,
    layer_fields,
    renamed,
    speculators_fields,
    vocabulary_tensors,
)


def layout(head: Head, engine: Engine) -> Layout:
    config, taps = head.config, list(head.config.taps)
    if engine is Engine.sglang and config.target_num_layers in taps:
        raise InvalidModel(
            f"SGLang cannot read the residual stream after the target's last layer, which is tap {taps[-1]} of this "
            "head; export it to vllm, or train one with `foredraft train eagle`, which reads earlier layers."
        )
    layers = layer_fields(head, "llama") | {"mlp_bias": False}
    layers["num_aux_hidden_states"] = len(taps)  # the width of fc; vLLM takes 3 where nothing says it
    residual: Json = {"norm_before_residual": False}  # the residual is h before its norm; speculators' default differs
    tensors = renamed(_tensors(head), {"midlayer.": "layers.0."}) | vocabulary_tensors(head)
    if engine is Engine.speculators:
        tensors["embed_tokens.weight"] = head.embedding  # without it the package takes random ones
        fields = speculators_fields(head, "eagle3", "Eagle3Speculator", layers, config.block) | residual
        fields |= {"norm_before_fc": False, "fc_norm": False, "norm_output": False}
        fields["eagle_aux_hidden_state_layer_ids"] = taps
    else:
        fields = {"architectures": ["LlamaForCausalLMEagle3"], **layers, **residual}
        fields |= {"draft_vocab_size": config.draft_vocab_size, "target_hidden_size": config.target_hidden_size}
        if engine is Engine.vllm:
            fields["eagle_aux_hidden_state_layer_ids"] = taps
        else:
            ids = [tap - 1 for tap in taps]
            fields["eagle_config"] = {"use_aux_hidden_state": True, "eagle_aux_hidden_state_layer_ids": ids}
    return Layout(fields, tensors, "eagle3", config.block)


@torch.no_grad()
def _tensors(head: Head) -> Tensors:
    """Those of the head, with a row of the output head for every token of the draft vocabulary."""
    if not head.config.mapped_vocab_size:
        return head.tensors
    module = EagleModule(head.config)
    module.load_state_dict(head.tensors)
    rows = module.output(head.output[module.token_ids])
    others = {name: tensor for name, tensor in head.tensors.items() if name not in (MAPPED, OUTPUT_MAP)}
    return others | {"lm_head.weight": rows.to(head.dtype)}
