"""Writes a GGUF model with random weights in the shapes of a real one, with fewer layers: what its layers cost can be
measured without its files.

    python benchmarks/random_model.py gpt-oss-20b out.gguf [--layers 4] [--vocab 8192]

The router is random too, so that rows of distinct tokens wake experts as evenly as they can. Attention has Q8_0, and
experts have what people run: MXFP4 in gpt-oss, Q4_K and, in their down projections, Q6_K in Qwen3.
`python benchmarks/plain.py --model out.gguf` measures it beside llama.cpp.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Type
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]
Stored = tuple[
    str, NDArray[np.float32] | Bytes, Type, tuple[int, ...]
]  # name, content, type, and the shape of its rows
_HALVES = {Type.Q8_0: (0,), Type.Q4_K: (0, 2), Type.Q6_K: (208,)}  # where the float16 of a block are
_RANDOM_ROWS = 64  # that are drawn; larger tensors have them several times


@dataclass(frozen=True)
class Shape:
    architecture: str
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    experts: int
    chosen: int
    ffn: int  # of an expert
    window: int
    theta: float
    up: Type
    down: Type

    @property
    def is_gpt_oss(self) -> bool:
        return self.architecture == "gpt-oss"


SHAPES = {
    "gpt-oss-20b": Shape("gpt-oss", 2880, 64, 8, 64, 32, 4, 2880, 128, 1.5e5, Type.MXFP4, Type.MXFP4),
    "qwen3-30b-a3b": Shape("qwen3moe", 2048, 32, 4, 128, 128, 8, 768, 0, 1e6, Type.Q4_K, Type.Q6_K),
}


def blocks(kind: Type, rows: int, columns: int, chance: np.random.Generator) -> Bytes:
    """Raw bytes [rows, bytes per row] of weights whose size is about 1 / sqrt(columns)."""
    length, size = gguf.GGML_QUANT_SIZES[kind]
    some = min(rows, _RANDOM_ROWS)
    drawn = chance.integers(0, 256, (some * columns // length, size), dtype=np.uint8)
    largest = {Type.Q8_0: 127, Type.Q4_K: 15 * 63, Type.Q6_K: 32 * 127, Type.MXFP4: 12}[kind]
    scale = 2 / np.sqrt(columns) / largest
    for offset in _HALVES.get(kind, ()):
        halves = np.full((len(drawn), 1), scale * (1 if offset != 2 else 7), np.float16)  # the mean of minimums
        drawn[:, offset : offset + 2] = halves.view(np.uint8)
    if kind is Type.MXFP4:
        drawn[:, 0] = round(np.log2(scale)) + 128
    return np.resize(drawn.reshape(some, -1), (rows, drawn.size // some))


def tensors(shape: Shape, layers: int, vocab: int) -> Iterator[Stored]:
    chance = np.random.default_rng(0)
    hidden, q, kv = shape.hidden, shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim

    def matrix(name: str, kind: Type, *rows_and_columns: int) -> Stored:
        *rows, columns = rows_and_columns
        return name, blocks(kind, int(np.prod(rows)), columns, chance), kind, tuple(rows)

    def vector(name: str, *sizes: int, one: bool = False) -> Stored:
        values = np.ones(sizes) if one else chance.standard_normal(sizes) * 0.1
        return name, values.astype(np.float32), Type.F32, sizes[:-1]

    yield matrix("token_embd.weight", Type.Q8_0, vocab, hidden)
    yield matrix("output.weight", Type.Q8_0, vocab, hidden)
    yield vector("output_norm.weight", hidden, one=True)
    for layer in range(layers):
        place = f"blk.{layer}."
        yield vector(place + "attn_norm.weight", hidden, one=True)
        yield vector(place + ("post_attention_norm" if shape.is_gpt_oss else "ffn_norm") + ".weight", hidden, one=True)
        sizes = {"attn_q": (q, hidden), "attn_k": (kv, hidden), "attn_v": (kv, hidden), "attn_output": (hidden, q)}
        for name, (outputs, inputs) in sizes.items():
            yield matrix(f"{place}{name}.weight", Type.Q8_0, outputs, inputs)
            if shape.is_gpt_oss:
                yield vector(f"{place}{name}.bias", outputs)
        yield vector(place + "ffn_gate_inp.weight", shape.experts, hidden)
        experts = {
            "ffn_gate_exps": (shape.up, shape.ffn, hidden),
            "ffn_up_exps": (shape.up, shape.ffn, hidden),
            "ffn_down_exps": (shape.down, hidden, shape.ffn),
        }
        for name, (kind, outputs, inputs) in experts.items():
            yield matrix(f"{place}{name}.weight", kind, shape.experts, outputs, inputs)
            if shape.is_gpt_oss:
                yield vector(f"{place}{name}.bias", shape.experts, outputs)
        if shape.is_gpt_oss:
            yield vector(place + "ffn_gate_inp.bias", shape.experts)
            yield vector(place + "attn_sinks.weight", shape.heads)
        else:
            for side in "qk":
                yield vector(f"{place}attn_{side}_norm.weight", shape.head_dim, one=True)


def write(shape: Shape, layers: int, vocab: int, path: str) -> None:
    writer = gguf.GGUFWriter(path, shape.architecture)
    writer.add_block_count(layers)
    writer.add_context_length(8192)
    writer.add_embedding_length(shape.hidden)
    writer.add_feed_forward_length(shape.ffn)
    writer.add_head_count(shape.heads)
    writer.add_head_count_kv(shape.kv_heads)
    writer.add_key_length(shape.head_dim)
    writer.add_value_length(shape.head_dim)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(shape.theta)
    writer.add_expert_count(shape.experts)
    writer.add_expert_used_count(shape.chosen)
    writer.add_expert_feed_forward_length(shape.ffn)
    if shape.is_gpt_oss:
        writer.add_sliding_window(shape.window)
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(32.0)
        writer.add_rope_scaling_orig_ctx_len(4096)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(["<s>", "</s>", "a", "b", "ab", *(f"<{token}>" for token in range(5, vocab))])
    writer.add_token_types([3, 3, *[1] * (vocab - 2)])
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    for name, content, kind, rows in tensors(shape, layers, vocab):
        whole = content.reshape(*rows, content.shape[-1])
        writer.add_tensor(name, np.ascontiguousarray(whole), raw_dtype=None if kind is Type.F32 else kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", choices=SHAPES)
    parser.add_argument("out")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--vocab", type=int, default=8192)
    given = parser.parse_args()
    write(SHAPES[given.model], given.layers, given.vocab, given.out)


if __name__ == "__main__":
    main()
