"""Multi-token prediction layers inside a target's own checkpoint.

* Row t reads the target's last stream at t and the embedding of token t + 1, each through a norm of its own, joined by
  one matrix; a whole decoder layer follows, at rope position t; then a norm and the output head give token t + 2.
* The stream is read after the target's final norm (vLLM and SGLang, for every family; for Qwen3.5 llama.cpp pull
  request 24025 measures that this is right). llama.cpp reads DeepSeek's and GLM's before that norm.
* A drafted row reads what the row before put out *after* the layer's last norm (vLLM pull requests 45895 and 47448 for
  DeepSeek and GLM, qwen3_5_mtp.py and mimo_mtp.py likewise).
* vLLM sets the embedding of row 0 to zero for DeepSeek, GLM and MiMo (deepseek_mtp.py, mimo_mtp.py; SGLang for MiMo),
  not for Qwen; the reports of the authors say nothing of it.

Where engines differ the choice is an attribute of the reference, so that a caller can take the other side.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from tests.published.blocks import (
    Heads,
    Rope,
    attend,
    causal,
    decoder_layer,
    linear,
    mlp,
    per_head,
    rms_norm,
    rope_of,
)
from tests.published.shapes import (
    Config,
    Draw,
    Layout,
    PathReference,
    Streams,
    TargetShape,
    Tensors,
    layer_weights,
    read_config,
    read_tensors,
    write_files,
)


class MtpReference(PathReference):
    """What the families share; `join` and `layer` are a family's own."""

    zero_first = True  # the embedding that row 0 reads is zero
    after_final_norm = True  # the target's stream is read after its final norm

    def load(self) -> None:
        self.top, self.tensors = read_config(self.given.folder), read_tensors(self.given.folder)
        self.config: Config = self.top.get("text_config") or self.top.get("transformer_layer_config") or self.top
        self.heads = Heads.of(self.config)
        self.rope: Rope = rope_of(self.config, self.heads.head_dim)
        self.embedding, self.head = self.given.embedding, self.given.lm_head

    def join(self, embedded: Tensor, states: Tensor) -> Tensor:
        raise NotImplementedError

    def layer(self, x: Tensor, positions: Tensor) -> Tensor:
        raise NotImplementedError

    def last_norm(self, x: Tensor) -> Tensor:
        raise NotImplementedError

    def path_logits(self, streams: Streams, tokens: Sequence[int], drafted: Sequence[int]) -> Tensor:
        states = streams[-1].float()
        if self.after_final_norm:
            states = rms_norm(states, self.given.final_norm, self.given.target.eps)
        token_ids, rows = list(tokens[1:]), []
        for token in [*drafted, None]:
            embedded = self.embedding[torch.tensor(token_ids)]
            if self.zero_first:
                embedded = torch.cat((torch.zeros_like(embedded[:1]), embedded[1:]))
            x = self.layer(self.join(embedded, states), torch.arange(len(states)))
            last = self.last_norm(x[-1:])
            rows.append(last @ self.head.T)
            if token is not None:
                states = torch.cat((states, last))
                token_ids.append(token)
        return torch.cat(rows)


class NextnReference(MtpReference):
    """DeepSeek's names, as GLM-4.5 writes them: the layer behind the last one. eh_proj reads [embedding, stream].

    Source: vllm-project/vllm deepseek_mtp.py, glm4_moe_mtp.py. The layer's own embed_tokens and shared_head.head are
    copies of the target's in every published file.
    """

    def load(self) -> None:
        super().load()
        self.name = f"model.layers.{self.config['num_hidden_layers']}"
        self.embedding = self.tensors.get(f"{self.name}.embed_tokens.weight", self.embedding)
        self.head = self.tensors.get(f"{self.name}.shared_head.head.weight", self.head)

    def norm(self, x: Tensor, part: str) -> Tensor:
        return rms_norm(x, self.tensors[f"{self.name}.{part}.weight"], self.heads.eps)

    def join(self, embedded: Tensor, states: Tensor) -> Tensor:
        joined = torch.cat((self.norm(embedded, "enorm"), self.norm(states, "hnorm")), dim=-1)
        return linear(joined, self.tensors, f"{self.name}.eh_proj")

    def layer(self, x: Tensor, positions: Tensor) -> Tensor:
        return decoder_layer(x, positions, self.tensors, self.name, self.heads, self.rope)

    def last_norm(self, x: Tensor) -> Tensor:
        return self.norm(x, "shared_head.norm")


