"""GGUF files that claim more than they hold, or hold something else: one sentence, at once, and with little memory."""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
import tracemalloc
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest

from foredraft.errors import InvalidModel
from foredraft.models.catalog import open_checkpoint
from tests.gguf_mutations import ARRAY, BOOL, F32, GGUF, I32, STRING, U32, U64, Tensor, Value, base_files

ROOT = Path(__file__).parents[2]
LLAMA, UNTIED, SENTENCEPIECE, LLAMA3, QWEN2, QWEN3, SMOLLM3, GRANITE, PHI3 = range(9)  # of base_files()
INFINITE, NAN = float("inf"), float("nan")


def with_field(key: str, value: Value) -> Callable[[GGUF], None]:
    def edit(file: GGUF) -> None:
        file.fields = [*((name, old) for name, old in file.fields if name != key), (key, value)]

    return edit


def with_token(index: int, token: str) -> Callable[[GGUF], None]:
    def edit(file: GGUF) -> None:
        dict(file.fields)["tokenizer.ggml.tokens"].value[index] = token

    return edit


def with_tensor(stored_name: str, **changes: Any) -> Callable[[GGUF], None]:
    def edit(file: GGUF) -> None:
        tensor = next(tensor for tensor in file.tensors if tensor.name == stored_name)
        for attribute, value in changes.items():
            setattr(tensor, attribute, value)

    return edit


def open_edited(base: int, edit: Callable[[GGUF], None], folder: Path) -> None:
    file = deepcopy(base_files()[base])
    edit(file)
    path = folder / "model.gguf"
    path.write_bytes(file.encode())
    checkpoint = open_checkpoint(path)
    tokenizer = checkpoint.tokenizer()
    tokenizer.decode(tokenizer.encode("ab 12"))


@pytest.mark.parametrize("base", range(len(base_files())))
def test_the_files_that_are_spoilt_here_are_good(base: int, tmp_path: Path) -> None:
    open_edited(base, lambda file: None, tmp_path)


def same_key_twice(file: GGUF) -> None:
    file.fields.append(file.fields[3])


def prefixes_of_a_long_token(file: GGUF) -> None:
    """500 tokens that can be split 125,000 times."""
    metadata = dict(file.fields)
    long = ["x" * length for length in range(1, 501)]
    metadata["tokenizer.ggml.tokens"].value += long
    metadata["tokenizer.ggml.scores"].value += [0.0] * len(long)
    metadata["tokenizer.ggml.token_type"].value += [1] * len(long)


