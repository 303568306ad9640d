"""EAGLE-3, DFlash and DSpark heads in GGUF files of llama.cpp.

Source: ggml-org/llama.cpp src/models/eagle3.cpp, src/models/dflash.cpp, conversion/llama.py, conversion/qwen.py,
gguf-py/gguf/constants.py.

* `target_layers` count layers: the stream in front of layer i. (First files said `extract_layers` for EAGLE-3.)
* `d2t` holds the target's ids themselves, not offsets, in any order.
* The rows of EAGLE-3's q and k are permuted, so that rope turns neighbouring pairs; those of DFlash are not.
* `rope_freqs` divides rope's frequencies (llama3 scaling).
* Without `token_embd` or `output` the target's are used.
* `norm_before_fc` says that `enc.output_norm` is applied to the concatenated streams; in DFlash files a tensor of that
  name is the norm behind fc.
* EAGLE-3 feeds back its output before the last norm. DFlash rows see each other both ways, unless `attention.causal`
  is true (common/speculative.cpp).
* In layers that `attention.sliding_window_pattern` marks, a row sees keys less than `attention.sliding_window`
  positions before itself (llama-hparams.h, is_masked_swa). Nothing limits what lies behind a row.
* Plain DFlash files need not say `sample_from_anchor`: the anchor's row is dropped.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from tests.published.blocks import Rope, attend, causal, rms_norm
from tests.published.shapes import (
    BlockReference,
    Draw,
    Layout,
    PathReference,
    Reference,
    Streams,
    TargetShape,
    Tensors,
    scatter_logits,
)

FILE = "head.gguf"


class _Gguf(Reference):
    def load(self) -> None:
        reader = gguf.GGUFReader(self.given.folder / FILE)
        self.tensors: Tensors = {}
        for tensor in reader.tensors:
            # The reader's shape is in GGUF's order, its data in numpy's: [out, in].
            values = np.array(tensor.data)
            if tensor.tensor_type == gguf.GGMLQuantizationType.BF16:
                values = gguf.quants.dequantize(values, tensor.tensor_type)
            self.tensors[tensor.name] = torch.from_numpy(values)
        self.fields: dict[str, Any] = {key: field.contents() for key, field in reader.fields.items()}
        self.arch = self.fields["general.architecture"]
        self.eps = float(self.key("attention.layer_norm_rms_epsilon"))
        self.heads, self.kv_heads = int(self.key("attention.head_count")), int(self.key("attention.head_count_kv"))
        turned = int(self.key("rope.dimension_count"))
        frequencies = float(self.key("rope.freq_base")) ** -(torch.arange(0, turned, 2).float() / turned)
        if "rope_freqs.weight" in self.tensors:
            frequencies = frequencies / self.tensors["rope_freqs.weight"]
        self.rope = Rope(frequencies, pairs_adjacent=self.arch == "eagle3")
        self.embedding = self.tensors.get("token_embd.weight", self.given.embedding)
        self.output = self.tensors.get("output.weight", self.given.lm_head)
        self.taps = [int(tap) for tap in self.key("target_layers") or self.key("extract_layers")]

    def key(self, name: str, default: Any = None) -> Any:
        return self.fields.get(f"{self.arch}.{name}", default)

    def norm(self, x: Tensor, name: str) -> Tensor:
        weight = self.tensors.get(f"{name}.weight")
        return x if weight is None else rms_norm(x, weight, self.eps)

    def linear(self, x: Tensor, name: str) -> Tensor:
        return F.linear(x, self.tensors[f"{name}.weight"], self.tensors.get(f"{name}.bias"))

    def joined(self, streams: Streams) -> Tensor:
        return torch.cat([streams[tap].float() for tap in self.taps], dim=-1)

    def attention(self, x: Tensor, source: Tensor, block: str, seen: Tensor) -> Tensor:
        """Rows `x` at the end of `source`, whose rows are at positions 0 …"""
        positions = torch.arange(len(source))
        query = self.norm(self.linear(x, f"{block}.attn_q").unflatten(-1, (self.heads, -1)), f"{block}.attn_q_norm")
        key = self.linear(source, f"{block}.attn_k").unflatten(-1, (self.kv_heads, -1))
        key = self.norm(key, f"{block}.attn_k_norm")
        value = self.linear(source, f"{block}.attn_v").unflatten(-1, (self.kv_heads, -1))
        mixed = attend(self.rope(query, positions[-len(x) :]), self.rope(key, positions), value, seen)
        return self.linear(mixed, f"{block}.attn_output")

    def feed_forward(self, x: Tensor, block: str) -> Tensor:
        normed = self.norm(x, f"{block}.ffn_norm")
        gated = F.silu(self.linear(normed, f"{block}.ffn_gate")) * self.linear(normed, f"{block}.ffn_up")
        return self.linear(gated, f"{block}.ffn_down")

    def scatter(self, logits: Tensor) -> Tensor:
        return scatter_logits(logits, self.tensors.get("d2t"), self.given.target.vocab)


class GgufEagle3Reference(_Gguf, PathReference):
    def run(self, states: Tensor, token_ids: Sequence[int]) -> Tensor:
        embedded = self.norm(self.embedding[torch.tensor(token_ids)], "blk.0.attn_norm")
        normed = self.norm(states, "blk.0.attn_norm_2")
        residual = normed if self.key("norm_before_residual", False) else states
        both = torch.cat((embedded, normed), dim=-1)
        x = residual + self.attention(both, both, "blk.0", causal(len(both)))
        return x + self.feed_forward(x, "blk.0")

    def path_logits(self, streams: Streams, tokens: Sequence[int], drafted: Sequence[int]) -> Tensor:
        joined = self.joined(streams)
        if self.key("norm_before_fc", False):
            joined = self.norm(joined, "enc.output_norm")
        states, token_ids, rows = self.linear(joined, "fc"), list(tokens[1:]), []
        for token in [*drafted, None]:
            last = self.run(states, token_ids)[-1:]
            rows.append(self.scatter(self.norm(last, "output_norm") @ self.output.T))
            if token is not None:
                states = torch.cat((states, last))
                token_ids.append(token)
        return torch.cat(rows)


class GgufDFlashReference(_Gguf, BlockReference):
    def seen(self, context: int, rows: int, slides: bool) -> Tensor:
        """[rows, context + rows]: which keys a row reads."""
        behind = context + torch.arange(rows)[:, None] - torch.arange(context + rows)[None, :]
        seen = behind >= 0 if self.key("attention.causal", False) else torch.ones_like(behind, dtype=torch.bool)
        return seen & (behind < int(self.key("attention.sliding_window"))) if slides else seen

    def block_logits(self, streams: Streams, tokens: Sequence[int], previous: Sequence[int] | None = None) -> Tensor:
        context = self.norm(self.linear(self.joined(streams), "fc"), "enc.output_norm")
        mask = int(self.fields["tokenizer.ggml.mask_token_id"])
        x = self.embedding[torch.tensor([tokens[-1]] + [mask] * (int(self.key("block_size")) - 1))]
        pattern = self.key("attention.sliding_window_pattern", [False] * int(self.key("block_count")))
        for index in range(int(self.key("block_count"))):
            block = f"blk.{index}"
            normed = self.norm(x, f"{block}.attn_norm")
            x = x + self.attention(
                normed, torch.cat((context, normed)), block, self.seen(len(context), len(x), pattern[index])
            )
            x = x + self.feed_forward(x, block)
        # With a Markov term the key is always written here: llama.cpp's graph and its driver take different defaults.
        rows = self.norm(x, "output_norm")[0 if self.key("sample_from_anchor", False) else 1 :]
        logits, before = [], tokens[-1]
        for index, row in enumerate(rows):
            if previous is not None:
                before = previous[index]
            values = row @ self.output.T
            if "markov_w1.weight" in self.tensors:
                values = values + self.linear(self.tensors["markov_w1.weight"][before], "markov_w2")
            logits.append(self.scatter(values[None]))
            before = int(logits[-1].argmax())
        return torch.cat(logits)


def _adjacent(weight: Tensor, heads: int) -> Tensor:
    """Rows of each head from halves (i, i + d/2) to neighbouring pairs (2i, 2i + 1): conversion/llama.py."""
    pairs: Tensor = weight.unflatten(0, (heads, 2, -1)).transpose(1, 2)
    return pairs.flatten(0, 2)


def _layer(draw: Draw, name: str, target: TargetShape, inputs: int, norms: Sequence[str]) -> Tensors:
    queries, keys = target.heads * target.head_dim, target.kv_heads * target.head_dim
    tensors = {
        "attn_q": draw.matrix(queries, inputs),
        "attn_k": draw.matrix(keys, inputs),
        "attn_v": draw.matrix(keys, inputs),
        "attn_output": draw.matrix(target.hidden, queries),
        "ffn_gate": draw.matrix(target.intermediate, target.hidden),
        "ffn_up": draw.matrix(target.intermediate, target.hidden),
        "ffn_down": draw.matrix(target.hidden, target.intermediate),
        **{norm: draw.norm(target.hidden) for norm in norms},
    }
    return {f"{name}.{part}.weight": tensor for part, tensor in tensors.items()}


def _write(folder: Path, arch: str, target: TargetShape, layers: int, keys: dict[str, Any], tensors: Tensors) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    writer = gguf.GGUFWriter(folder / FILE, arch)
    writer.add_context_length(2048)
    writer.add_embedding_length(target.hidden)
    writer.add_feed_forward_length(target.intermediate)
    writer.add_block_count(layers)
    writer.add_head_count(target.heads)
    writer.add_head_count_kv(target.kv_heads)
    writer.add_key_length(target.head_dim)
    writer.add_value_length(target.head_dim)
    writer.add_layer_norm_rms_eps(target.eps)
    writer.add_rope_freq_base(target.rope_theta)
    writer.add_rope_dimension_count(target.head_dim)
    writer.add_vocab_size(target.vocab)
    for key, value in keys.items():
        name = key if "." in key else f"{arch}.{key}"
        if isinstance(value, bool):
            writer.add_bool(name, value)
        elif isinstance(value, int):
            writer.add_uint32(name, value)
        else:
            writer.add_array(name, value)
    for name, tensor in tensors.items():
        writer.add_tensor(name, tensor.contiguous().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _eagle3(before_residual: bool = False, before_fc: bool = False, whole: bool = False, first: bool = False) -> Layout:
    """`first`: with the key of the first files, and a vocabulary in no order."""

    def write(folder: Path, target: TargetShape, seed: int) -> None:
        draw, size = Draw(seed), target.vocab if whole else target.vocab // 2
        norms = ("attn_norm", "attn_norm_2", "ffn_norm")
        tensors = _layer(draw, "blk.0", target, 2 * target.hidden, norms)
        for part, heads in (("attn_q", target.heads), ("attn_k", target.kv_heads)):
            tensors[f"blk.0.{part}.weight"] = _adjacent(tensors[f"blk.0.{part}.weight"], heads)
        tensors["fc.weight"] = draw.matrix(target.hidden, 3 * target.hidden)
        tensors["output_norm.weight"] = draw.norm(target.hidden)
        tensors["output.weight"] = draw.matrix(size, target.hidden)
        if whole:
            tensors["token_embd.weight"] = draw.normal(target.vocab, target.hidden)
            tensors["rope_freqs.weight"] = torch.linspace(1.0, 8.0, target.head_dim // 2).round()
        else:
            tensors["d2t"] = draw.subset(target.vocab, size)
            if first:
                tensors["d2t"] = _shuffled(tensors["d2t"])
        if before_fc:
            tensors["enc.output_norm.weight"] = draw.norm(3 * target.hidden)
        keys = {
            "extract_layers" if first else "target_layers": [1, target.layers // 2, target.layers - 1],
            "target_hidden_size": target.hidden,
            "norm_before_residual": before_residual,
            "norm_before_fc": before_fc,
        }
        _write(folder, "eagle3", target, 1, keys, tensors)

    return Layout(write, GgufEagle3Reference)


def _shuffled(ids: Tensor) -> Tensor:
    return ids[torch.randperm(len(ids), generator=torch.Generator().manual_seed(3))]


def _dflash(from_anchor: bool | None, more: Callable[[Draw, TargetShape], Tensors], **attention: Any) -> Layout:
    """`from_anchor` None leaves the key out; `attention` are keys of that section."""

    def write(folder: Path, target: TargetShape, seed: int) -> None:
        draw, layers, taps = Draw(seed), 2, [1, target.layers // 2, target.layers - 1]
        tensors = {
            "fc.weight": draw.matrix(target.hidden, len(taps) * target.hidden),
            "enc.output_norm.weight": draw.norm(target.hidden),
            "output_norm.weight": draw.norm(target.hidden),
        }
        for index in range(layers):
            block = f"blk.{index}"
            tensors |= _layer(draw, block, target, target.hidden, ("attn_norm", "ffn_norm"))
            tensors |= {f"{block}.attn_{part}_norm.weight": draw.norm(target.head_dim) for part in "qk"}
        tensors |= more(draw, target)
        keys = {
            "target_layers": taps,
            "block_size": 5,
            **({} if from_anchor is None else {"sample_from_anchor": from_anchor}),
            **{f"dflash.attention.{key}": value for key, value in attention.items()},
            "tokenizer.ggml.mask_token_id": target.vocab - 1,
        }
        _write(folder, "dflash", target, layers, keys, tensors)

    return Layout(write, GgufDFlashReference)


def _nothing(draw: Draw, target: TargetShape) -> Tensors:
    return {}


def _markov(draw: Draw, target: TargetShape) -> Tensors:
    size, rank = target.vocab // 2, 8
    return {
        "d2t": draw.subset(target.vocab, size),
        "output.weight": draw.matrix(size, target.hidden),
        "markov_w1.weight": draw.normal(target.vocab, rank),
        "markov_w2.weight": draw.matrix(size, rank),
        "conf_proj.weight": draw.matrix(1, target.hidden + rank),
        "conf_proj.bias": draw.bias(1),
    }


def _markov_shuffled(draw: Draw, target: TargetShape) -> Tensors:
    tensors = _markov(draw, target)
    return tensors | {"d2t": _shuffled(tensors["d2t"])}


# The window is wider than a block: what a row sees of the rows behind it is then no question of the window.
SLIDING: dict[str, Any] = {"sliding_window": 6, "sliding_window_pattern": [True, False]}

LAYOUTS: dict[str, Layout] = {
    "eagle3": _eagle3(),
    "eagle3-norm-before-residual": _eagle3(before_residual=True),
    "eagle3-norm-before-fc": _eagle3(before_fc=True),
    "eagle3-whole-vocabulary": _eagle3(whole=True),
    "eagle3-first": _eagle3(first=True),
    "dflash": _dflash(False, _nothing),
    "dflash-anchor-unsaid": _dflash(None, _nothing),
    "dflash-causal": _dflash(False, _nothing, causal=True),
    "dflash-causal-sliding": _dflash(False, _nothing, causal=True, **SLIDING),
    "dflash-sliding": _dflash(False, _nothing, **SLIDING),
    "dspark": _dflash(True, _markov),
    "dspark-shuffled": _dflash(True, _markov_shuffled),
}