class MimoReference(MtpReference):
    """MiMo: a list of layers of its own; input_proj reads [stream, embedding].

    Source: vllm-project/vllm mimo_mtp.py.
    """

    name = "model.mtp_layers.0"

    def norm(self, x: Tensor, part: str) -> Tensor:
        return rms_norm(x, self.tensors[f"{self.name}.{part}.weight"], self.heads.eps)

    def join(self, embedded: Tensor, states: Tensor) -> Tensor:
        joined = torch.cat((self.norm(states, "hidden_layernorm"), self.norm(embedded, "token_layernorm")), dim=-1)
        return linear(joined, self.tensors, f"{self.name}.input_proj")

    def layer(self, x: Tensor, positions: Tensor) -> Tensor:
        return decoder_layer(x, positions, self.tensors, self.name, self.heads, self.rope)

    def last_norm(self, x: Tensor) -> Tensor:
        return self.norm(x, "final_layernorm")


class QwenReference(MtpReference):
    """Qwen3.5: `mtp.*`; fc reads [embedding, stream]. Source: vllm-project/vllm qwen3_5_mtp.py.

    Norms hold their factor less one. Attention is gated: of each head's 2·head_dim rows of q_proj the first half is
    the query, the sigmoid of the second scales what the head puts out (transformers models/qwen3_5).
    """

    zero_first = False

    def norm(self, x: Tensor, part: str) -> Tensor:
        return rms_norm(x, 1.0 + self.tensors[f"mtp.{part}.weight"], self.heads.eps)

    def join(self, embedded: Tensor, states: Tensor) -> Tensor:
        normed = self.norm(embedded, "pre_fc_norm_embedding"), self.norm(states, "pre_fc_norm_hidden")
        return linear(torch.cat(normed, dim=-1), self.tensors, "mtp.fc")

    def layer(self, x: Tensor, positions: Tensor) -> Tensor:
        heads, name = self.heads, "layers.0.self_attn"
        normed = self.norm(x, "layers.0.input_layernorm")
        both = linear(normed, self.tensors, f"mtp.{name}.q_proj").unflatten(-1, (heads.heads, -1))
        query, gate = both.chunk(2, dim=-1)
        key = linear(normed, self.tensors, f"mtp.{name}.k_proj")
        key = self.norm(per_head(key, heads.kv_heads, {}, "", heads.eps), f"{name}.k_norm")
        value = linear(normed, self.tensors, f"mtp.{name}.v_proj").unflatten(-1, (heads.kv_heads, -1))
        query = self.rope(self.norm(query, f"{name}.q_norm"), positions)
        mixed = attend(query, self.rope(key, positions), value, causal(len(x)))
        x = x + F.linear(mixed * gate.flatten(1).sigmoid(), self.tensors[f"mtp.{name}.o_proj.weight"])
        return x + mlp(self.norm(x, "layers.0.post_attention_layernorm"), self.tensors, "mtp.layers.0.mlp")

    def last_norm(self, x: Tensor) -> Tensor:
        return self.norm(x, "norm")


class Qwen3Reference(QwenReference):
    """The names of Qwen3.5 beside a Qwen3 model: norms hold their factor, and attention has no gate."""

    def norm(self, x: Tensor, part: str) -> Tensor:
        return rms_norm(x, self.tensors[f"mtp.{part}.weight"], self.heads.eps)

    def layer(self, x: Tensor, positions: Tensor) -> Tensor:
        return decoder_layer(x, positions, self.tensors, "mtp.layers.0", self.heads, self.rope)


class SpeculatorsReference(MtpReference):
    """A layer in a folder of its own: Qwen's, whose parts are called as MiMo's, beside a config of the whole target.

    Source: vllm-project/speculators models/mtp/model_definitions.py, convert/mtp/converter.py. input_proj reads
    [embedding, stream].
    """

    name, zero_first = "mtp_layers.0", False

    def norm(self, x: Tensor, part: str) -> Tensor:
        return rms_norm(x, self.tensors[f"{self.name}.{part}.weight"], self.heads.eps)

    def join(self, embedded: Tensor, states: Tensor) -> Tensor:
        joined = torch.cat((self.norm(embedded, "token_layernorm"), self.norm(states, "hidden_layernorm")), dim=-1)
        return linear(joined, self.tensors, f"{self.name}.input_proj")

    def layer(self, x: Tensor, positions: Tensor) -> Tensor:
        return decoder_layer(x, positions, self.tensors, self.name, self.heads, self.rope)

    def last_norm(self, x: Tensor) -> Tensor:
        return self.norm(x, "final_layernorm")


