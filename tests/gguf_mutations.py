"""Small GGUF files of every kind, and random changes of their structure and of their bytes."""

from __future__ import annotations

import random
import struct
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

U8, I8, U16, I16, U32, I32, F32, BOOL, STRING, ARRAY, U64, I64, F64 = range(13)
_FORMATS = {U8: "B", I8: "b", U16: "H", I16: "h", U32: "I", I32: "i", F32: "f", BOOL: "?", U64: "Q", I64: "q", F64: "d"}
_EXTREMES = (0, 1, 2, 3, 7, 255, 2**16, 2**24, 2**31 - 1, 2**31, 2**32 - 1, 2**40, 2**61, 2**63, 2**64 - 1)
_ARCHITECTURES = ("llama", "qwen2", "qwen3", "qwen3moe", "smollm3", "phi3", "granite", "gemma3", "gpt-oss", "mamba", "")
_ALIGNMENT = 32


@dataclass
class Value:
    """A metadata value. The values of an array have type `entry_type`."""

    type: int
    value: Any
    entry_type: int = U32


@dataclass
class Tensor:
    name: str
    dimensions: list[int]  # innermost first, as in the file
    type: int
    offset: int


@dataclass
class GGUF:
    """A file, in the order in which it is written."""

    fields: list[tuple[str, Value]]
    tensors: list[Tensor]
    data: bytes
    version: int = 3
    numbers: list[tuple[int, int]] = field(default_factory=list)  # offset and size of every integer that was written

    def encode(self) -> bytearray:
        out = bytearray(b"GGUF")
        self.numbers = []

        def integer(value: int, size: int) -> None:
            self.numbers.append((len(out), size))
            out.extend((value % 2 ** (8 * size)).to_bytes(size, "little"))

        def text(value: str) -> None:
            raw = value.encode()
            integer(len(raw), 8)
            out.extend(raw)

        def scalar(value: Any, kind: int) -> None:
            if kind == STRING:
                text(value)
            elif kind in (F32, F64, BOOL):
                out.extend(struct.pack("<" + _FORMATS[kind], value))
            else:
                integer(int(value), struct.calcsize("<" + _FORMATS[kind]))

        integer(self.version, 4)
        integer(len(self.tensors), 8)
        integer(len(self.fields), 8)
        for key, value in self.fields:
            text(key)
            integer(value.type, 4)
            if value.type == ARRAY:
                integer(value.entry_type, 4)
                integer(len(value.value), 8)
                for entry in value.value:
                    scalar(entry, value.entry_type)
            else:
                scalar(value.value, value.type)
        for tensor in self.tensors:
            text(tensor.name)
            integer(len(tensor.dimensions), 4)
            for dimension in tensor.dimensions:
                integer(dimension, 8)
            integer(tensor.type, 4)
            integer(tensor.offset, 8)
        out.extend(bytes(-len(out) % _ALIGNMENT))
        return out + self.data


@cache
def base_files() -> list[GGUF]:
    """Models that load: dense and quantised, tied and untied, fused, both kinds of tokenizer, both stretched ropes.
    Whoever changes one works on a copy."""
    kinds = GGMLQuantizationType
    return [
        _base("llama", kinds.F32, 32, _byte_level()),
        _base("llama", kinds.Q4_1, 64, _byte_level(), tied=False),
        _base("llama", kinds.Q4_K, 256, _sentencepiece(), tied=False),
        _base("llama", kinds.Q3_K, 256, _byte_level(), rope_tensors=("rope_freqs.weight",)),
        _base("qwen2", kinds.Q4_0, 64, _byte_level(), biases=True),
        _base("qwen3", kinds.Q8_0, 64, _byte_level(), tied=False),
        _base("smollm3", kinds.BF16, 32, _byte_level(), layers=5),
        _base("granite", kinds.Q6_K, 256, _byte_level()),
        _base(
            "phi3",
            kinds.F16,
            32,
            _sentencepiece(),
            rope_tensors=("rope_factors_long.weight", "rope_factors_short.weight"),
        ),
    ]


