"""Vocabularies for golden ids: small ones made for the purpose, and what a real one needs for the generated texts."""

from __future__ import annotations

import json
import unicodedata
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from tokenizers import Tokenizer, models, pre_tokenizers, trainers

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
Metadata = dict[str, Any]


def metadata_of(vocabulary: Metadata) -> Metadata:
    """GGUF metadata from its compact form, in which only the tokens in use are listed."""
    compact = dict(vocabulary)
    size, used, marked = compact.pop("num_tokens"), compact.pop("tokens"), compact.pop("token_types")
    tokens = [f"[unused {index}]" for index in range(size)]
    types = [UNUSED] * size
    for token, index in used.items():
        tokens[index], types[index] = token, marked.get(token, NORMAL)
    return {**compact, "tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": types}


def reduced(metadata: Metadata, texts: Iterable[str]) -> Metadata:
    """The compact form of a byte-level vocabulary with all that matters for these texts: bytes, marked tokens, and
    every token that is a part of one of the texts."""
    tokens, types = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.token_type"]
    longest = max(map(len, tokens))
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    parts = set(pre_tokenizers.ByteLevel.alphabet())
    for text in texts:
        for written, _ in byte_level.pre_tokenize_str(text):
            for start in range(len(written)):
                parts.update(written[start:end] for end in range(start + 1, min(start + longest, len(written)) + 1))
    marked = {token: kind for token, kind in zip(tokens, types, strict=True) if kind not in (NORMAL, UNUSED)}
    used = {token: index for index, token in enumerate(tokens) if token in parts or token in marked}
    scalars = {key: value for key, value in metadata.items() if _describes_tokenizer(key, value)}
    merges = [merge for merge in metadata["tokenizer.ggml.merges"] if merge.replace(" ", "", 1) in used]
    return {
        **scalars,
        "num_tokens": len(tokens),
        "tokens": used,
        "token_types": marked,
        "tokenizer.ggml.merges": merges,
    }


def _describes_tokenizer(key: str, value: Any) -> bool:
    return key.startswith("tokenizer.ggml.") and isinstance(value, str | int | float)


def small_byte_level(texts: Sequence[str]) -> Metadata:
    """A vocabulary whose merges ignore all borders between words, so that every cut shows in the ids. Some words are
    tokens that no merge makes: they show whether words are looked up whole."""
    trained = _trained(texts, 1500, pre_tokenizers.ByteLevel.alphabet())
    vocab, merges = trained["vocab"], trained["merges"]
    words = {word for text in texts for word, _ in pre_tokenizers.ByteLevel(False).pre_tokenize_str(text)}
    whole = sorted(word for word in words if word not in vocab and 2 < len(word) < 12)[::8]
    tokens = ["<s>", "</s>", "<|im_end|>", "<tool_call>", *vocab, *whole]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 1,
        "num_tokens": len(tokens),
        "tokens": {token: index for index, token in enumerate(tokens)},
        "token_types": {"<s>": CONTROL, "</s>": CONTROL, "<|im_end|>": CONTROL, "<tool_call>": USER_DEFINED},
        "tokenizer.ggml.merges": [" ".join(pair) for pair in merges],
    }


def small_sentencepiece(texts: Sequence[str]) -> Metadata:
    """A SentencePiece vocabulary: pieces across all borders, and bytes for rare characters."""
    marked = {"<unk>": UNKNOWN, "<s>": CONTROL, "</s>": CONTROL}
    marked |= {f"<0x{byte:02X}>": BYTE for byte in range(256)}
    marked |= {"<|endoftext|>": CONTROL, "<|user|>": CONTROL, "<|end|>": CONTROL, "<tool_call>": USER_DEFINED}
    stretches = [text.replace(" ", "▁").replace("\0", "") for text in texts]  # llama.cpp reads tokens as C strings
    counts = Counter("".join(stretches))
    alphabet = sorted(counts, key=lambda character: (-counts[character], character))[:120]
    pieces = _trained(stretches, 1000, alphabet, limit_alphabet=len(alphabet))["vocab"]
    tokens = [*marked, *(piece for piece in pieces if piece not in marked)]
    return {
        "tokenizer.ggml.model": "llama",
        "num_tokens": len(tokens),
        "tokens": {token: index for index, token in enumerate(tokens)},
        "token_types": marked,
        "tokenizer.ggml.scores": [float(len(marked) - index) for index in range(len(tokens))],
    }


def _trained(texts: Sequence[str], size: int, alphabet: list[str], **options: Any) -> dict[str, Any]:
    """Vocabulary (in the order of ids) and merges of a BPE that sees each text as one word."""
    tokenizer = Tokenizer(models.BPE())
    if len(alphabet) == 256:
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    trainer = trainers.BpeTrainer(vocab_size=size, initial_alphabet=alphabet, show_progress=False, **options)
    tokenizer.train_from_iterator(texts, trainer)
    model = json.loads(tokenizer.to_str())["model"]
    return {"vocab": sorted(model["vocab"], key=model["vocab"].__getitem__), "merges": model["merges"]}


def llama_cpp_is_exact(kind: str, text: str) -> bool:
    """Whether llama.cpp's rule for such a text is the model's own, and not an approximation of it."""
    if kind in ("tekken", "gpt-4o"):  # llama.cpp knows upper and lower case of ASCII only, and cuts before accents
        return not any(_is_cased_or_mark(character) for character in text if character > "\x7f")
    if kind == "phi3":  # llama.cpp's control tokens swallow the spaces of ASCII only
        return not any(character.isspace() for character in text if character > "\x7f")
    return True


def _is_cased_or_mark(character: str) -> bool:
    return unicodedata.category(character) in ("Lu", "Ll", "Lt", "Mn", "Mc", "Me")
