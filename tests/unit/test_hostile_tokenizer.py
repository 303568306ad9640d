"""tokenizer.json files that take all memory, or whose patterns never end: one sentence each, and the process lives."""

from __future__ import annotations

import base64
import json
import struct
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from tokenizers import normalizers, pre_tokenizers

from foredraft.errors import InvalidModel, InvalidPrompt
from foredraft.models import tokenizer_limits
from foredraft.models.tokenizer import Tokenizer
from foredraft.models.tokenizer_limits import growth
from tests.unit.test_tokenizer import NAMED, write_tokenizer

Json = dict[str, Any]


def replace(content: str, **pattern: str) -> Json:
    return {"type": "Replace", "pattern": pattern, "content": content}


def chain(name: str, *steps: Json) -> Json:
    return {"type": "Sequence", name: list(steps)}


def charsmap(*replacements: str) -> str:
    """As SentencePiece writes them: the length of a search tree, the tree, the replacements."""
    data = struct.pack("<II", 4, 0) + b"\0".join(text.encode() for text in replacements)
    return base64.b64encode(data).decode()


EIGHTFOLD = replace("aaaaaaaa", String="a")
BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
UNTYPED = {"pattern": {"String": "a"}, "content": "aaaaaaaa"}
TEXT: Json = {"Sequence": {"id": "A", "type_id": 0}}
MARK: Json = {"SpecialToken": {"id": "<s>", "type_id": 0}}


def template(*pieces: Json, ids: int = 1) -> Json:
    special = {"<s>": {"id": "<s>", "ids": [0] * ids, "tokens": ["<s>"] * ids}}
    pair = [TEXT, {"Sequence": {"id": "B", "type_id": 0}}]
    return {"type": "TemplateProcessing", "single": list(pieces), "pair": pair, "special_tokens": special}


def deep(levels: int) -> Json:
    step: Json = {"type": "NFC"}
    for _ in range(levels):
        step = chain("normalizers", step)
    return step


HOSTILE: dict[str, Json] = {
    "normalizers": {"normalizer": chain("normalizers", *[EIGHTFOLD] * 12)},
    "nested normalizers": {"normalizer": chain("normalizers", *[chain("normalizers", *[EIGHTFOLD] * 3)] * 4)},
    "normalizers without a type": {"normalizer": {"normalizers": [UNTYPED] * 12}},
    "a step without a type": {"normalizer": chain("normalizers", *[UNTYPED] * 12)},
    "a pattern that matches nothing": {"normalizer": chain("normalizers", *[replace("aaaaaaaa", Regex="(?=a)")] * 5)},
    "prepended text": {"normalizer": chain("normalizers", *[{"type": "Prepend", "prepend": "x" * 999}] * 2)},
    "a table": {"normalizer": {"type": "Precompiled", "precompiled_charsmap": charsmap("x" * 20000)}},
    "bytes of bytes": {"pre_tokenizer": chain("pretokenizers", *[BYTES] * 40)},
    "both": {
        "normalizer": chain("normalizers", *[EIGHTFOLD] * 3),
        "pre_tokenizer": chain("pretokenizers", *[BYTES] * 8),
    },
    "repeated text": {"post_processor": template(*[TEXT] * 1000)},
    "text repeated by several": {
        "post_processor": {"type": "Sequence", "processors": [template(*[TEXT] * 50)] * 8},
    },
    "repeated special tokens": {"post_processor": template(TEXT, *[MARK] * 1000)},
    "many special tokens": {"post_processor": template(MARK, TEXT, ids=100_000)},
    "decoders": {"decoder": chain("decoders", *[EIGHTFOLD] * 12)},
    "decoders of nothing": {"decoder": chain("decoders", *[{"type": "BPEDecoder", "suffix": ""}] * 40)},
    "deep": {"normalizer": deep(300)},
}


def spoilt(folder: Path, **changes: Any) -> Path:
    write_tokenizer(folder, NAMED)
    file = folder / "tokenizer.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))
    return folder


@pytest.mark.parametrize("case", HOSTILE)
def test_steps_that_make_a_text_too_long_are_refused(case: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidModel, match=r"tokenizer\.json") as error:
        Tokenizer.from_folder(spoilt(tmp_path, **HOSTILE[case]))
    assert len(str(error.value)) < 600 and str(error.value).endswith(".") and "\n" not in str(error.value)


@pytest.mark.parametrize(
    "value", [5, "NFC", [], [1], {"type": 5}, {"type": "Sequence", "normalizers": 7}, {"single": 3}]
)
@pytest.mark.parametrize("part", ["normalizer", "pre_tokenizer", "post_processor", "decoder", "added_tokens"])
def test_values_of_other_types(part: str, value: Any, tmp_path: Path) -> None:
    with suppress(InvalidModel):  # it may be read, but nothing else may be raised
        Tokenizer.from_folder(spoilt(tmp_path, **{part: value}))