def _byte_level() -> dict[str, Value]:
    tokens = ["<s>", "</s>", "a", "b", "ab", "Ġ", "1", "2", "<|im_end|>", "Ġab"]
    return {
        "model": Value(STRING, "gpt2"),
        "pre": Value(STRING, "llama-bpe"),
        "tokens": Value(ARRAY, tokens, STRING),
        "token_type": Value(ARRAY, [3, 3, 1, 1, 1, 1, 1, 1, 3, 4], I32),
        "merges": Value(ARRAY, ["a b", "Ġ ab"], STRING),
        "bos_token_id": Value(U32, 0),
        "eos_token_id": Value(U32, 1),
        "add_bos_token": Value(BOOL, True),
    }


def _sentencepiece() -> dict[str, Value]:
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "a", "b", "ab", "▁ab"]
    return {
        "model": Value(STRING, "llama"),
        "tokens": Value(ARRAY, tokens, STRING),
        "scores": Value(ARRAY, [-float(index) for index in range(len(tokens))], F32),
        "token_type": Value(ARRAY, [2, 3, 3] + [6] * 256 + [1] * 5, I32),
        "bos_token_id": Value(U32, 1),
        "eos_token_id": Value(U32, 2),
        "unknown_token_id": Value(U32, 0),
        "padding_token_id": Value(U32, 0),
        "add_space_prefix": Value(BOOL, True),
    }


