"""DFlash and DSpark heads.

What all of them share, from z-lab/dflash dflash/model.py and deepseek-ai/DeepSpec modeling/dspark/qwen3/modeling.py:

* For an anchor at position T the rows are the anchor and block_size - 1 mask tokens, at positions T, T + 1, …
* In every layer the keys are those of the context, positions 0 … T-1, and those of the rows. A context key and value
  are k_proj and v_proj of hidden_norm(fc(streams)), the same input in every layer and without input_layernorm; k_norm
  and rope apply to both kinds of keys. Context positions have no queries.
* Rows see each other both ways, except in layers that are causal.
* The logits are the output head's of norm(rows).
* `target_layer_ids` are indices of layers whose output is taken (hidden_states[i + 1]; DeepSpec: -1 is the embedding).
  `aux_hidden_state_layer_ids` of speculators count layers, as in vLLM.
* `sample_from_anchor` false: row k drafts its own position and the anchor's row is dropped. True: row k drafts the
  position behind it. False without the key for DFlash, true for DSpark (speculators models/dflash/core.py,
  _build_base_config_kwargs; DeepSpec labels start one behind the anchor). vLLM reads `dspark_bonus_anchor`, which says
  the opposite (v1/worker/gpu/spec_decode/dspark/speculator.py).
* z-lab's heads may name no layers: they are then spread over the target (dflash/model.py, build_target_layer_ids).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.published.blocks import Heads, attend, linear, mlp, per_head, rms_norm, rope_of
from tests.published.shapes import (
    BlockReference,
    Config,
    Draw,
    Layout,
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

PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj")


class DFlashReference(BlockReference):
    def load(self) -> None:
        top, self.tensors = read_config(self.given.folder), read_tensors(self.given.folder)
        self.config: Config = top.get("transformer_layer_config") or top
        nested = top.get("dflash_config") or {}
        # A value may stand at the top or in `dflash_config`, which comes first (z-lab/dflash dflash/model.py).
        self.options = {**self.config, **top, **nested}
        self.speculators = "speculators_model_type" in top
        self.heads = Heads.of(self.config)
        self.rope = rope_of(self.config, self.heads.head_dim)
        self.embedding = self.tensors.get("embed_tokens.weight", self.given.embedding)
        self.head = self.tensors.get("lm_head.weight", self.given.lm_head)
        d2t = self.tensors.get("d2t")
        self.ids = None if d2t is None else torch.arange(len(d2t)) + d2t
        taps = self.options.get("target_layer_ids")
        if taps is None and not self.speculators:
            taps = _spread(self.options["num_target_layers"], self.config["num_hidden_layers"])
        self.taps = self.options["aux_hidden_state_layer_ids"] if taps is None else [index + 1 for index in taps]
        markov = "markov_head.markov_w1.weight" in self.tensors
        bonus_anchor = self.options.get("dspark_bonus_anchor", not markov)
        self.from_anchor: bool = self.options.get("sample_from_anchor", not bonus_anchor)

    def seen(self, layer: int, context: int, rows: int) -> Tensor:
        """[rows, context + rows]: which keys a row reads in a layer."""
        keys, queries = torch.arange(context + rows)[None, :], context + torch.arange(rows)[:, None]
        kinds = self.config.get("layer_types")
        sliding = self.options.get("use_swa", False) if kinds is None else kinds[layer] == "sliding_attention"
        window = self.options.get("swa_window_size", self.config.get("sliding_window")) if sliding else None
        if self.speculators:
            # models/dflash/attention.py: the window counts context positions before the anchor, for every row alike;
            # a sliding layer is causal in the block unless `sliding_window_non_causal`.
            both_ways = not sliding or self.options.get("sliding_window_non_causal", False)
            visible = torch.ones(rows, context + rows, dtype=torch.bool)
            if window is not None:
                visible &= keys >= context - window
        else:
            # z-lab: a sliding layer is causal unless the config says otherwise (so does vLLM, qwen3_dflash.py, which
            # makes `use_swa` without layer_types an exception); the window counts from each row, itself included.
            causal = self.options.get("is_causal", self.options.get("causal"))
            both_ways = not (kinds is not None and sliding) if causal is None else not causal
            visible = torch.ones(rows, context + rows, dtype=torch.bool)
            if window is not None:
                visible &= (queries - keys < window) & (keys - queries < window)
        return visible if both_ways else visible & (keys <= queries)

    def run(self, streams: Streams, tokens: Sequence[int]) -> Tensor:
        """norm(rows) [block_size, width]."""
        tensors, heads = self.tensors, self.heads
        joined = torch.cat([streams[tap].float() for tap in self.taps], dim=-1)
        context = rms_norm(linear(joined, tensors, "fc"), tensors["hidden_norm.weight"], heads.eps)
        ids = [tokens[-1]] + [self.options["mask_token_id"]] * (self.options["block_size"] - 1)
        x = self.embedding[torch.tensor(ids)]
        positions = torch.arange(len(context) + len(x))
        for index in range(self.config["num_hidden_layers"]):
            name = f"layers.{index}"
            normed = rms_norm(x, tensors[f"{name}.input_layernorm.weight"], heads.eps)
            attention = f"{name}.self_attn"
            query = linear(normed, tensors, f"{attention}.q_proj")
            query = per_head(query, heads.heads, tensors, f"{attention}.q_norm", heads.eps)
            source = torch.cat((context, normed))
            key = linear(source, tensors, f"{attention}.k_proj")
            key = per_head(key, heads.kv_heads, tensors, f"{attention}.k_norm", heads.eps)
            value = linear(source, tensors, f"{attention}.v_proj").unflatten(-1, (heads.kv_heads, -1))
            query, key = self.rope(query, positions[-len(x) :]), self.rope(key, positions)
            mixed = attend(query, key, value, self.seen(index, len(context), len(x)))
            x = x + linear(mixed, tensors, f"{attention}.o_proj")
            normed = rms_norm(x, tensors[f"{name}.post_attention_layernorm.weight"], heads.eps)
            x = x + mlp(normed, tensors, f"{name}.mlp")
        return rms_norm(x, tensors["norm.weight"], heads.eps)

    def block_logits(self, streams: Streams, tokens: Sequence[int], previous: Sequence[int] | None = None) -> Tensor:
        return self._block(streams, tokens, previous)[0]

    def block_confidence(self, streams: Streams, tokens: Sequence[int], previous: Sequence[int]) -> Tensor:
        """[rows]: the probability that the token of a row is accepted."""
        return self._block(streams, tokens, previous)[1].sigmoid()

    def _block(self, streams: Streams, tokens: Sequence[int], previous: Sequence[int] | None) -> tuple[Tensor, Tensor]:
        rows = self.run(streams, tokens)
        rows = rows if self.from_anchor else rows[1:]
        base, before = rows @ self.head.T, tokens[-1]
        logits, confidences = [], []
        for index, row in enumerate(rows):
            if previous is not None:
                before = previous[index]
            bias, confidence = self._markov(row, before)
            logits.append(scatter_logits((base[index] + bias)[None], self.ids, self.given.target.vocab))
            confidences.append(confidence)
            before = int(logits[-1].argmax())
        return torch.cat(logits), torch.stack(confidences)

    def _markov(self, row: Tensor, before: int) -> tuple[Tensor, Tensor]:
        """What the token before adds to the logits, and the confidence's logit (NaN without such an output).

        DeepSpec modeling/dspark/markov_head.py: w1 is read by the target's id, w2 has the draft vocabulary; the gate
        reads [row, w1]. The confidence reads the row after the last norm, with w1 where the config says so.
        """
        tensors, name = self.tensors, "markov_head"
        if f"{name}.markov_w1.weight" not in tensors:
            return torch.tensor(0.0), torch.tensor(torch.nan)
        code = tensors[f"{name}.markov_w1.weight"][before]
        gated = code
        if self.options["markov_head_type"] == "gated":
            gated = code * linear(torch.cat((row, code)), tensors, f"{name}.gate_proj").sigmoid()
        bias = linear(gated, tensors, f"{name}.markov_w2")
        if not self.options["enable_confidence_head"]:
            return bias, torch.tensor(torch.nan)
        features = torch.cat((row, code)) if self.options["confidence_head_with_markov"] else row
        return bias, linear(features, tensors, "confidence_head.proj")[0]


def _spread(layers: int, drafting: int) -> list[int]:
    """Layers of the target, numbered from 0, whose outputs a head of `drafting` layers reads."""
    first, last = 1, layers - 3
    if drafting == 1:
        return [layers // 2]
    return [round(first + part * (last - first) / (drafting - 1)) for part in range(drafting)]


def _qwen_config(target: TargetShape, layers: int, **extra: Any) -> Config:
    return {
        "model_type": "qwen3",
        "hidden_act": "silu",
        "hidden_size": target.hidden,
        "intermediate_size": target.intermediate,
        "num_attention_heads": target.heads,
        "num_key_value_heads": target.kv_heads,
        "num_hidden_layers": layers,
        "head_dim": target.head_dim,
        "attention_bias": False,
        "rms_norm_eps": target.eps,
        "max_position_embeddings": 2048,
        "tie_word_embeddings": False,
        "vocab_size": target.vocab,
        "dtype": "bfloat16",
        **extra,
    }


def _body(draw: Draw, target: TargetShape, taps: int, layers: int, biases: tuple[str, ...] = ()) -> Tensors:
    tensors = {
        "fc.weight": draw.matrix(target.hidden, taps * target.hidden),
        "hidden_norm.weight": draw.norm(target.hidden),
        "norm.weight": draw.norm(target.hidden),
    }
    for index in range(layers):
        tensors |= layer_weights(draw, f"layers.{index}", target, head_norms=True, biases=biases)
    return tensors


def _zlab(layers: int = 2, **extra: Any) -> Layout:
    """z-lab: the body alone; embedding and output head are the target's. A `nested` value joins `dflash_config`."""
    nested, names_taps = extra.pop("nested", {}), extra.pop("names_taps", True)

    def write(folder: Path, target: TargetShape, seed: int) -> None:
        taps = [1, target.layers // 2, target.layers - 2] if names_taps else _spread(target.layers, layers)
        config = _qwen_config(
            target,
            layers,
            architectures=["DFlashDraftModel"],
            auto_map={"AutoModel": "dflash.DFlashDraftModel"},
            num_target_layers=target.layers,
            rope_theta=target.rope_theta,
            rope_scaling=None,
            dflash_config={
                "mask_token_id": target.vocab - 1,
                **({"target_layer_ids": taps} if names_taps else {}),
                **nested,
            },
            **({} if "block_size" in nested else {"block_size": 5}),
        )
        biases = PROJECTIONS if extra.get("attention_bias") else ()
        tensors = _body(Draw(seed), target, len(taps), layers, biases)
        write_files(folder, config | extra, tensors, torch.bfloat16)

    return Layout(write, DFlashReference)


YARN = {
    "rope_type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 32,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
}
# The window is wider than a block: what a row sees of the rows behind it is then no question of the window.
SLIDING: dict[str, Any] = {
    "use_sliding_window": True,
    "sliding_window": 6,
    "layer_types": ["sliding_attention", "full_attention"],
}


def _speculators(kind: str, whole: bool = False, embedding: bool = False, **extra: Any) -> Layout:
    """vllm-project/speculators: d2t and t2d with the head's own output head, or the whole vocabulary with neither.

    Older versions save an embedding, too.
    """
    layer_extra = {key: extra.pop(key) for key in SLIDING if key in extra}

    def write(folder: Path, target: TargetShape, seed: int) -> None:
        draw, layers, size = Draw(seed), 2, target.vocab if whole else target.vocab // 2
        taps = [1, target.layers // 2, target.layers - 1]
        layer = _qwen_config(target, layers, layer_types=["full_attention"] * layers, sliding_window=None)
        layer["rope_parameters"] = {"rope_theta": target.rope_theta, "rope_type": "default"}
        tensors = _body(draw, target, len(taps), layers)
        if embedding:
            tensors["embed_tokens.weight"] = draw.normal(target.vocab, target.hidden)
        if not whole:
            tensors["lm_head.weight"] = draw.matrix(size, target.hidden)
            tensors |= vocabulary_maps(draw.subset(target.vocab, size), target.vocab)
        config: Config = {
            "architectures": [{"dflash": "DFlashDraftModel", "dspark": "DSparkDraftModel"}[kind]],
            "speculators_model_type": kind,
            "speculators_version": "0.7.0",
            "draft_vocab_size": size,
            "block_size": 5,
            "mask_token_id": target.vocab - 1,
            "aux_hidden_state_layer_ids": taps,
            "target_hidden_size": None,
            "sliding_window_non_causal": False,
            "transformer_layer_config": layer | layer_extra,
            "speculators_config": {
                "algorithm": kind,
                "default_proposal_method": "greedy",
                "proposal_methods": [
                    {"proposal_type": "greedy", "speculative_tokens": 5 if extra.get("sample_from_anchor") else 4}
                ],
                "verifier": {"architectures": ["Qwen3ForCausalLM"], "name_or_path": "target"},
            },
        }
        if kind == "dspark":
            tensors |= _markov(draw, target, size)
            config |= MARKOV
        write_files(folder, config | extra, tensors, torch.bfloat16)

    return Layout(write, DFlashReference)


MARKOV = {
    "markov_rank": 8,
    "markov_head_type": "vanilla",
    "enable_confidence_head": True,
    "confidence_head_with_markov": True,
}


def _markov(draw: Draw, target: TargetShape, size: int, gated: bool = False, with_markov: bool = True) -> Tensors:
    rank = MARKOV["markov_rank"]
    assert isinstance(rank, int)
    tensors = {
        "markov_head.markov_w1.weight": draw.normal(target.vocab, rank),
        "markov_head.markov_w2.weight": draw.matrix(size, rank),
        "confidence_head.proj.weight": draw.matrix(1, target.hidden + (rank if with_markov else 0)),
        "confidence_head.proj.bias": draw.bias(1),
    }
    if gated:
        tensors["markov_head.gate_proj.weight"] = draw.matrix(rank, target.hidden + rank)
        tensors["markov_head.gate_proj.bias"] = draw.bias(rank)
    return tensors


def _deepspec(gated: bool = False, **extra: Any) -> Layout:
    """DeepSpec: everything at the top of the config, the whole vocabulary with its own embedding and output head."""

    def write(folder: Path, target: TargetShape, seed: int) -> None:
        draw, layers = Draw(seed), 2
        taps = [-1, 2, target.layers // 2, target.layers - 2]  # -1: the embedding
        tensors = _body(draw, target, len(taps), layers) | _markov(draw, target, target.vocab, gated, not gated)
        tensors["embed_tokens.weight"] = draw.normal(target.vocab, target.hidden)
        tensors["lm_head.weight"] = draw.matrix(target.vocab, target.hidden)
        config = _qwen_config(
            target,
            layers,
            architectures=["Qwen3DSparkModel"],
            rope_parameters={"rope_theta": target.rope_theta, "rope_type": "default"},
            layer_types=["full_attention"] * layers,
            sliding_window=None,
            block_size=4,
            num_anchors=512,
            mask_token_id=target.vocab - 1,
            target_layer_ids=taps,
            num_target_layers=target.layers,
            **MARKOV,
        )
        if gated:
            config |= {"markov_head_type": "gated", "confidence_head_with_markov": False}
        write_files(folder, config | extra, tensors, torch.bfloat16, shards=2)

    return Layout(write, DFlashReference)


LAYOUTS: dict[str, Layout] = {
    "zlab": _zlab(),
    "zlab-block-size-nested": _zlab(nested={"block_size": 6}),
    "zlab-sliding": _zlab(**SLIDING),
    "zlab-sliding-both-ways": _zlab(**SLIDING, nested={"causal": False}),
    "zlab-use-swa": _zlab(sliding_window=6, nested={"use_swa": True}),
    "zlab-causal": _zlab(nested={"causal": True}),
    "zlab-biases": _zlab(attention_bias=True),
    "zlab-yarn": _zlab(rope_scaling=YARN),
    "zlab-taps-unsaid": _zlab(layers=3, names_taps=False),
    "zlab-taps-unsaid-one-layer": _zlab(layers=1, names_taps=False),
    "speculators": _speculators("dflash", sample_from_anchor=False),
    "speculators-from-anchor": _speculators("dflash", embedding=True, sample_from_anchor=True),
    "speculators-whole-vocabulary": _speculators("dflash", whole=True, sample_from_anchor=False),
    "speculators-sliding": _speculators("dflash", sample_from_anchor=False, **SLIDING),
    "speculators-dspark": _speculators("dspark", sample_from_anchor=True),
    "speculators-dspark-own-position": _speculators("dspark", sample_from_anchor=False),
    "deepspec-dspark": _deepspec(),
    "deepspec-dspark-gated": _deepspec(gated=True),
    "deepspec-dspark-bonus-anchor": _deepspec(dspark_bonus_anchor=True),
}
