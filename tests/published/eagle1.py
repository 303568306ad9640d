"""EAGLE-1 heads (EAGLE-2 uses the same files).

Source: SafeAILab/EAGLE eagle/model/cnets1.py, vllm-project/vllm llama_eagle.py, vllm-project/speculators
models/eagle.py and convert/eagle/eagle_converter.py.

* Row t reads fc([embedding of token t + 1, state t]) and gives the logits of token t + 2; rope position t.
* The state is the target's last stream after its final norm: what the target's own output head reads
  (EAGLE issues 76 and 91, answers of the authors).
* The first layer has no input_layernorm, the head has no norm at its end: the target's output head reads the layers'
  output as it is, and so does the row behind.
* In the speculators format `transformer` is the layer and `fusion_fc` the fc, whose bias `fusion_bias` announces. With
  `layernorms` there are norms of the embedding, of the layer's input and of its output; no reference of these is here.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.published.blocks import Heads, linear, mlp, rms_norm, rope_of, self_attention
from tests.published.shapes import (
    Draw,
    Layout,
    PathReference,
    Streams,
    TargetShape,
    layer_weights,
    read_config,
    read_tensors,
    write_files,
)


class Eagle1Reference(PathReference):
    def load(self) -> None:
        top, self.tensors = read_config(self.given.folder), read_tensors(self.given.folder)
        config, has_bias = top, top.get("bias", True)
        if "speculators_model_type" in top:
            config, has_bias = top["transformer_layer_config"], top["fusion_bias"]
            self.tensors = {_plain_name(name): tensor for name, tensor in self.tensors.items()}
        self.heads = Heads.of(config)
        self.rope = rope_of(config, self.heads.head_dim)
        self.embedding = self.tensors.get("embed_tokens.weight", self.given.embedding)
        assert config["num_hidden_layers"] == 1, "more layers than one have not been published"
        # A config without `bias` means one (eagle/model/ea_model.py).
        assert ("fc.bias" in self.tensors) == has_bias

    def run(self, states: Tensor, token_ids: Sequence[int]) -> Tensor:
        joined = torch.cat((self.embedding[torch.tensor(token_ids)], states), dim=-1)
        x = linear(joined, self.tensors, "fc")
        positions = torch.arange(len(x))
        x = x + self_attention(x, positions, self.tensors, "layers.0.self_attn", self.heads, self.rope)
        normed = rms_norm(x, self.tensors["layers.0.post_attention_layernorm.weight"], self.heads.eps)
        return x + mlp(normed, self.tensors, "layers.0.mlp")

    def path_logits(self, streams: Streams, tokens: Sequence[int], drafted: Sequence[int]) -> Tensor:
        states = rms_norm(streams[-1].float(), self.given.final_norm, self.given.target.eps)
        token_ids, rows = list(tokens[1:]), []
        for token in [*drafted, None]:
            last = self.run(states, token_ids)[-1:]
            rows.append(last @ self.given.lm_head.T)
            if token is not None:
                states = torch.cat((states, last))
                token_ids.append(token)
        return torch.cat(rows)


def _plain_name(name: str) -> str:
    return name.replace("transformer.", "layers.0.").replace("fusion_fc.", "fc.")


def _layout(bias: bool | None, embedding: bool) -> Layout:
    def write(folder: Path, target: TargetShape, seed: int) -> None:
        draw = Draw(seed)
        tensors = {"fc.weight": draw.matrix(target.hidden, 2 * target.hidden)}
        if bias is not False:
            tensors["fc.bias"] = draw.bias(target.hidden)
        tensors |= layer_weights(draw, "layers.0", target, norms=("post_attention_layernorm",))
        if embedding:
            tensors["embed_tokens.weight"] = draw.normal(target.vocab, target.hidden)
        config: dict[str, Any] = {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "hidden_act": "silu",
            "hidden_size": target.hidden,
            "intermediate_size": target.intermediate,
            "num_attention_heads": target.heads,
            "num_key_value_heads": target.kv_heads,
            "num_hidden_layers": 1,
            "head_dim": target.head_dim,
            "rms_norm_eps": target.eps,
            "rope_theta": target.rope_theta,
            "rope_scaling": None,
            "max_position_embeddings": 2048,
            "tie_word_embeddings": False,
            "vocab_size": target.vocab,
            "torch_dtype": "float16",
        }
        write_files(folder, config if bias is None else config | {"bias": bias}, tensors)

    return Layout(write, Eagle1Reference)


def _speculators(bias: bool, layernorms: bool = False) -> Layout:
    def write(folder: Path, target: TargetShape, seed: int) -> None:
        _layout(bias, embedding=False).write(folder, target, seed)
        layer, tensors = read_config(folder), read_tensors(folder)
        del layer["architectures"], layer["bias"]
        tensors = {
            name.replace("layers.0.", "transformer.").replace("fc.", "fusion_fc."): tensor
            for name, tensor in tensors.items()
        }
        if layernorms:
            draw = Draw(seed + 1)
            norms = ("embedding_layernorm", "transformer.input_layernorm", "pre_lm_head_layernorm")
            tensors |= {f"{name}.weight": draw.norm(target.hidden) for name in norms}
        config = {
            "architectures": ["EagleSpeculator", "LlamaDecoderLayer"],
            "fusion_bias": bias,
            "layernorms": layernorms,
            "speculators_model_type": "eagle",
            "speculators_version": "0.1.0",
            "speculators_config": {
                "algorithm": "eagle",
                "default_proposal_method": "greedy",
                "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 4}],
                "verifier": {"architectures": ["LlamaForCausalLM"], "name_or_path": "target"},
            },
            "transformer_layer_architecture": "LlamaDecoderLayer",
            "transformer_layer_config": layer,
        }
        write_files(folder, config, tensors)

    return Layout(write, Eagle1Reference)


LAYOUTS: dict[str, Layout] = {
    "eagle1": _layout(False, embedding=False),
    "eagle1-bias": _layout(True, embedding=False),
    "eagle1-bias-unsaid": _layout(None, embedding=True),  # its own embedding, too
    "speculators": _speculators(False),
    "speculators-bias": _speculators(True),  # HASS
    "speculators-layernorms": _speculators(False, layernorms=True),
}