def _config(target: TargetShape, **extra: Any) -> Config:
    return {
        "hidden_act": "silu",
        "hidden_size": target.hidden,
        "intermediate_size": target.intermediate,
        "num_attention_heads": target.heads,
        "num_key_value_heads": target.kv_heads,
        "num_hidden_layers": target.layers,
        "head_dim": target.head_dim,
        "rms_norm_eps": target.eps,
        "max_position_embeddings": 2048,
        "tie_word_embeddings": False,
        "vocab_size": target.vocab,
        "torch_dtype": "float32",
        **extra,
    }


def _ends(draw: Draw, target: TargetShape, name: str = "model") -> Tensors:
    return {
        f"{name}.embed_tokens.weight": draw.normal(target.vocab, target.hidden),
        f"{name}.norm.weight": draw.norm(target.hidden),
        "lm_head.weight": draw.matrix(target.vocab, target.hidden),
    }


def _write_glm(folder: Path, target: TargetShape, seed: int) -> None:
    # Every layer is dense, the last one too: `first_k_dense_replace` lies behind it.
    draw = Draw(seed)
    tensors, biases = _ends(draw, target), ("q_proj", "k_proj", "v_proj")
    for index in range(target.layers + 1):
        tensors |= layer_weights(draw, f"model.layers.{index}", target, biases=biases)
    name = f"model.layers.{target.layers}"
    tensors |= {f"{name}.{part}.weight": draw.norm(target.hidden) for part in ("enorm", "hnorm", "shared_head.norm")}
    tensors[f"{name}.eh_proj.weight"] = draw.matrix(target.hidden, 2 * target.hidden)
    tensors[f"{name}.embed_tokens.weight"] = tensors["model.embed_tokens.weight"]
    tensors[f"{name}.shared_head.head.weight"] = tensors["lm_head.weight"]
    config = _config(
        target,
        architectures=["Glm4MoeForCausalLM"],
        model_type="glm4_moe",
        attention_bias=True,
        use_qk_norm=False,
        rope_theta=target.rope_theta,
        rope_scaling=None,
        partial_rotary_factor=0.5,
        num_nextn_predict_layers=1,
        first_k_dense_replace=target.layers + 1,
        moe_intermediate_size=target.intermediate,
        n_routed_experts=2,
        n_shared_experts=1,
        num_experts_per_tok=1,
        n_group=1,
        topk_group=1,
        norm_topk_prob=True,
        routed_scaling_factor=1.0,
    )
    write_files(folder, config, tensors, shards=2)


def _write_mimo(folder: Path, target: TargetShape, seed: int) -> None:
    draw = Draw(seed)
    tensors, biases = _ends(draw, target), ("q_proj", "k_proj", "v_proj")
    names = [f"model.layers.{index}" for index in range(target.layers)] + [MimoReference.name]
    for name in names:
        tensors |= layer_weights(draw, name, target, biases=biases)
    for part in ("token_layernorm", "hidden_layernorm", "final_layernorm"):
        tensors[f"{MimoReference.name}.{part}.weight"] = draw.norm(target.hidden)
    tensors[f"{MimoReference.name}.input_proj.weight"] = draw.matrix(target.hidden, 2 * target.hidden)
    config = _config(
        target,
        architectures=["MiMoForCausalLM"],
        model_type="mimo",
        attention_bias=True,
        rope_theta=target.rope_theta,
        rope_scaling=None,
        use_sliding_window=False,
        num_nextn_predict_layers=1,
    )
    write_files(folder, config, tensors)