G, T = "tokenizer.ggml.", "tokenizer.ggml.tokens"
WRONG: dict[str, tuple[int, Callable[[GGUF], None], str]] = {
    # Types that are not those of the field.
    "split.count": (LLAMA, with_field("split.count", Value(STRING, "x")), r"field split\.count is 'x', but a whole"),
    "architecture": (LLAMA, with_field("general.architecture", Value(U32, 7)), r"architecture is 7, but a text"),
    "tokens": (LLAMA, with_field(T, Value(U32, 3)), r"tokens is 3, but a list of texts"),
    "tokens of numbers": (LLAMA, with_field(T, Value(ARRAY, [1, 2], U32)), r"tokens is \[1, 2\], but a list of texts"),
    "token_type": (LLAMA, with_field(G + "token_type", Value(U32, 3)), r"token_type is 3, but a list of whole"),
    "token_type of texts": (LLAMA, with_field(G + "token_type", Value(ARRAY, ["x"], STRING)), r"token_type is \['x'\]"),
    "token_type short": (
        LLAMA,
        with_field(G + "token_type", Value(ARRAY, [1], I32)),
        r"token_type has 1 entries for 10",
    ),
    "merges": (LLAMA, with_field(G + "merges", Value(STRING, "a b")), r"merges is 'a b', but a list of texts"),
    "scores": (SENTENCEPIECE, with_field(G + "scores", Value(ARRAY, [True], BOOL)), r"scores is \[True\], but a list"),
    "scores short": (
        SENTENCEPIECE,
        with_field(G + "scores", Value(ARRAY, [1.0], F32)),
        r"scores has 1 entries for 264",
    ),
    "pre": (LLAMA, with_field(G + "pre", Value(ARRAY, [1], U32)), r"pre is \[1\], but a text"),
    "model": (LLAMA, with_field(G + "model", Value(BOOL, True)), r"model is True, but a text"),
    "bos": (LLAMA, with_field(G + "bos_token_id", Value(STRING, "<s>")), r"bos_token_id is '<s>', but a whole number"),
    "add_bos_token": (LLAMA, with_field(G + "add_bos_token", Value(U32, 1)), r"add_bos_token is 1, but true or false"),
    "unknown": (SENTENCEPIECE, with_field(G + "unknown_token_id", Value(F32, 0.0)), r"unknown_token_id is 0\.0"),
    "chat template": (LLAMA, with_field("tokenizer.chat_template", Value(U32, 1)), r"chat_template is 1, but a text"),
    "alignment a text": (LLAMA, with_field("general.alignment", Value(STRING, "x")), r"general\.alignment is 'x'"),
    "alignment true": (LLAMA, with_field("general.alignment", Value(BOOL, True)), r"general\.alignment is True"),
    # Values that no model has.
    "alignment 0": (LLAMA, with_field("general.alignment", Value(U32, 0)), r"alignment is 0, but a power of 2 from 8"),
    "alignment 48": (LLAMA, with_field("general.alignment", Value(U32, 48)), r"alignment is 48, but a power of 2"),
    "alignment 2^31": (LLAMA, with_field("general.alignment", Value(U32, 2**31)), r"is 2147483648, but a power of 2"),
    "eos": (LLAMA, with_field(G + "eos_token_id", Value(U32, 10)), r"eos_token_id is 10, but there are 10 tokens"),
    "a long token": (LLAMA, with_token(2, "x" * 513), r"tokens has a token of 513 characters, above 512"),
    "many splits": (SENTENCEPIECE, prefixes_of_a_long_token, r"tokens has more than \d+ splits of a token"),
    "context": (LLAMA, with_field("llama.context_length", Value(U64, 2**63)), r"context_length is 9223372036854775808"),
    "epsilon": (
        LLAMA,
        with_field("llama.attention.layer_norm_rms_epsilon", Value(F32, NAN)),
        r"epsilon is nan, but a pos",
    ),
    "theta": (LLAMA, with_field("llama.rope.freq_base", Value(F32, 0.0)), r"freq_base is 0\.0, but a positive"),
    "scale": (
        GRANITE,
        with_field("granite.embedding_scale", Value(F32, INFINITE)),
        r"embedding_scale is inf, but a finite",
    ),
    "divisor": (GRANITE, with_field("granite.logit_scale", Value(F32, 0.0)), r"logit_scale is 0\.0, but a positive"),
    "kv heads": (
        LLAMA,
        with_field("llama.attention.head_count_kv", Value(U32, 3)),
        r"4 attention heads.* of 3 key-value",
    ),
    "rotation": (LLAMA, with_field("llama.rope.dimension_count", Value(U32, 10)), r"10 of an attention head's 8 dim"),
    "odd rotation": (LLAMA, with_field("llama.rope.dimension_count", Value(U32, 5)), r"5 of an .*both must be even"),
    "no dimensions": (
        LLAMA,
        with_field("llama.attention.head_count", Value(U32, 64)),
        r"head_count is 64, but embed",
    ),
    "frequencies": (LLAMA3, with_tensor("rope_freqs.weight", dimensions=[5]), r"F32 with shape \[5\], but .*\[32\]"),
    "frequency type": (LLAMA3, with_tensor("rope_freqs.weight", type=1), r"is F16 with shape .*, but F32 with shape"),
    "original context": (
        PHI3,
        with_field("phi3.rope.scaling.original_context_length", Value(U32, 1)),
        r"needs at least 2",
    ),
    # Tables that contradict themselves or the file.
    "same key twice": (LLAMA, same_key_twice, r"damaged at metadata field 'llama\..*': it is listed twice"),
    "misaligned": (LLAMA, with_tensor("output_norm.weight", offset=33), r"has offset 33, which is not a multiple"),
    "shared bytes": (LLAMA, with_tensor("output_norm.weight", offset=0), r"'token_embd\.weight'.*share bytes"),
    "far offset": (LLAMA, with_tensor("output_norm.weight", offset=2**63), r"is truncated: tensor 'output_norm"),
    "large tensor": (
        LLAMA,
        with_tensor("output_norm.weight", dimensions=[2**62]),
        r"is truncated: tensor 'output_norm",
    ),
    "overflow": (
        LLAMA,
        with_tensor("token_embd.weight", dimensions=[2**63, 2**63]),
        r"is truncated: tensor 'token_embd",
    ),
    "empty tensor": (LLAMA, with_tensor("token_embd.weight", dimensions=[32, 0]), r"has shape \[0, 32\]"),
    "two of one": (LLAMA, with_tensor("blk.0.attn_norm.weight", name="blk.0.ffn_gate.weight"), r"is listed twice"),
    "fused and not": (
        PHI3,
        with_tensor("blk.0.attn_norm.weight", name="blk.0.attn_q.weight"),
        r"'model\.layers\.0\.self_attn\.q_proj\.weight' is there twice",
    ),
    "long names": (LLAMA, with_tensor("output_norm.weight", name="x" * 9999), r"missing"),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_values_are_named(case: str, tmp_path: Path) -> None:
    base, edit, message = WRONG[case]
    with pytest.raises(InvalidModel, match=message) as caught:
        open_edited(base, edit, tmp_path)
    assert str(tmp_path / "model.gguf") in str(caught.value)
    assert len(str(caught.value)) < 600, "a long value is not repeated at length"


def with_number(place: int, value: int) -> Callable[[bytearray, GGUF], None]:
    """The integer at this place of all that the header holds."""

    def edit(data: bytearray, file: GGUF) -> None:
        start, size = file.numbers[place]
        data[start : start + size] = value.to_bytes(size, "little")

    return edit


def with_length(key: str, value: int) -> Callable[[bytearray, GGUF], None]:
    """The length of a text or an array."""

    def edit(data: bytearray, file: GGUF) -> None:
        kind = dict(file.fields)[key]
        start = data.index(key.encode()) + len(key) + (8 if kind.type == ARRAY else 4)
        data[start : start + 8] = struct.pack("<Q", value)

    return edit


def with_blocks(value: int) -> Callable[[bytearray, GGUF], None]:
    def edit(data: bytearray, file: GGUF) -> None:
        start = data.index(b"llama.block_count") + len("llama.block_count") + 4
        data[start : start + 4] = struct.pack("<I", value)

    return edit


CLAIMS: dict[str, tuple[Callable[[bytearray, GGUF], None], str]] = {
    "many tensors": (with_number(1, 2**63), r"there are 9223372036854775808 tensors, but at most 16384"),
    "more tensors than bytes": (with_number(1, 16384), r"16384 tensors need more than the \d+ bytes"),
    "many fields": (with_number(2, 2**64 - 1), r"metadata fields, but at most 16384"),
    "a long key": (with_number(3, 2**62), r"metadata field 1 of .* a text has 4611686018427387904 bytes, but the file"),
    "a long text": (
        with_length("tokenizer.ggml.pre", 2**40),
        r"'tokenizer\.ggml\.pre': a text has 1099511627776 bytes",
    ),
    "many texts": (with_length("tokenizer.ggml.tokens", 2**60), r"there are \d+ texts, but at most 2097152"),
    "more texts than bytes": (with_length("tokenizer.ggml.tokens", 2**20), r"1048576 texts need more than the \d+"),
    "many numbers": (with_length("tokenizer.ggml.token_type", 2**61), r"there are \d+ numbers, but at most 2097152"),
    "more numbers than bytes": (with_length("tokenizer.ggml.token_type", 2**21), r"2097152 numbers need more than"),
    "many layers": (with_blocks(400_000), r"llama\.block_count is 400000, but a whole number from 1 to 1024"),
    "layers without tensors": (with_blocks(1024), r"'model\.layers\.1\.input_layernorm\.weight' is missing"),
}


@pytest.mark.parametrize("case", CLAIMS)
def test_claims_are_compared_with_the_file_before_anything_is_made(case: str, tmp_path: Path) -> None:
    edit, message = CLAIMS[case]
    file = deepcopy(base_files()[LLAMA])
    data = file.encode()
    edit(data, file)
    path = tmp_path / "model.gguf"
    path.write_bytes(data)
    tracemalloc.start()
    try:
        with pytest.raises(InvalidModel, match=message):
            open_checkpoint(path)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 2**20, f"{len(data)} bytes cost {peak}"


def test_arrays_of_arrays_are_refused(tmp_path: Path) -> None:
    with pytest.raises(
        InvalidModel, match=r"metadata field 'nested': it is an array of type 9, but only numbers and texts"
    ):
        open_edited(LLAMA, with_field("nested", Value(ARRAY, [], ARRAY)), tmp_path)


@pytest.mark.parametrize("token", ["", " ", "a b", "x:1", ":", "$A", "$"])
def test_any_token_may_begin_a_text(token: str, tmp_path: Path) -> None:
    file = deepcopy(base_files()[LLAMA])
    with_token(0, token)(file)
    path = tmp_path / "model.gguf"
    path.write_bytes(file.encode())
    assert open_checkpoint(path).tokenizer().encode("ab") == [0, 4]


def test_an_unused_unknown_token(tmp_path: Path) -> None:
    def edit(file: GGUF) -> None:
        dict(file.fields)["tokenizer.ggml.token_type"].value[0] = 5

    open_edited(SENTENCEPIECE, edit, tmp_path)


def test_infinite_scales_are_named_with_the_tensor(tmp_path: Path) -> None:
    file = deepcopy(base_files()[QWEN2])
    tensor: Tensor = next(tensor for tensor in file.tensors if tensor.name == "blk.0.ffn_down.weight")
    file.data = file.data[: tensor.offset] + b"\x00\x7c" + file.data[tensor.offset + 2 :]
    path = tmp_path / "model.gguf"
    path.write_bytes(file.encode())
    with pytest.raises(InvalidModel, match=r"model\.gguf: tensor 'blk\.0\.ffn_down\.weight': A Q4_0 tensor has scales"):
        open_checkpoint(path).weight("model.layers.0.mlp.down_proj.weight")


def test_a_pipe_is_no_model(tmp_path: Path) -> None:
    """Opening one would wait for a writer for ever."""
    os.mkfifo(tmp_path / "model.gguf")
    with pytest.raises(InvalidModel, match="is not a regular file"):
        open_checkpoint(tmp_path / "model.gguf")


def test_mutated_files_give_a_model_or_a_sentence() -> None:
    """A few of the files of `python -m tests.fuzz_gguf --count 10000`."""
    command = [sys.executable, "-m", "tests.fuzz_gguf", "--count", "300"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    summary = json.loads(done.stdout)
    assert summary["failures"] == []
    assert summary["loaded"] + summary["refused"] == 300
    assert summary["loaded"] > 10, "some mutations must leave a model, or only the first checks are reached"
    assert summary["kinds_of_sentences"] > 40


JUDGED = """
import json, time
from foredraft.errors import InvalidModel
from tests.fuzz_gguf import judge

def refused(path): raise InvalidModel("no")
def wrong(path): raise KeyError("no")
def out_of_memory(path): bytearray(1 << 40)
def killed(path): import os, signal; os.kill(os.getpid(), signal.SIGKILL)
def large(path): len(bytearray(b"x") * (300 << 20))
def slow(path):
    while time.process_time() - started < 0.7: pass

started = time.process_time()
verdicts = {load.__name__: judge(None, load) for load in (refused, wrong, out_of_memory, killed, large, slow, str)}
print(json.dumps({name: verdict.outcome for name, verdict in verdicts.items()}))
"""


def test_the_fuzz_sees_what_goes_wrong() -> None:
    done = subprocess.run([sys.executable, "-c", JUDGED], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert json.loads(done.stdout or "{}") == {
        "refused": "refused",
        "wrong": "failed",
        "out_of_memory": "failed",
        "killed": "failed",
        "large": "failed",
        "slow": "failed",
        "str": "loaded",
    }, done.stderr
