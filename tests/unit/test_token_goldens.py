"""Token ids are llama.cpp's: of the default model, of Qwen, and of every kind of pre-tokenizer. tests/tokens/README.md
says how the golden ids were made."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from foredraft.models.gguf import tokenizer as gguf_tokenizer
from foredraft.models.gguf.checkpoint import GGUFCheckpoint
from foredraft.models.tokenizer import Tokenizer
from tests.tokens import goldens
from tests.tokens.make_goldens import SENTENCEPIECE
from tests.tokens.texts import generated_texts, sentencepiece_texts, turns_of
from tests.tokens.vocabularies import Metadata, metadata_of

HERE = Path("golden.gguf")
REAL = ("smollm2-135m", "qwen2.5-coder")
PRE_TOKENIZERS = goldens.read("pre_tokenizers")
SENTENCEPIECES = goldens.read("sentencepiece")


def entries(golden: dict[str, Any]) -> dict[str, str]:
    """The fingerprints of every variant."""
    return {name: golden[names[0]] for names in golden["same_ids"] for name in names}


def differing(tokenizer: Tokenizer, texts: list[str], fingerprints: str) -> list[str]:
    expected = [fingerprints[4 * index : 4 * index + 4] for index in range(len(texts))]
    pairs = [(text, each) for text, each in zip(texts, expected, strict=True) if each != goldens.NOT_COMPARED]
    assert 4 * len(texts) == len(fingerprints) and len(pairs) > 0.6 * len(texts)
    return [text for text, each in pairs if goldens.fingerprint(tokenizer.encode(text)) != each]


@pytest.fixture(scope="module")
def texts() -> list[str]:
    return generated_texts()


@pytest.fixture(scope="module")
def default_tokenizer(default_model: Path) -> Tokenizer:
    return GGUFCheckpoint(default_model).tokenizer()


def small(golden: dict[str, Any], changes: Metadata) -> Tokenizer:
    return Tokenizer.from_gguf({**metadata_of(golden["vocabulary"]), **changes}, HERE)


@pytest.mark.parametrize("name", REAL)
def test_ids_of_real_vocabularies(name: str, texts: list[str]) -> None:
    golden = goldens.read(name)
    assert goldens.digest(texts) == golden["texts"], "the goldens are of other texts; make them again"
    tokenizer = Tokenizer.from_gguf(metadata_of(golden["vocabulary"]), HERE)
    assert differing(tokenizer, texts, golden["fingerprints"]) == []
    for text, ids in zip(texts, golden["ids"], strict=False):
        assert tokenizer.encode(text) == ids
        assert tokenizer.decode(ids, skip_special_tokens=False) == text


def test_ids_of_the_default_model(default_tokenizer: Tokenizer, texts: list[str]) -> None:
    assert differing(default_tokenizer, texts, goldens.read("smollm2-135m")["fingerprints"]) == []


def test_ids_of_spec_bench(default_tokenizer: Tokenizer, spec_bench: Path) -> None:
    turns = turns_of(spec_bench)
    assert len(turns) == 280
    assert differing(default_tokenizer, turns, goldens.read("smollm2-135m")["spec_bench"]) == []


def test_numbered_lists(default_tokenizer: Tokenizer) -> None:
    vocabulary = {index: token for token, index in default_tokenizer.vocabulary().items()}
    ids = default_tokenizer.encode("tea:\n\n1. Boil  12 l")
    assert [vocabulary[index] for index in ids] == "te a : ĊĊ 1 . ĠBo il ĠĠ 1 2 Ġl".split()


@pytest.mark.parametrize("pre", gguf_tokenizer._WORD_CUTS)
def test_ids_of_every_pre_tokenizer(pre: str, texts: list[str]) -> None:
    fingerprints = entries(PRE_TOKENIZERS)
    assert pre in fingerprints, "a new kind needs golden ids"
    assert differing(small(PRE_TOKENIZERS, {"tokenizer.ggml.pre": pre}), texts, fingerprints[pre]) == []


@pytest.mark.parametrize("variant", SENTENCEPIECE)
def test_ids_of_sentencepiece(variant: str) -> None:
    tokenizer = small(SENTENCEPIECES, SENTENCEPIECE[variant])
    assert differing(tokenizer, sentencepiece_texts(), entries(SENTENCEPIECES)[variant]) == []