def _write_qwen(folder: Path, target: TargetShape, seed: int) -> None:
    # Every layer of the target is one of full attention, as the layer of `mtp` is in every published file.
    draw, body = Draw(seed), "model.language_model"
    tensors = _ends(draw, target, body)
    for name in [*(f"{body}.layers.{index}" for index in range(target.layers)), "mtp.layers.0"]:
        tensors |= layer_weights(draw, name, target, head_norms=True)
        tensors[f"{name}.self_attn.q_proj.weight"] = draw.matrix(2 * target.heads * target.head_dim, target.hidden)
    tensors["mtp.fc.weight"] = draw.matrix(target.hidden, 2 * target.hidden)
    for part in ("pre_fc_norm_hidden", "pre_fc_norm_embedding", "norm"):
        tensors[f"mtp.{part}.weight"] = draw.norm(target.hidden)
    for name in tensors:
        if "norm" in name:
            tensors[name] = (tensors[name] - 1.0).to(torch.bfloat16).float()
    text = _config(
        target,
        model_type="qwen3_5_text",
        attention_bias=False,
        attn_output_gate=True,
        layer_types=["full_attention"] * target.layers,
        full_attention_interval=1,
        mtp_num_hidden_layers=1,
        mtp_use_dedicated_embeddings=False,
        rope_parameters={
            "rope_theta": target.rope_theta,
            "rope_type": "default",
            "partial_rotary_factor": 0.25,
        },
    )
    config = {"architectures": ["Qwen3_5ForConditionalGeneration"], "model_type": "qwen3_5", "text_config": text}
    write_files(folder, config, tensors)


def _deepseek(copies: bool) -> Layout:
    """DeepSeek's names beside a Llama: the embedding and the output head as copies of the target's, or others."""

    def write(folder: Path, target: TargetShape, seed: int) -> None:
        draw, name = Draw(seed), f"model.layers.{target.layers}"
        tensors = _ends(draw, target)
        for index in range(target.layers + 1):
            tensors |= layer_weights(draw, f"model.layers.{index}", target)
        for part in ("enorm", "hnorm", "shared_head.norm"):
            tensors[f"{name}.{part}.weight"] = draw.norm(target.hidden)
        tensors[f"{name}.eh_proj.weight"] = draw.matrix(target.hidden, 2 * target.hidden)
        own = tensors if copies else _ends(draw, target)
        tensors[f"{name}.embed_tokens.weight"] = own["model.embed_tokens.weight"]
        tensors[f"{name}.shared_head.head.weight"] = own["lm_head.weight"]
        write_files(folder, _of_family(target, "Llama", num_nextn_predict_layers=1), tensors, shards=2)

    return Layout(write, NextnReference)


def _write_qwen3(folder: Path, target: TargetShape, seed: int) -> None:
    draw = Draw(seed)
    tensors = _ends(draw, target)
    for name in [*(f"model.layers.{index}" for index in range(target.layers)), "mtp.layers.0"]:
        tensors |= layer_weights(draw, name, target, head_norms=True)
    tensors["mtp.fc.weight"] = draw.matrix(target.hidden, 2 * target.hidden)
    for part in ("pre_fc_norm_hidden", "pre_fc_norm_embedding", "norm"):
        tensors[f"mtp.{part}.weight"] = draw.norm(target.hidden)
    write_files(folder, _of_family(target, "Qwen3", mtp_num_hidden_layers=1), tensors)


def _write_speculators(folder: Path, target: TargetShape, seed: int) -> None:
    draw, name = Draw(seed), SpeculatorsReference.name
    tensors = layer_weights(draw, name, target, head_norms=True)
    tensors[f"{name}.input_proj.weight"] = draw.matrix(target.hidden, 2 * target.hidden)
    for part in ("token_layernorm", "hidden_layernorm", "final_layernorm"):
        tensors[f"{name}.{part}.weight"] = draw.norm(target.hidden)
    config = {
        "architectures": ["MTPDraftModel"],
        "speculators_model_type": "mtp",
        "speculators_version": "0.7.0",
        "num_nextn_predict_layers": 1,
        "transformer_layer_config": _of_family(target, "Qwen3"),
        "speculators_config": {
            "algorithm": "mtp",
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 3}],
            "verifier": {"architectures": ["Qwen3ForCausalLM"], "name_or_path": "target"},
        },
    }
    write_files(folder, config, tensors, torch.bfloat16)


def _of_family(target: TargetShape, family: str, **extra: Any) -> Config:
    names = {"architectures": [f"{family}ForCausalLM"], "model_type": family.lower()}
    return _config(target, **names, rope_theta=target.rope_theta, rope_scaling=None, attention_bias=False, **extra)


LAYOUTS: dict[str, Layout] = {
    "deepseek": _deepseek(copies=True),
    "deepseek-own": _deepseek(copies=False),
    "qwen3": Layout(_write_qwen3, Qwen3Reference),
    "speculators": Layout(_write_speculators, SpeculatorsReference),
    "glm": Layout(_write_glm, NextnReference),
    "mimo": Layout(_write_mimo, MimoReference),
    "qwen3_5": Layout(_write_qwen, QwenReference),
}
