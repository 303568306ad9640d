"""The fewest tokens that a text can have: never more than it has, so that no prompt is refused that would fit."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers

from foredraft.errors import InvalidPrompt
from foredraft.models.gguf.checkpoint import GGUFCheckpoint
from foredraft.models.least_tokens import LeastTokens
from foredraft.models.tokenizer import _BYTE_LEVEL, Tokenizer

PIECES = [
    "a",
    " ",
    "\n" * 9,
    " " * 70,
    "é",
    "e\u0301",
    "\u1f82",
    "世",
    "🌍",
    "\x04",
    "\x00",
    "\u212b",
    "12",
    "word " * 3,
]
PIECES += ["<|im_start|>", "\U000f0000", "x" * 40, "\u0301" * 5, "▁", "ü"]


@pytest.fixture(scope="module")
def tokenizer(default_model: Path) -> Tokenizer:
    return GGUFCheckpoint(default_model).tokenizer()


def byte_level(**parts: Any) -> tokenizers.Tokenizer:
    """Every byte, and a token of eight bytes."""
    vocabulary = {character: index for index, character in enumerate(_BYTE_LEVEL)}
    merges = [("a" * size, "a" * size) for size in (1, 2, 4)]
    vocabulary |= {left + right: 256 + index for index, (left, right) in enumerate(merges)}
    backend = tokenizers.Tokenizer(models.BPE(vocabulary, merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    for name, part in parts.items():
        setattr(backend, name, part)
    return backend


def sentencepiece(**parts: Any) -> tokenizers.Tokenizer:
    """Bytes as <0x..>, and what Llama does with spaces."""
    vocabulary = {f"<0x{byte:02X}>": byte for byte in range(256)} | {"a": 256, "aa": 257, "▁": 258, "<unk>": 259}
    backend = tokenizers.Tokenizer(
        models.BPE(vocabulary, [("a", "a")], byte_fallback=True, unk_token="<unk>", fuse_unk=True)
    )
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    for name, part in parts.items():
        setattr(backend, name, part)
    return backend


BOUNDED = {
    "bytes": byte_level(),
    "NFC": byte_level(normalizer=normalizers.NFC()),
    "NFKC": byte_level(normalizer=normalizers.Sequence([normalizers.NFKC()])),
    "digits": byte_level(pre_tokenizer=pre_tokenizers.Sequence([pre_tokenizers.Digits(), pre_tokenizers.ByteLevel()])),
    "sentencepiece": sentencepiece(),
}
UNBOUNDED = {
    "spaces are joined": byte_level(normalizer=normalizers.Replace(tokenizers.Regex(" +"), " ")),
    "texts are dropped": byte_level(normalizer=normalizers.Replace("a", "")),
    "texts are shortened": byte_level(normalizer=normalizers.Replace("aa", "a")),
    "pieces are removed": byte_level(
        pre_tokenizer=pre_tokenizers.Sequence([pre_tokenizers.Split("a", "removed"), pre_tokenizers.ByteLevel()])
    ),
    "ends are stripped": byte_level(normalizer=normalizers.Strip()),
    "spaces are dropped": sentencepiece(pre_tokenizer=pre_tokenizers.Whitespace()),
    "unknown ones are one": tokenizers.Tokenizer(models.BPE({"a": 0, "<u>": 1}, [], unk_token="<u>", fuse_unk=True)),
}


@pytest.mark.parametrize("name", BOUNDED)
def test_never_more_than_there_are(name: str) -> None:
    backend = BOUNDED[name]
    least = LeastTokens(backend, backend.get_vocab(), _BYTE_LEVEL)
    draw = random.Random(name)
    for _ in range(300):
        text = "".join(draw.choices(PIECES, k=draw.randrange(40)))
        assert least.count(text) <= len(backend.encode(text).ids)
    assert least.count("a" * 1000) > 0


def test_the_default_model(tokenizer: Tokenizer) -> None:
    backend = tokenizers.Tokenizer.from_str(tokenizer.to_json())
    least = LeastTokens(backend, backend.get_vocab(), _BYTE_LEVEL)
    draw = random.Random(0)
    for _ in range(300):
        text = "".join(draw.choices(PIECES, k=draw.randrange(40)))
        assert least.count(text) <= len(tokenizer.encode(text))
    assert least.count("1" * 10_000) == 9999  # it has no token of two digits
    assert least.count("\u0301" * 10_000) > 10_000
    assert least.count("\x04" * 10_000) == 0  # its vocabulary does not have them


@pytest.mark.parametrize("name", UNBOUNDED)
def test_nothing_is_known_where_any_number_of_characters_may_be_a_token(name: str) -> None:
    backend = UNBOUNDED[name]
    assert LeastTokens(backend, backend.get_vocab(), _BYTE_LEVEL).count("a" * 100_000) == 0


@pytest.mark.parametrize("side", ["lstrip", "rstrip"])
def test_tokens_that_take_the_spaces_around_them(side: str) -> None:
    backend = byte_level()
    backend.add_tokens([AddedToken("<mask>", **{side: True})])
    assert LeastTokens(backend, backend.get_vocab(), _BYTE_LEVEL).count("a" * 100_000) == 0


def test_four_characters_may_be_composed_to_one() -> None:
    backend = byte_level(normalizer=normalizers.NFC())
    backend.add_tokens([AddedToken("\u1f82" * 8, normalized=True)])
    text = "\u03b1\u0313\u0300\u0345" * 8
    assert LeastTokens(backend, backend.get_vocab(), _BYTE_LEVEL).count(text) == len(backend.encode(text).ids) == 1


def test_characters_that_no_token_has_are_not_counted_where_others_are_composed() -> None:
    vocabulary = {character: index for index, character in enumerate(_BYTE_LEVEL) if _BYTE_LEVEL[character] != 4}
    backend = byte_level(normalizer=normalizers.NFC(), model=models.BPE(vocabulary, []))
    least = LeastTokens(backend, backend.get_vocab(), _BYTE_LEVEL)
    text = "\x04" * 1000 + "a"
    assert least.count(text) == len(backend.encode(text).ids) == 1


class Without:
    """A tokenizer of the library that has some of its functions taken away."""

    def __init__(self, tokenizer: Tokenizer, *names: str) -> None:
        self.backend = tokenizers.Tokenizer.from_str(tokenizer.to_json())
        self.names = names

    def __getattr__(self, name: str) -> Any:
        assert name not in self.names, f"{name} was called"
        return getattr(self.backend, name)


def made_with(backend: Any) -> Tokenizer:
    return Tokenizer(backend, None, (), {}, "{{ messages[0].content }}")


def test_what_cannot_fit_is_refused_before_it_is_tokenised(tokenizer: Tokenizer) -> None:
    refusing = made_with(Without(tokenizer, "encode", "encode_batch", "encode_batch_fast"))
    text = "1" * 100_000
    with pytest.raises(InvalidPrompt, match="100000 characters and so more than the 64 tokens that fit"):
        refusing.encode(text, max_tokens=64)
    with pytest.raises(InvalidPrompt, match="more than the 64 tokens that fit"):
        refusing.encode_chat([{"role": "user", "content": text}], max_tokens=64)


def test_only_functions_that_let_others_run_are_used(tokenizer: Tokenizer) -> None:
    """`encode` and `decode` of the library hold the interpreter's lock, so that nobody else runs meanwhile."""
    batches = Without(tokenizer, "encode", "decode")
    one_by_one = [
        batches.backend.encode("<|im_start|>a b").ids,
        batches.backend.decode([9, 10], skip_special_tokens=False),
    ]
    made = made_with(batches)
    assert [made.encode("<|im_start|>a b"), made.decode([9, 10], skip_special_tokens=False)] == one_by_one
