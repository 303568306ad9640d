"""Tokenizers: the same prompts and texts as transformers, and clear words for what cannot be. Golden token ids are in
test_token_goldens.py, templates in test_chat_templates.py, what content may not do in test_chat_content.py."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, processors

from foredraft.errors import InvalidModel, InvalidPrompt
from foredraft.models.fill_in import fill_in_tokens
from foredraft.models.gguf.checkpoint import GGUFCheckpoint
from foredraft.models.tokenizer import Tokenizer
from tests.gguf_files import MINIMAL, TOKENIZER, TOKENS, minimal_tensors, write_gguf

HERE = Path("model.gguf")


@pytest.fixture(scope="module")
def tokenizer(default_model: Path) -> Tokenizer:
    return GGUFCheckpoint(default_model).tokenizer()


@pytest.fixture(scope="module")
def reference(default_model: Path) -> Any:
    transformers = pytest.importorskip("transformers", reason="the reference tokenizer")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return transformers.AutoTokenizer.from_pretrained(default_model.parent, gguf_file=default_model.name)


AWKWARD = [
    "",
    " ",
    "  two spaces",
    "\n\n\tindented",
    "naïve café — “quotes” … 世界 🌍 👩‍👩‍👧",
    "it's they'll WE'RE",
    "1234567890 3.14 1e-5",
    "<|im_start|>user\nhi<|im_end|>",
    "<|im_start|",
    "def f(x):\n    return x  # comment\n",
    "\u0000\u200b\ufeff",
]


@pytest.mark.slow  # transformers takes long to convert a tokenizer of real size
def test_prompts_are_those_of_transformers(tokenizer: Tokenizer, reference: Any, spec_bench: Path) -> None:
    for line in spec_bench.read_text(encoding="utf-8").splitlines():
        messages = []
        for turn in json.loads(line)["turns"]:
            messages.append({"role": "user", "content": turn})
            expected = reference.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
            assert tokenizer.render_chat(messages) == expected
            assert tokenizer.encode_chat(messages) == tokenizer.encode(expected, add_special_tokens=False)
            messages.append({"role": "assistant", "content": turn[:40]})
        finished = reference.apply_chat_template(messages, tokenize=False, add_generation_prompt=False)
        assert tokenizer.render_chat(messages, add_generation_prompt=False) == finished


@pytest.mark.slow
def test_awkward_texts_are_those_of_transformers(tokenizer: Tokenizer, reference: Any) -> None:
    for text in AWKWARD:
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == reference.decode(ids, skip_special_tokens=True)


@pytest.mark.parametrize("text", AWKWARD)
def test_awkward_texts(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids, skip_special_tokens=False) == text
    whole = text.replace("<|im_start|>", "").replace("<|im_end|>", "")
    assert tokenizer.decode(ids) == whole, "without special tokens"
    assert b"".join(map(tokenizer.bytes_of, ids)) == text.encode(), "although some tokens are parts of characters"


def test_properties_of_the_default_tokenizer(tokenizer: Tokenizer) -> None:
    assert (tokenizer.bos_token_id, tokenizer.eos_token_ids, tokenizer.vocab_size) == (1, (2,), 49152)
    assert [tokenizer.is_special(index) for index in (0, 2, 16, 17, 28120)] == [True, True, True, False, False]
    assert tokenizer.render_chat([{"role": "system", "content": "S"}, {"role": "user", "content": "U"}]) == (
        "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nU<|im_end|>\n<|im_start|>assistant\n"
    )


# What each way of cutting words does to one text, all letters and digits being tokens of their own: a merge that
# crosses a cut cannot happen.
CUTS = {
    "default": ["123", "45", "Ġx"],
    "gpt-2": ["12345", "Ġx"],
    "smollm": ["1", "2", "3", "4", "5", "Ġx"],
    "refact": ["1", "2", "3", "4", "5", "Ġx"],
    "llama-bpe": ["123", "45", "Ġx"],
    "qwen2": ["1", "2", "3", "4", "5", "Ġx"],
    "tekken": ["1", "2", "3", "4", "5", "Ġx"],
    "gpt-4o": ["123", "45", "Ġx"],
}


@pytest.mark.parametrize("pre", CUTS)
def test_words_are_cut_as_the_file_says(pre: str) -> None:
    pieces = ["12", "123", "45", "12345", "Ġx"]
    tokens = ["<s>", *sorted(pre_tokenizers.ByteLevel.alphabet()), *pieces]
    metadata = {
        **TOKENIZER,
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3] + [1] * (len(tokens) - 1),
        "tokenizer.ggml.merges": ["1 2", "12 3", "4 5", "123 45", "Ġ x"],
        "tokenizer.ggml.add_bos_token": False,
    }
    built = Tokenizer.from_gguf(metadata, HERE)
    assert [tokens[index] for index in built.encode("12345 x")] == CUTS[pre]
    assert built.decode(built.encode("12345 x")) == "12345 x"


@pytest.mark.parametrize(
    ("changes", "begins"),
    [
        ({}, False),
        ({"tokenizer.ggml.add_bos_token": True}, True),
        ({"tokenizer.ggml.pre": "llama-bpe"}, True),
        ({"tokenizer.ggml.pre": "llama-bpe", "tokenizer.ggml.add_bos_token": False}, False),
        ({"tokenizer.ggml.pre": "smaug-bpe"}, False),
    ],
)
def test_beginning_of_text(changes: dict[str, Any], begins: bool) -> None:
    built = Tokenizer.from_gguf({**TOKENIZER, **changes}, HERE)
    assert built.encode("ab") == ([0] if begins else []) + [4]
    assert built.encode("ab", add_special_tokens=False) == [4]


def test_end_of_text() -> None:
    built = Tokenizer.from_gguf({**TOKENIZER, "tokenizer.ggml.add_eos_token": True}, HERE)
    assert built.encode("ab") == [4, 1]
    assert built.encode("ab", add_special_tokens=False) == [4]


def test_control_and_user_defined_tokens() -> None:
    metadata = {
        **TOKENIZER,
        "tokenizer.ggml.tokens": [*TOKENS, "<think>", "<｜end▁mark｜>"],
        "tokenizer.ggml.token_type": [3, 3, 1, 1, 1, 1, 4, 3],
    }
    built = Tokenizer.from_gguf(metadata, HERE)
    ids = built.encode("a<think>b<｜end▁mark｜></s>")
    assert ids == [2, 6, 3, 7, 1]
    assert built.decode(ids) == "a<think>b"
    assert [built.is_special(index) for index in ids] == [False, False, False, True, True]
    assert built.vocab_size == 8


def test_unused_tokens_are_no_tokens() -> None:
    """Files pad their vocabularies to round numbers, and not all of one family to the same."""
    padded = {
        **TOKENIZER,
        "tokenizer.ggml.tokens": [*TOKENS, "[PAD6]", "<|endoftext|>"],
        "tokenizer.ggml.token_type": [3, 3, 1, 1, 1, 1, 5, 5],
    }
    assert Tokenizer.from_gguf(padded, HERE).vocabulary() == Tokenizer.from_gguf(TOKENIZER, HERE).vocabulary()


def test_tokens_that_end_an_answer() -> None:
    metadata = {
        **TOKENIZER,
        "tokenizer.ggml.tokens": [*TOKENS, "<|end|>", "<|im_end|>"],
        "tokenizer.ggml.token_type": [3, 3, 1, 1, 1, 1, 3, 1],
        "tokenizer.ggml.eot_token_id": 5,
    }
    built = Tokenizer.from_gguf(metadata, HERE)
    assert built.eos_token_ids == (1, 5, 7, 6)
    assert built.encode("a<|im_end|>") == [2, 7] and built.is_special(7), "although the file calls it ordinary"


PIECES = ["▁", "h", "e", "l", "o", "he", "ll", "hell", "hello", "▁hello", "▁h", "▁▁", ".", "s>", "<"]
SENTENCEPIECE: dict[str, Any] = {
    "tokenizer.ggml.model": "llama",
    "tokenizer.ggml.tokens": ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *PIECES],
    "tokenizer.ggml.scores": [0.0] * 259 + [-float(index) for index in range(len(PIECES))],
    "tokenizer.ggml.token_type": [2, 3, 3] + [6] * 256 + [1] * len(PIECES),
}
SENTENCEPIECE_TEXTS: list[tuple[dict[str, Any], str, list[str]]] = [
    ({}, "hello", ["<s>", "▁hello"]),
    ({}, "", ["<s>"]),
    ({}, "  hello hello.", ["<s>", "▁▁", "▁hello", "▁hello", "."]),
    ({}, "é hello", ["<s>", "▁", "<0xC3>", "<0xA9>", "▁hello"]),
    ({}, "hello</s>hello", ["<s>", "▁hello", "</s>", "▁hello"]),
    ({}, "hello</s>\nhello", ["<s>", "▁hello", "</s>", "▁", "<0x0A>", "hello"]),
    ({}, "hello<unk>", ["<s>", "▁hello", "<unk>"]),
    ({"tokenizer.ggml.add_space_prefix": False}, "hello hello", ["<s>", "hello", "▁hello"]),
    ({"general.architecture": "phi3"}, "<s> hello</s>\n\nhello", ["<s>", "<s>", "▁", "▁hello", "</s>", "▁hello"]),
]


@pytest.mark.parametrize(("changes", "text", "expected"), SENTENCEPIECE_TEXTS)
def test_sentencepiece(changes: dict[str, Any], text: str, expected: list[str]) -> None:
    built = Tokenizer.from_gguf({**SENTENCEPIECE, **changes}, HERE)
    ids = built.encode(text)
    assert [SENTENCEPIECE["tokenizer.ggml.tokens"][index] for index in ids] == expected
    if "<" not in text:
        assert built.decode(ids) == text
    of_bytes = [(built.bytes_of(index), token) for index, token in zip(ids, expected) if token.startswith("<0x")]
    assert all(own_bytes == bytes([int(token[3:5], 16)]) for own_bytes, token in of_bytes)
    assert (built.bos_token_id, built.eos_token_ids) == (1, (2,)), "the ids of SentencePiece, as the file names none"


WRONG_TOKENIZERS: list[tuple[dict[str, Any], str]] = [
    ({"tokenizer.ggml.model": "rwkv"}, r"tokenizer\.ggml\.model is 'rwkv', but 'gpt2'"),
    ({"tokenizer.ggml.pre": "martian"}, r"tokenizer\.ggml\.pre is 'martian', but default, gpt-2"),
    ({"tokenizer.ggml.tokens": None}, r"tokenizer\.ggml\.tokens is missing or empty"),
    ({"tokenizer.ggml.merges": None}, r"tokenizer\.ggml\.merges is missing or empty"),
    ({"tokenizer.ggml.merges": ["ab"]}, r"merges holds 'ab', but each entry must be two tokens"),
    ({"tokenizer.ggml.merges": ["a z"]}, r"merges do not fit tokenizer\.ggml\.tokens"),
    ({"tokenizer.ggml.model": "llama"}, r"tokenizer\.ggml\.scores is missing"),
    ({"tokenizer.ggml.bos_token_id": 99, "tokenizer.ggml.add_bos_token": True}, r"bos_token_id is 99"),
    ({"tokenizer.ggml.eos_token_id": 99, "tokenizer.ggml.add_eos_token": True}, r"eos_token_id is 99"),
]


@pytest.mark.parametrize(("changes", "message"), WRONG_TOKENIZERS)
def test_wrong_tokenizers_are_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidModel, match=message) as caught:
        Tokenizer.from_gguf({**TOKENIZER, **changes}, HERE)
    assert "model.gguf" in str(caught.value)


def test_tokenizer_of_another_model(tmp_path: Path) -> None:
    metadata = {**MINIMAL, "tokenizer.ggml.tokens": [*TOKENS, "x", "y", "z"], "tokenizer.ggml.token_type": [1] * 9}
    checkpoint = GGUFCheckpoint(write_gguf(tmp_path / "model.gguf", metadata, minimal_tensors()))
    with pytest.raises(
        InvalidModel, match="ids up to 8, but the model's logits end at 7, so it does not fit the model"
    ):
        checkpoint.tokenizer()


def write_tokenizer(folder: Path, config: dict[str, Any]) -> Path:
    vocab = {token: index for index, token in enumerate(TOKENS)}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[("a", "b")]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<s>", "</s>"])
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    backend.enable_truncation(2)
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


NAMED = {"bos_token": "<s>", "eos_token": {"__type": "AddedToken", "content": "</s>"}}


def test_folder(tmp_path: Path) -> None:
    built = Tokenizer.from_folder(write_tokenizer(tmp_path, NAMED))
    assert built.encode("ab ab ab") == [0, 4, 5, 4, 5, 4], "truncation saved in the file is switched off"
    assert (built.bos_token_id, built.eos_token_ids, built.vocab_size) == (0, (1,), 6)
    assert Tokenizer.from_folder(tmp_path, eos_token_ids=(1, 3)).eos_token_ids == (1, 3)


@pytest.mark.parametrize("declared", [{}, {"add_bos_token": False}, {"add_bos_token": True, "add_eos_token": True}])
def test_tokenizer_json_decides_how_a_text_begins(declared: dict[str, Any], tmp_path: Path) -> None:
    """Flags beside it that say otherwise are ignored, as transformers ignores them."""
    transformers = pytest.importorskip("transformers", reason="the reference tokenizer")
    write_tokenizer(tmp_path, {**NAMED, **declared})
    assert Tokenizer.from_folder(tmp_path).encode("ab") == [0, 4]
    assert transformers.PreTrainedTokenizerFast.from_pretrained(tmp_path)("ab")["input_ids"] == [0, 4]


def test_templates_of_a_folder(tmp_path: Path) -> None:
    named = [{"name": "tools", "template": "T"}, {"name": "default", "template": "D{{ eos_token }}"}]
    message = [{"role": "user", "content": "x"}]
    write_tokenizer(tmp_path, {**NAMED, "chat_template": named})
    assert Tokenizer.from_folder(tmp_path).render_chat(message) == "D</s>"
    (tmp_path / "chat_template.jinja").write_text("J{{ messages[0]['content'] }}")
    assert Tokenizer.from_folder(tmp_path).render_chat(message) == "Jx"


def test_damaged_files_of_a_folder(tmp_path: Path) -> None:
    write_tokenizer(tmp_path, NAMED)
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(InvalidModel, match=r"tokenizer_config\.json is not valid JSON"):
        Tokenizer.from_folder(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(InvalidModel, match=r"tokenizer\.json cannot be read"):
        Tokenizer.from_folder(tmp_path)


@pytest.mark.parametrize("text", [None, 5, ["a"], b"bytes"])
def test_prompts_that_are_no_text(text: Any) -> None:
    with pytest.raises(InvalidPrompt, match="must be a string"):
        Tokenizer.from_gguf(TOKENIZER, HERE).encode(text)


def test_lone_surrogate() -> None:
    with pytest.raises(InvalidPrompt, match="lone surrogate at character 1"):
        Tokenizer.from_gguf(TOKENIZER, HERE).encode("a\ud800")


@pytest.mark.parametrize(
    ("names", "prompt"),
    [
        (
            ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|repo_name|>", "<|file_sep|>"),
            "<|repo_name|>project\n<|file_sep|>a.py\nx<|file_sep|>file\n"
            "<|fim_prefix|>one<|fim_suffix|>two<|fim_middle|>begun",
        ),
        (("<fim_prefix>", "<fim_suffix>", "<fim_middle>"), "a.py\nx\n<fim_prefix>one<fim_suffix>two<fim_middle>begun"),
        (
            ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),
            "a.py\nx\n<｜fim▁begin｜>one<｜fim▁hole｜>two<｜fim▁end｜>begun",
        ),
        (("<fim_prefix>", "<fim_suffix>"), None),
    ],
)
def test_tokens_for_filling_in(names: tuple[str, ...], prompt: str | None) -> None:
    vocabulary = {name: place for place, name in enumerate(("a", *names, "<|endoftext|>"))}
    found = fill_in_tokens(vocabulary)
    assert (found and found.prompt("one", "two", [("a.py", "x")], "begun")) == prompt
    if found is not None:
        assert found.end_ids == tuple(range(1, len(vocabulary))), "all but the ordinary token end a filling"


class TestAnswerFormats:
    """What a vocabulary shows of a model's answers, and what a prompt has begun of one."""

    MARKS = ["<|start|>", "<|channel|>", "<|message|>", "<|end|>"]  # 6 to 9

    def harmony(self) -> Tokenizer:
        tokens = {
            "tokenizer.ggml.tokens": [*TOKENS, *self.MARKS],
            "tokenizer.ggml.token_type": [3, 3, 1, 1, 1, 1] + [3] * 4,
        }
        return Tokenizer.from_gguf({**TOKENIZER, **tokens}, HERE)

    def thinker(self) -> Tokenizer:
        tokens = {"tokenizer.ggml.tokens": [*TOKENS, "<think>"], "tokenizer.ggml.token_type": [3, 3, 1, 1, 1, 1, 3]}
        return Tokenizer.from_gguf({**TOKENIZER, **tokens}, HERE)

    def test_tags_stay_in_texts(self) -> None:
        assert self.harmony().decode([0, 7, 2, 8, 3, 9, 1]) == "<|channel|>a<|message|>b<|end|>"
        assert self.thinker().decode([0, 6, 2, 1]) == "<think>a"

    def test_other_control_tokens_do_not(self) -> None:
        tokens = [*TOKENS, "<|end|>"]
        metadata = {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": [3, 3, 1, 1, 1, 1, 3]}
        assert Tokenizer.from_gguf({**TOKENIZER, **metadata}, HERE).decode([2, 6]) == "a"

    def test_a_prompt_has_begun_a_message(self) -> None:
        tokenizer = self.harmony()
        assert tokenizer.answer_format([6, 2, 8, 3, 9, 6, 2]).begun == "<|start|>a"
        assert tokenizer.answer_format([6, 2, 7, 3, 8, 2]).begun == "<|start|>a<|channel|>b<|message|>a"
        assert tokenizer.answer_format([2, 3]).begun == tokenizer.answer_format([6, 2], has_grammar=True).begun == ""

    def test_a_prompt_has_begun_a_thought(self) -> None:
        tokenizer = self.thinker()
        assert tokenizer.answer_format([2, 6]).begun == "<think>"
        assert tokenizer.answer_format([6, 2]).begun == tokenizer.answer_format([6], has_grammar=True).begun == ""
        assert tokenizer.answer_format([2]).thinks
