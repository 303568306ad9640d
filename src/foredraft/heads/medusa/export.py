"""Medusa heads for vLLM, which gives them the target's hidden state after its final norm."""

from __future__ import annotations

import torch

from foredraft.errors import InvalidModel
from foredraft.heads.base import D2T
from foredraft.heads.engines import Engine
from foredraft.heads.export import Head, Json, Layout, renamed

_NORM = "norm.weight"
# vLLM 0.32 loads a token map, then takes it for one that was not loaded, unless it is told not to look.
_UNTRACKED = ("--model-loader-extra-config", '{"enable_weights_track": false}')


def layout(head: Head, engine: Engine) -> Layout:
    config, final_norm = head.config, head.target.vector("model.norm.weight").to(head.dtype)
    if engine is not Engine.vllm:
        raise InvalidModel(
            f"{engine.label} knows no Medusa heads; export this one to vllm, or train one that it knows with "
            "`foredraft train eagle`."
        )
    if config.taps != (config.target_num_layers,) or not torch.equal(head.tensors[_NORM], final_norm):
        raise InvalidModel(
            "vLLM gives Medusa heads the target's last hidden state after the target's own final norm, but this head "
            "reads something else; train one with `foredraft train medusa`, which reads that."
        )
    # Not num_attention_heads or the like: vLLM takes any key with "num" and "heads" for the number of offsets.
    fields: Json = {
        "architectures": ["MedusaModel"],
        "model_type": "medusa",
        "vocab_size": config.target_vocab_size,
        "truncated_vocab_size": config.draft_vocab_size,
        "hidden_size": config.hidden_size,
        "num_heads": config.block,
        "num_hidden_layers": config.num_layers,  # of each offset's block
        "medusa_fc_bias": True,
        "original_lm_head": True,  # one output head for all offsets
        "torch_dtype": head.dtype_name,
    }
    tensors = renamed(head.tensors, {})
    del tensors[_NORM]
    options: tuple[str, ...] = ()
    if config.draft_vocab_size < config.target_vocab_size:
        tensors["token_map"] = head.tensors[D2T] + torch.arange(config.draft_vocab_size)
        options = _UNTRACKED
    return Layout(fields, tensors, "medusa", config.block, options)