def _base(
    architecture: str,
    kind: GGMLQuantizationType,
    hidden: int,
    tokenizer: dict[str, Value],
    tied: bool = True,
    layers: int = 1,
    biases: bool = False,
    rope_tensors: tuple[str, ...] = (),
) -> GGUF:
    heads, kv_heads, inner = 4, 2, 2 * hidden
    keys, vocab = hidden // 2, len(tokenizer["tokens"].value) + 2
    shape = {
        "block_count": Value(U32, layers),
        "context_length": Value(U32, 64),
        "embedding_length": Value(U32, hidden),
        "feed_forward_length": Value(U32, inner),
        "attention.head_count": Value(U32, heads),
        "attention.head_count_kv": Value(U32, kv_heads),
        "attention.layer_norm_rms_epsilon": Value(F32, 1e-5),
        "rope.dimension_count": Value(U32, hidden // heads),
        "rope.freq_base": Value(F32, 1e4),
        "rope.scaling.original_context_length": Value(U32, 32),
    }
    fields = {
        "general.architecture": Value(STRING, architecture),
        "general.alignment": Value(U32, _ALIGNMENT),
        **{f"{architecture}.{key}": value for key, value in shape.items()},
        **{f"tokenizer.ggml.{key}": value for key, value in tokenizer.items()},
        "tokenizer.chat_template": Value(STRING, "{{ messages }}"),
    }
    matrices = {"attn_q": (hidden, hidden), "attn_k": (keys, hidden), "attn_v": (keys, hidden)}
    feed_forward = {"ffn_gate": (inner, hidden), "ffn_up": (inner, hidden)}
    if architecture == "phi3":
        matrices, feed_forward = {"attn_qkv": (2 * hidden, hidden)}, {"ffn_up": (2 * inner, hidden)}
    matrices |= {"attn_output": (hidden, hidden), **feed_forward, "ffn_down": (hidden, inner)}
    vectors = {"attn_norm": hidden, "ffn_norm": hidden}
    if architecture == "qwen3":
        vectors |= {"attn_q_norm": hidden // heads, "attn_k_norm": hidden // heads}
    shapes: dict[str, tuple[int, ...]] = {"token_embd.weight": (vocab, hidden), "output_norm.weight": (hidden,)}
    for layer in range(layers):
        shapes |= {f"blk.{layer}.{name}.weight": shape for name, shape in matrices.items()}
        shapes |= {f"blk.{layer}.{name}.weight": (length,) for name, length in vectors.items()}
        if biases:
            shapes |= {f"blk.{layer}.{name}.bias": matrices[name][:1] for name in ("attn_q", "attn_k", "attn_v")}
    if not tied:
        shapes["output.weight"] = (vocab, hidden)
    shapes |= dict.fromkeys(rope_tensors, (hidden // heads // 2,))

    source, tensors, data = random.Random(0), [], bytearray()
    for name, rows_and_columns in shapes.items():
        matrix = len(rows_and_columns) == 2
        tensor_kind = kind if matrix else GGMLQuantizationType.F32
        length, size = GGML_QUANT_SIZES[tensor_kind]
        count = rows_and_columns[0] * (rows_and_columns[1] if matrix else 1)
        tensors.append(Tensor(name, list(reversed(rows_and_columns)), int(tensor_kind), len(data)))
        # Halves and floats of these bytes are positive and small.
        data += bytes(source.choices((0x10, 0x20, 0x30), k=count // length * size))
        data += bytes(-len(data) % _ALIGNMENT)
    return GGUF(list(fields.items()), tensors, bytes(data))


def mutated(bases: list[GGUF], seed: int, index: int) -> bytes:
    """The mutation of this number: one to three changes of the structure, of the bytes, or of both."""
    chance = random.Random(f"{seed}/{index}")
    file = deepcopy(bases[index % len(bases)])
    structural = chance.randint(0, 3)
    for _ in range(structural):
        chance.choice(_STRUCTURE)(file, chance)
    data = file.encode()
    for _ in range(chance.randint(0 if structural else 1, 3) if chance.random() < 0.6 or not structural else 0):
        data = chance.choice(_BYTES)(data, file.numbers, chance)
    return bytes(data)


def _any_value(chance: random.Random) -> Value:
    kind = chance.choice((*_FORMATS, STRING, ARRAY, U32, U64))
    if kind != ARRAY:
        return Value(kind, _any_scalar(kind, chance))
    entry_type = chance.choice((*_FORMATS, STRING))
    entries = [_any_scalar(entry_type, chance) for _ in range(chance.choice((0, 1, 2, 10, 1000)))]
    return Value(ARRAY, entries, entry_type)


def _any_scalar(kind: int, chance: random.Random) -> Any:
    if kind == STRING:
        words = ("", " ", "x", "a b", "x:1", "$A", "é▁", "<s>", "z" * 400, "z" * 5000)
        return chance.choice((*words, "gpt2", "llama", "default", "linear", "yarn"))
    if kind in (F32, F64):
        return chance.choice((0.0, -1.0, 1e-30, 1.0, 1e30, float("inf"), float("nan"), -float("inf")))
    if kind == BOOL:
        return chance.random() < 0.5
    return chance.choice(_EXTREMES)


def _change_value(file: GGUF, chance: random.Random) -> None:
    place = chance.randrange(len(file.fields))
    file.fields[place] = (file.fields[place][0], _any_value(chance))


def _change_number(file: GGUF, chance: random.Random) -> None:
    """An integer field keeps its type: what it says is wrong, not what it is."""
    places = [place for place, (_, value) in enumerate(file.fields) if value.type in (U32, U64, I32)]
    if places:
        key, value = file.fields[place := chance.choice(places)]
        wrong = chance.choice((*_EXTREMES, value.value - 1, value.value + 1, 2 * value.value))
        file.fields[place] = (key, replace(value, value=wrong))


def _change_array(file: GGUF, chance: random.Random) -> None:
    arrays = [value for _, value in file.fields if value.type == ARRAY and value.value]
    if arrays:
        array = chance.choice(arrays)
        entry = chance.randrange(len(array.value))
        change = chance.randrange(5)
        if change == 0:
            array.value[entry] = _any_scalar(array.entry_type, chance)
        elif change == 1:
            del array.value[entry:]
        elif change == 2:
            array.value = array.value * chance.choice((2, 100))
        elif change == 3:
            array.value[entry] = chance.choice(array.value)
        else:
            chance.shuffle(array.value)


def _change_fields(file: GGUF, chance: random.Random) -> None:
    place = chance.randrange(len(file.fields))
    change = chance.randrange(4)
    if change == 0 and len(file.fields) > 1:
        del file.fields[place]
    elif change == 1:
        file.fields.insert(place, chance.choice(file.fields))
    elif change == 2:
        file.fields[place] = (chance.choice(("", "x" * 3000, "general.name")), file.fields[place][1])
    else:
        architecture = str(file.fields[0][1].value)
        added = ("split.count", "general.alignment", "tokenizer.ggml.eot_token_id", "tokenizer.ggml.merges")
        shape = ("expert_count", "attention.key_length", "attention.value_length", "attention.sliding_window")
        rope = ("rope.scaling.type", "rope.scaling.factor", "rope.scaling.attn_factor", "logit_scale")
        key = chance.choice((*added, *(f"{architecture}.{name}" for name in (*shape, *rope))))
        file.fields.append((key, _any_value(chance)))


def _change_architecture(file: GGUF, chance: random.Random) -> None:
    """Another family, which reads the same numbers in another manner."""
    old, new = str(file.fields[0][1].value), chance.choice(_ARCHITECTURES)
    file.fields = [(key.replace(f"{old}.", f"{new}.", 1), value) for key, value in file.fields]
    file.fields[0] = (file.fields[0][0], Value(STRING, new))


def _change_tensor(file: GGUF, chance: random.Random) -> None:
    if not file.tensors:
        return
    place = chance.randrange(len(file.tensors))
    tensor, other = file.tensors[place], chance.choice(file.tensors)
    change = chance.randrange(8)
    if change == 0:
        tensor.dimensions[chance.randrange(len(tensor.dimensions))] = chance.choice(_EXTREMES)
    elif change == 1:
        tensor.dimensions = [chance.choice((1, 2, 32, *_EXTREMES)) for _ in range(chance.randrange(6))] or [1]
    elif change == 2:
        tensor.type = chance.choice((*(int(kind) for kind in GGMLQuantizationType), 99, 2**32 - 1))
    elif change == 3:
        tensor.offset = chance.choice((*_EXTREMES, other.offset, tensor.offset + 32, tensor.offset + 1))
    elif change == 4:
        names = (other.name, tensor.name.replace("blk.0", "blk.1"), "rope_freqs.weight", "blk.0.attn_qkv.weight", "")
        tensor.name = chance.choice((*names, f"blk.{10**30}.attn_q.weight"))
    elif change == 5:
        del file.tensors[place]
    elif change == 6:
        file.tensors.append(replace(tensor, name=chance.choice(("output.weight", "rope_freqs.weight", "extra"))))
    else:
        tensor.dimensions = list(reversed(tensor.dimensions))


def _flip_bits(data: bytearray, numbers: list[tuple[int, int]], chance: random.Random) -> bytearray:
    for _ in range(chance.choice((1, 1, 2, 8))):
        data[_place(data, numbers, chance)] ^= 1 << chance.randrange(8)
    return data


def _cut(data: bytearray, numbers: list[tuple[int, int]], chance: random.Random) -> bytearray:
    return data[: chance.choice((_place(data, numbers, chance), chance.randrange(len(data)))) + 1]


def _insert(data: bytearray, numbers: list[tuple[int, int]], chance: random.Random) -> bytearray:
    place = _place(data, numbers, chance)
    return data[:place] + chance.randbytes(chance.choice((1, 4, 8, 100))) + data[place:]


def _remove(data: bytearray, numbers: list[tuple[int, int]], chance: random.Random) -> bytearray:
    place = _place(data, numbers, chance)
    return (data[:place] + data[place + chance.choice((1, 4, 8, 100)) :]) or data


def _overwrite(data: bytearray, numbers: list[tuple[int, int]], chance: random.Random) -> bytearray:
    place = _place(data, numbers, chance)
    noise = chance.choice((bytes(16), b"\xff" * 16, chance.randbytes(16)))
    data[place : place + 16] = noise[: len(data) - place]
    return data


def _change_integer(data: bytearray, numbers: list[tuple[int, int]], chance: random.Random) -> bytearray:
    """A count, length, type, dimension, offset or value, wherever it is in the file."""
    place, size = chance.choice(numbers)
    old = int.from_bytes(data[place : place + size], "little")
    new = chance.choice((*_EXTREMES, old + 1, old - 1, old + 8, len(data), chance.randrange(13)))
    data[place : place + size] = (new % 2 ** (8 * size)).to_bytes(size, "little")
    return data


def _place(data: bytearray, numbers: list[tuple[int, int]], chance: random.Random) -> int:
    """Mostly in the header."""
    end = min(len(data), numbers[-1][0] + 8) if chance.random() < 0.9 else len(data)
    return chance.randrange(end)


_STRUCTURE = (_change_value, _change_number, _change_array, _change_fields, _change_architecture, _change_tensor)
_BYTES = (_flip_bits, _cut, _insert, _remove, _overwrite, _change_integer, _change_integer)
