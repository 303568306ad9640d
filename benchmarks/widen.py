"""A real text at the cost of a larger model: writes a GGUF model into a larger shape, by default that of an 8B.

    python benchmarks/widen.py small.gguf wide.gguf [--hidden 4096] [--heads 32] [--kv-heads 8] [--ffn 12288]
        [--layers 36] [--type BF16]

Up to rounding the wide model says what the small one says, and its runs take what those of a model of its shape take.
The small model lives in the first columns of the residual stream, and the others stay zero: what writes to them has
zeros, and what reads them has random numbers. RMSNorm stays exact with its weights × √(d/d′) and eps × d/d′. A KV head
is copied where its group has more queries than a wide one. Added heads and layers compute, and nobody reads them.
For the architectures llama and qwen2.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from math import sqrt
from typing import Any, NamedTuple

import gguf
import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float32]
ARCHITECTURES = ("llama", "qwen2")
RANDOM_NUMBERS = 1 << 22  # larger tensors have them several times


class Shape(NamedTuple):
    """What grows. The size of a head stays."""

    hidden: int
    heads: int
    kv_heads: int
    ffn: int
    layers: int

    @property
    def group(self) -> int:
        """Queries that share a KV head."""
        return self.heads // self.kv_heads


KEYS = {
    "hidden": "embedding_length",
    "heads": "attention.head_count",
    "kv_heads": "attention.head_count_kv",
    "ffn": "feed_forward_length",
    "layers": "block_count",
}
EPSILON = "attention.layer_norm_rms_epsilon"


class Widening:
    """From a small shape into a wide one."""

    def __init__(self, small: Shape, wide: Shape) -> None:
        copies = -(-small.group // wide.group)
        if any(before > after for before, after in zip(small, wide, strict=True)):
            raise SystemExit(f"{small} does not fit into {wide}.")
        if small.kv_heads * copies > wide.kv_heads:
            raise SystemExit(f"{small.kv_heads} KV heads, each {copies} times, do not fit into {wide.kv_heads}.")
        self.small, self.wide, self.head_dim = small, wide, small.hidden // small.heads
        # Which head of the wide model does the work of which head of the small one.
        self.heads = {
            (head // small.group * copies + head % small.group // wide.group) * wide.group
            + head % small.group % wide.group: head
            for head in range(small.heads)
        }
        self.kv_heads = {place: place // copies for place in range(small.kv_heads * copies)}
        self._numbers = np.random.default_rng(0).standard_normal(RANDOM_NUMBERS, np.float32) * np.float32(0.02)

    def __call__(self, name: str, value: Array) -> Array:
        """A tensor of the small model as the wide one has it. `name` is without its block."""
        hidden, ffn = self.wide.hidden, self.wide.ffn
        match name:
            case "attn_norm.weight" | "ffn_norm.weight" | "output_norm.weight":
                return placed(value * np.float32(sqrt(self.small.hidden / hidden)), np.ones(hidden, np.float32))
            case "token_embd.weight":
                return placed(value, np.zeros((len(value), hidden), np.float32))
            case "output.weight":
                return placed(value, self._random(len(value), hidden))
            case "ffn_gate.weight" | "ffn_up.weight":
                return placed(value, self._random(ffn, hidden))
            case "ffn_down.weight":
                return placed(value, np.zeros((hidden, ffn), np.float32))
            case "attn_q.weight" | "attn_q.bias":
                return self._by_heads(value, self.heads, self._random(self.wide.heads * self.head_dim, hidden))
            case "attn_k.weight" | "attn_k.bias" | "attn_v.weight" | "attn_v.bias":
                return self._by_heads(value, self.kv_heads, self._random(self.wide.kv_heads * self.head_dim, hidden))
            case "attn_output.weight":
                unread = np.zeros((self.wide.heads * self.head_dim, hidden), np.float32)
                return np.ascontiguousarray(self._by_heads(value.T, self.heads, unread).T)
        raise SystemExit(f"It is not known how to widen {name}.")

    def added(self, name: str, like: Array) -> Array:
        """A tensor of a layer that the small model does not have: the layer computes and writes nothing."""
        if name in ("attn_output.weight", "ffn_down.weight"):
            return np.zeros_like(like)
        return np.ones_like(like) if "norm" in name else self._random(*like.shape)

    def _by_heads(self, value: Array, heads: dict[int, int], into: Array) -> Array:
        """`value` [small heads × size of a head, …] with its heads where the wide model has them."""
        into = into[:, 0].copy() if value.ndim == 1 else into
        size = self.head_dim
        for place, head in heads.items():
            placed(value[head * size : (head + 1) * size], into[place * size : (place + 1) * size])
        return into

    def _random(self, *shape: int) -> Array:
        return np.resize(self._numbers, shape)


def placed(value: Array, into: Array) -> Array:
    """`into`, with `value` in its first rows and columns."""
    into[tuple(slice(size) for size in value.shape)] = value
    return into


def tensors(reader: gguf.GGUFReader, widening: Widening) -> Iterator[tuple[str, Array]]:
    """Name and value of every tensor of the wide model. A model that reads its logits off the embedding gets an output
    of its own, as large ones have."""
    names = {tensor.name for tensor in reader.tensors}
    for tensor in reader.tensors:
        value = np.asarray(gguf.dequantize(tensor.data, tensor.tensor_type), np.float32)
        *block, name = tensor.name.split(".", 2) if tensor.name.startswith("blk.") else (tensor.name,)
        wide = widening(name, value)
        yield tensor.name, wide
        if tensor.name == "token_embd.weight" and "output.weight" not in names:
            yield "output.weight", widening("output.weight", value)
        if block == ["blk", "0"]:
            for layer in range(widening.small.layers, widening.wide.layers):
                yield f"blk.{layer}.{name}", widening.added(name, wide)


def copy_metadata(reader: gguf.GGUFReader, writer: gguf.GGUFWriter, changed: dict[str, Any]) -> None:
    """All but what the format itself writes, and with what has changed."""
    for key, field in reader.fields.items():
        if not key.startswith("GGUF.") and key != "general.architecture":
            kind, *of = field.types
            writer.add_key_value(key, changed.get(key, field.contents()), kind, of[-1] if of else None)


def widen(source: str, target: str, wide: Shape, kind: gguf.GGMLQuantizationType) -> None:
    reader = gguf.GGUFReader(source)
    architecture = str(reader.fields["general.architecture"].contents())
    if architecture not in ARCHITECTURES:
        raise SystemExit(f"{source} is of the architecture {architecture}; known are {', '.join(ARCHITECTURES)}.")
    keys = {name: f"{architecture}.{key}" for name, key in KEYS.items()}
    small = Shape(**{name: int(reader.fields[key].contents()) for name, key in keys.items()})
    epsilon = f"{architecture}.{EPSILON}"
    changed: dict[str, Any] = {keys[name]: value for name, value in wide._asdict().items()}
    changed[epsilon] = float(reader.fields[epsilon].contents()) * small.hidden / wide.hidden
    writer = gguf.GGUFWriter(target, architecture, use_temp_file=True)
    copy_metadata(reader, writer, changed)
    for name, value in tensors(reader, Widening(small, wide)):
        stored = kind if value.ndim > 1 else gguf.GGMLQuantizationType.F32
        writer.add_tensor(name, gguf.quantize(value, stored), raw_dtype=stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source")
    parser.add_argument("target")
    parser.add_argument("--hidden", type=int, default=4096)
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--ffn", type=int, default=12288)
    parser.add_argument("--layers", type=int, default=36)
    parser.add_argument("--type", default="BF16", help="of the matrices: F32, BF16, Q8_0, Q4_0, …")
    arguments = parser.parse_args()
    wide = Shape(arguments.hidden, arguments.heads, arguments.kv_heads, arguments.ffn, arguments.layers)
    widen(arguments.source, arguments.target, wide, gguf.GGMLQuantizationType[arguments.type])


if __name__ == "__main__":
    main()