def test_growth_is_looked_at_before_the_library_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The library normalises added tokens while it reads the file."""
    token = {"id": 6, "content": "a" * 20_000, "normalized": True, "special": False}
    flags = {"single_word": False, "lstrip": False, "rstrip": False}
    folder = spoilt(tmp_path, normalizer=chain("normalizers", *[EIGHTFOLD] * 4), added_tokens=[{**token, **flags}])
    monkeypatch.setattr("tokenizers.Tokenizer.from_file", None)
    with pytest.raises(InvalidModel, match="the added tokens have 20000 bytes, which is too much"):
        Tokenizer.from_folder(folder)


USUAL: dict[str, tuple[Json, float]] = {
    "Llama 2": (chain("normalizers", {"type": "Prepend", "prepend": "▁"}, replace("▁", String=" ")), 12),
    "Llama 3": (BYTES, 2),
    "Qwen": ({"type": "NFC"}, 3),
    "quotes": (chain("normalizers", replace('"', String="``"), replace("", Regex="x*")), 1),
    "table": ({"type": "Precompiled", "precompiled_charsmap": charsmap("a", "x" * 33, "bc")}, 33),
}


@pytest.mark.parametrize("case", USUAL)
def test_growth_of_usual_tokenizers(case: str) -> None:
    step, expected = USUAL[case]
    assert growth(step) == expected


NASTY = ["a", " ", "\ufdfa", "\u0390", "\U0001d160", "İ", "Ⱥ", "世", "é", "\u1f82", "\x00", " a 世é\ufdfa" * 20]
STEPS = [
    normalizers.NFC(),
    normalizers.NFD(),
    normalizers.NFKC(),
    normalizers.NFKD(),
    normalizers.Lowercase(),
    normalizers.BertNormalizer(),
    normalizers.ByteLevel(),
    normalizers.Prepend("▁▁"),
    normalizers.Replace("a", "bcd"),
    normalizers.Sequence([normalizers.Replace(" ", "▁"), normalizers.ByteLevel(), normalizers.NFKD()]),
    pre_tokenizers.ByteLevel(add_prefix_space=False),
    pre_tokenizers.ByteLevel(add_prefix_space=True),
    pre_tokenizers.Metaspace(),
    pre_tokenizers.Sequence([pre_tokenizers.Digits(), pre_tokenizers.Metaspace(), pre_tokenizers.ByteLevel()]),
]


@pytest.mark.parametrize("step", STEPS, ids=lambda step: step.__getstate__().decode()[:60])
def test_no_text_grows_by_more_than_was_counted(step: Any) -> None:
    most = growth(json.loads(step.__getstate__()))
    for text in NASTY:
        if hasattr(step, "normalize_str"):
            made = step.normalize_str(text)
        else:
            made = "".join(piece for piece, _ in step.pre_tokenize_str(text))
        assert len(made.encode()) <= most * len(text.encode())


def test_long_prompts_are_refused_before_the_library_sees_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenizer_limits, "MAX_BYTES", 64)
    step = chain("normalizers", EIGHTFOLD)
    pre_tokenizer = {**BYTES, "use_regex": False}  # twice as long
    tokenizer = Tokenizer.from_folder(spoilt(tmp_path, normalizer=step, pre_tokenizer=pre_tokenizer, added_tokens=[]))
    assert len(tokenizer.encode("ab", add_special_tokens=False)) == 8
    with pytest.raises(
        InvalidPrompt, match="The prompt has 5 bytes, but this model's tokenizer takes at most 4; shorten"
    ):
        tokenizer.encode("abab\x00")


def test_a_text_that_is_repeated_may_be_half_as_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenizer_limits, "MAX_BYTES", 64)
    steps = {"normalizer": None, "pre_tokenizer": BYTES, "post_processor": template(TEXT, TEXT), "added_tokens": []}
    tokenizer = Tokenizer.from_folder(spoilt(tmp_path, **steps))
    with pytest.raises(InvalidPrompt, match="tokenizer takes at most 16; shorten"):
        tokenizer.encode("a" * 17)


@pytest.mark.parametrize("pattern", ["(a|a)*$", "(a+)+$"])
@pytest.mark.parametrize("part", ["normalizer", "pre_tokenizer"])
def test_a_pattern_that_never_ends(part: str, pattern: str, tmp_path: Path) -> None:
    split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    step = split if part == "pre_tokenizer" else replace("x", Regex=pattern)
    tokenizer = Tokenizer.from_folder(spoilt(tmp_path, **{part: step}))
    with pytest.raises(
        InvalidPrompt, match=r"The model's tokenizer cannot read this prompt \(.*retry-limit.*\); change"
    ):
        tokenizer.encode("a" * 200 + "b")
    assert tokenizer.encode("b")[-1] == 3, "the next prompt is read"


def test_a_panic_while_a_file_is_read(tmp_path: Path) -> None:
    with pytest.raises(InvalidModel, match=r"tokenizer\.json cannot be read \(.*charsmap.*\); download"):
        Tokenizer.from_folder(spoilt(tmp_path, normalizer={"type": "Precompiled", "precompiled_charsmap": "AAAA"}))


def test_a_panic_while_tokens_are_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = Tokenizer.from_folder(spoilt(tmp_path))
    with pytest.raises(InvalidModel, match="The model's tokenizer cannot write these tokens"):
        tokenizer.decode([2**40])

    class Interrupted:
        def decode_batch(self, *_: Any, **__: Any) -> list[str]:
            raise KeyboardInterrupt

    monkeypatch.setattr(tokenizer, "_backend", Interrupted())
    with pytest.raises(KeyboardInterrupt):
        tokenizer.decode([1])
