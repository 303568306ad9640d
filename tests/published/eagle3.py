"""EAGLE-3 and P-EAGLE heads.

What all of them share, from SafeAILab/EAGLE eagle/model/cnets.py:

* Row t reads the fused streams of position t and the embedding of token t + 1, and gives the logits of token t + 2.
  The first row is t = 0: the embedding of token 0 is never read. A drafted row reads, in place of the fused streams,
  what the row before it put out.
* Rope position of row t is t there and in vLLM, t + 1 in vllm-project/speculators (models/eagle3/core.py); rope is
  relative and every row is shifted alike, so both say the same.
* The layer reads [input_layernorm(embedding), hidden_norm(state)]. Its first residual is the state before hidden_norm,
  or after it with `norm_before_residual` (vllm-project/vllm llama_eagle3.py, speculators models/eagle3).
* The logits are lm_head(norm(output)); the row behind reads the output before that norm, or after it with
  `norm_output` (EAGLE-3.1: sgl-project/SpecForge pull request 879, speculators pull request 610).
* Streams are fused in the order of their layers (vLLM collects them while it runs the layers).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.published.blocks import Heads, decoder_layer, linear, mlp, rms_norm, rope_of, self_attention
from tests.published.shapes import (
    BlockReference,
    Config,
    Draw,
    Layout,
    PathReference,
    Reference,
    Streams,
    TargetShape,
    Tensors,
    layer_weights,
    read_config,
    read_tensors,
    scatter_logits,
    vocabulary_maps,
    write_files,
)

FIRST_NORMS = ("hidden_norm", "input_layernorm", "post_attention_layernorm")
PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj")
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    # small, so that the few positions of a test lie in all three ranges of wavelength
    "original_max_position_embeddings": 64,
}


def default_taps(layers: int) -> list[int]:
    """Streams after 2, n/2 and n-3 layers: EAGLE eagle/model/modeling_llama_kv.py, and vLLM's default."""
    return [2, layers // 2, layers - 3]


class _Eagle3(Reference):
    """The parts that EAGLE-3 and P-EAGLE share."""

    def load(self) -> None:
        config, self.tensors = read_config(self.given.folder), read_tensors(self.given.folder)
        self.top = config
        self.config: Config = config.get("transformer_layer_config") or config
        self.heads = Heads.of(self.config)
        self.rope = rope_of(self.config, self.heads.head_dim)
        # `midlayer` is the first layer of EAGLE's and SpecForge's files; others number their layers.
        self.layers = ["midlayer"]
        if "midlayer.mlp.gate_proj.weight" not in self.tensors:
            self.layers = ["layers.0"]
        self.layers += [f"layers.{index}" for index in range(1, self.config["num_hidden_layers"])]
        # Absent: shared with the target.
        self.embedding = self.tensors.get("embed_tokens.weight", self.given.embedding)
        d2t = self.tensors.get("d2t")
        self.ids = None if d2t is None else torch.arange(len(d2t)) + d2t
        nested = config.get("eagle_config") or {}
        self.flags = {
            key: bool(config.get(key, nested.get(key, False)))
            for key in ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
        }
        self.taps = self._taps(nested)

    def _taps(self, nested: dict[str, Any]) -> list[int]:
        """Which streams are fused, as numbers of layers before them."""
        nested_ids = nested.get("eagle_aux_hidden_state_layer_ids")
        if nested_ids:
            # Nested ids are indices of layers whose output is taken: SGLang adds one (models/llama.py), ModelOpt takes
            # the outputs by hooks (torch/speculative/plugins/transformers.py), SpecForge's default is 1, n/2-1, n-4.
            return [index + 1 for index in nested_ids]
        if "target_layer_ids" in self.top:
            # DeepSpec modeling/dspark/common.py: layer i is hidden_states[i + 1]; -1 is the embedding.
            return [index + 1 for index in self.top["target_layer_ids"]]
        # Top-level ids count layers: vLLM takes the stream in front of layer i (llama.py, aux_hidden_state_layers).
        return self.top.get("eagle_aux_hidden_state_layer_ids") or default_taps(self.given.target.layers)

    def fuse(self, states: Tensor) -> Tensor:
        """Concatenated streams [rows, taps · target width] to the head's width."""
        if self.flags["norm_before_fc"]:  # one norm over the concatenation
            states = rms_norm(states, self.tensors["input_norm.weight"], self.heads.eps)
        if self.flags["fc_norm"]:  # a norm for each stream
            parts = states.split(self.given.target.hidden, dim=-1)
            weights = [self.tensors[f"fc_norm.{index}.weight"] for index in range(len(parts))]
            states = torch.cat([rms_norm(part, weight, self.heads.eps) for part, weight in zip(parts, weights)], -1)
        return linear(states, self.tensors, "fc")

    def fused(self, streams: Streams) -> Tensor:
        return self.fuse(torch.cat([streams[tap].float() for tap in self.taps], dim=-1))

    def run(self, states: Tensor, token_ids: Sequence[int]) -> Tensor:
        """Outputs before the last norm [rows, width] of rows 0 …"""
        positions = torch.arange(len(states))
        embedded = self.embedding[torch.tensor(token_ids)]
        tensors, heads, first = self.tensors, self.heads, self.layers[0]
        normed = rms_norm(states, tensors[f"{first}.hidden_norm.weight"], heads.eps)
        residual = normed if self.flags["norm_before_residual"] else states
        embedded = rms_norm(embedded, tensors[f"{first}.input_layernorm.weight"], heads.eps)
        both = torch.cat((embedded, normed), dim=-1)
        x = residual + self_attention(both, positions, tensors, f"{first}.self_attn", heads, self.rope)
        after = rms_norm(x, tensors[f"{first}.post_attention_layernorm.weight"], heads.eps)
        x = x + mlp(after, tensors, f"{first}.mlp")
        for layer in self.layers[1:]:  # ordinary layers, without the embedding
            x = decoder_layer(x, positions, tensors, layer, heads, self.rope)
        return x

    def normed(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.tensors["norm.weight"], self.heads.eps)

    def logits(self, normed: Tensor) -> Tensor:
        return scatter_logits(linear(normed, self.tensors, "lm_head"), self.ids, self.given.target.vocab)


class Eagle3Reference(_Eagle3, PathReference):
    def path_logits(self, streams: Streams, tokens: Sequence[int], drafted: Sequence[int]) -> Tensor:
        states, token_ids = self.fused(streams), list(tokens[1:])
        assert len(states) == len(token_ids), "streams have one position less than tokens"
        rows = []
        for token in [*drafted, None]:
            last = self.run(states, token_ids)[-1:]
            rows.append(self.logits(self.normed(last)))
            if token is not None:
                states = torch.cat((states, self.normed(last) if self.flags["norm_output"] else last))
                token_ids.append(token)
        return torch.cat(rows)


class PEagleReference(_Eagle3, BlockReference):
    """The first row is EAGLE-3's; each row behind it reads the mask token and fc(mask_hidden), in causal order.

    Source: vllm-project/speculators models/peagle/core.py; vLLM drafts with causal attention likewise.
    """

    def block_logits(self, streams: Streams, tokens: Sequence[int], previous: Sequence[int] | None = None) -> Tensor:
        methods = self.top.get("speculators_config", {}).get("proposal_methods")
        count = methods[0]["speculative_tokens"] if methods else 4  # rows do not see those behind them
        states = self.fused(streams)
        masked = self.fuse(self.tensors["mask_hidden"].reshape(1, -1)).expand(count - 1, -1)
        mask = self.top.get("mask_token_id", self.top.get("ptd_token_id"))
        token_ids = [*tokens[1:], *[mask] * (count - 1)]
        return self.logits(self.normed(self.run(torch.cat((states, masked)), token_ids)[-count:]))


def _llama_config(shape: TargetShape, **extra: Any) -> Config:
    return {
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "num_hidden_layers": 1,
        "rms_norm_eps": shape.eps,
        "max_position_embeddings": 2048,
        "tie_word_embeddings": False,
        "vocab_size": shape.vocab,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "torch_dtype": "bfloat16",
        **extra,
    }


def _body(
    draw: Draw, shape: TargetShape, target: TargetShape, layer: str, *, taps: int = 3, ids: Tensor | None, **kind: Any
) -> Tensors:
    """fc, the first layer, the norm and lm_head, with maps unless the vocabulary is whole."""
    rows = target.vocab if ids is None else len(ids)
    tensors = {"fc.weight": draw.matrix(shape.hidden, taps * target.hidden)}
    tensors |= layer_weights(draw, layer, shape, inputs=2 * shape.hidden, norms=FIRST_NORMS, **kind)
    tensors |= {"norm.weight": draw.norm(shape.hidden), "lm_head.weight": draw.matrix(rows, shape.hidden)}
    return tensors if ids is None else tensors | vocabulary_maps(ids, target.vocab)


def _square(target: TargetShape) -> TargetShape:
    """Heads that fill the width, for configs without `head_dim`."""
    return replace(target, head_dim=target.hidden // target.heads)


def _write_eagle(folder: Path, target: TargetShape, seed: int) -> None:
    # yuhuili: no taps, no rope, no head_dim in the config; bfloat16.
    draw, shape = Draw(seed), _square(target)
    tensors = _body(draw, shape, target, "midlayer", ids=draw.subset(target.vocab, target.vocab // 2))
    config = _llama_config(shape, architectures=["LlamaForCausalLM"], draft_vocab_size=target.vocab // 2)
    write_files(folder, config, tensors, torch.bfloat16)


def _write_eagle_narrow(folder: Path, target: TargetShape, seed: int) -> None:
    # yuhuili's head for Llama-3.3-70B: another width than the target's, so `target_hidden_size` and its own embedding.
    draw = Draw(seed)
    shape = _square(replace(target, hidden=target.hidden // 2, intermediate=target.hidden))
    tensors = _body(draw, shape, target, "midlayer", ids=draw.subset(target.vocab, target.vocab // 2))
    tensors["embed_tokens.weight"] = draw.normal(target.vocab, shape.hidden)
    config = _llama_config(
        shape,
        architectures=["LlamaForCausalLM"],
        draft_vocab_size=target.vocab // 2,
        target_hidden_size=target.hidden,
        rope_theta=target.rope_theta,
    )
    write_files(folder, config, tensors, torch.bfloat16)


def _specforge_config(target: TargetShape, **extra: Any) -> Config:
    return _llama_config(
        target,
        architectures=["LlamaForCausalLMEagle3"],
        head_dim=target.head_dim,
        rope_theta=target.rope_theta,
        rope_scaling=None,
        pretraining_tp=1,
        draft_vocab_size=target.vocab // 2,
        eagle_config={
            "eagle_aux_hidden_state_layer_ids": [1, target.layers // 2, target.layers - 2],  # not the default streams
            "use_aux_hidden_state": True,
        },
        **extra,
    )


def _write_specforge(folder: Path, target: TargetShape, seed: int) -> None:
    draw = Draw(seed)
    tensors = _body(draw, target, target, "midlayer", ids=draw.subset(target.vocab, target.vocab // 2))
    write_files(folder, _specforge_config(target), tensors, torch.bfloat16)


def _write_specforge31(folder: Path, target: TargetShape, seed: int) -> None:
    draw = Draw(seed)
    tensors = _body(draw, target, target, "midlayer", ids=draw.subset(target.vocab, target.vocab // 2))
    tensors |= {f"fc_norm.{index}.weight": draw.norm(target.hidden) for index in range(3)}
    write_files(folder, _specforge_config(target, fc_norm=True, norm_output=True), tensors)


def _write_nvidia(folder: Path, target: TargetShape, seed: int) -> None:
    # NVIDIA/Model-Optimizer torch/export/plugins/hf_spec_export.py: `layers.0`, no `t2d`; `norm_before_fc` is nested
    # (vLLM pull request 42143). The highest tap may be the last layer's output, before the target's final norm.
    draw = Draw(seed)
    ids = draw.subset(target.vocab, target.vocab // 2)
    tensors = _body(draw, target, target, "layers.0", ids=ids, biases=PROJECTIONS)
    del tensors["t2d"]
    tensors["input_norm.weight"] = draw.norm(3 * target.hidden)
    config = _llama_config(
        target,
        architectures=["LlamaForCausalLMEagle3"],
        head_dim=target.head_dim,
        attention_bias=True,
        mlp_bias=False,
        rope_theta=target.rope_theta,
        rope_scaling=LLAMA3,
        draft_vocab_size=len(ids),
        eagle_config={
            "eagle_aux_hidden_state_layer_ids": [1, target.layers // 2 - 1, target.layers - 1],
            "use_aux_hidden_state": True,
            "use_input_layernorm_in_first_layer": True,
            "use_last_layernorm": True,
            "use_mtp_layernorm": False,
            "next_layer_regular": True,
            "parallel_draft_step": 1,
            "parallel_draft_heads_num_layers": 1,
            "norm_before_fc": True,
        },
    )
    write_files(folder, config, tensors)


def _speculators_config(target: TargetShape, kind: str, layers: int = 1, model_type: str = "llama") -> Config:
    """vllm-project/speculators: SpeculatorModelConfig around the config of the layers."""
    layer = _llama_config(target, head_dim=target.head_dim, attention_bias=False, mlp_bias=False)
    layer |= {"model_type": model_type, "num_hidden_layers": layers}
    layer["rope_parameters"] = {"rope_theta": target.rope_theta, "rope_type": "default"}
    return {
        "architectures": [{"eagle3": "Eagle3Speculator", "peagle": "PEagleSpeculator"}[kind]],
        "speculators_model_type": kind,
        "speculators_version": "0.7.0",
        "draft_vocab_size": target.vocab // 2,
        "target_hidden_size": None,
        "eagle_aux_hidden_state_layer_ids": [1, target.layers // 2, target.layers - 1],  # not the default streams
        "transformer_layer_config": layer,
        "speculators_config": {
            "algorithm": kind,
            "default_proposal_method": "greedy",
            "proposal_methods": [
                {"proposal_type": "greedy", "speculative_tokens": 4, "accept_tolerance": 0.0, "verifier_accept_k": 1}
            ],
            "verifier": {"architectures": ["LlamaForCausalLM"], "name_or_path": "target"},
        },
    }


def _speculators(architecture: str = "Eagle3Speculator", **flags: bool) -> Layout:
    """With every flag said; `Eagle3DraftModel` is how newer versions name the same."""

    def write(folder: Path, target: TargetShape, seed: int) -> None:
        draw = Draw(seed)
        tensors = _body(draw, target, target, "layers.0", ids=draw.subset(target.vocab, target.vocab // 2))
        tensors["embed_tokens.weight"] = draw.normal(target.vocab, target.hidden)
        if flags.get("norm_before_fc"):
            tensors["input_norm.weight"] = draw.norm(3 * target.hidden)
        if flags.get("fc_norm"):
            tensors |= {f"fc_norm.{index}.weight": draw.norm(target.hidden) for index in range(3)}
        config = _speculators_config(target, "eagle3") | {"norm_before_residual": False} | flags
        config["architectures"] = [architecture]
        write_files(folder, config, tensors, torch.bfloat16)

    return Layout(write, Eagle3Reference)


def _write_speculators_whole(folder: Path, target: TargetShape, seed: int) -> None:
    # The whole vocabulary: neither d2t nor t2d; the embedding is the target's. Two layers of Qwen3, with head norms.
    draw = Draw(seed)
    tensors = _body(draw, target, target, "layers.0", ids=None, head_norms=True)
    tensors |= layer_weights(draw, "layers.1", target, head_norms=True)
    config = _speculators_config(target, "eagle3", layers=2, model_type="qwen3")
    config |= {"draft_vocab_size": target.vocab, "norm_before_residual": False}
    write_files(folder, config, tensors)


def _write_deepspec(folder: Path, target: TargetShape, seed: int) -> None:
    # DeepSpec modeling/eagle3/qwen3: q/k norms, five streams, the whole vocabulary with its own embedding; two files.
    draw = Draw(seed)
    taps = [1, 2, target.layers // 2, target.layers - 3, target.layers - 2]
    tensors = _body(draw, target, target, "layers.0", taps=len(taps), ids=None, head_norms=True)
    tensors["embed_tokens.weight"] = draw.normal(target.vocab, target.hidden)
    config = _llama_config(
        target,
        architectures=["Qwen3Eagle3Model"],
        model_type="qwen3",
        head_dim=target.head_dim,
        attention_bias=False,
        rope_parameters={"rope_theta": target.rope_theta, "rope_type": "default"},
        target_layer_ids=taps,
        ttt_length=7,
        step_loss_decay=0.8,
    )
    write_files(folder, config, tensors, torch.bfloat16, shards=2)


def _write_peagle(folder: Path, target: TargetShape, seed: int) -> None:
    draw = Draw(seed)
    tensors = _body(draw, target, target, "layers.0", ids=draw.subset(target.vocab, target.vocab // 2))
    for index in (1, 2, 3):
        tensors |= layer_weights(draw, f"layers.{index}", target)
    tensors["embed_tokens.weight"] = draw.normal(target.vocab, target.hidden)
    tensors["mask_hidden"] = draw.normal(1, 1, 3 * target.hidden)
    config = _speculators_config(target, "peagle", layers=4) | {"norm_before_residual": False}
    config |= {"mask_token_id": target.vocab - 1}
    write_files(folder, config, tensors, torch.bfloat16)


def _write_peagle_vllm(folder: Path, target: TargetShape, seed: int) -> None:
    # As vLLM reads one without the speculators format (llama_eagle3.py): `mask_hidden` is a row, the token of masks is
    # `ptd_token_id`, and nothing says how many tokens are drafted.
    draw = Draw(seed)
    tensors = _body(draw, target, target, "midlayer", ids=draw.subset(target.vocab, target.vocab // 2))
    tensors |= layer_weights(draw, "layers.1", target)
    tensors["mask_hidden"] = draw.normal(1, 3 * target.hidden)
    config = _specforge_config(target, num_hidden_layers=2, parallel_drafting=True, ptd_token_id=target.vocab - 2)
    write_files(folder, config, tensors, torch.bfloat16)


LAYOUTS: dict[str, Layout] = {
    "eagle": Layout(_write_eagle, Eagle3Reference),
    "eagle-narrow": Layout(_write_eagle_narrow, Eagle3Reference),
    "specforge": Layout(_write_specforge, Eagle3Reference),
    "specforge-3.1": Layout(_write_specforge31, Eagle3Reference),
    "nvidia": Layout(_write_nvidia, Eagle3Reference),
    "speculators": _speculators(),
    "speculators-norm-before-residual": _speculators(norm_before_residual=True),
    "speculators-3.1": _speculators(
        "Eagle3DraftModel", norm_before_residual=True, norm_before_fc=True, norm_output=True
    ),
    "speculators-fc-norm": _speculators("Eagle3DraftModel", fc_norm=True, norm_output=True),
    "speculators-whole-vocabulary": Layout(_write_speculators_whole, Eagle3Reference),
    "deepspec": Layout(_write_deepspec, Eagle3Reference),
    "peagle": Layout(_write_peagle, PEagleReference),
    "peagle-vllm": Layout(_write_peagle_vllm, PEagleReference),
}
