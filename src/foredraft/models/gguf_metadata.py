"""The types of the metadata fields of a GGUF file that are read by name. Whoever reads one may rely on its type.

The fields that describe the model's shape (`llama.block_count` and so on) are typed where they are read, by `Fields`.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from foredraft.errors import InvalidModel
from foredraft.models.fields import is_whole, shown

MAX_TOKEN_LENGTH = 512  # characters; vocabularies have tokens of up to 128 or so


def _list_of(is_entry: Callable[[Any], bool]) -> Callable[[Any], bool]:
    """The entries of a GGUF array have one type, so the first one tells it."""
    return lambda value: isinstance(value, list) and all(map(is_entry, value[:1]))


def _is_text(value: object) -> bool:
    return isinstance(value, str)


_KINDS: dict[str, Callable[[Any], bool]] = {
    "a text": _is_text,
    "a whole number": is_whole,
    "true or false": lambda value: isinstance(value, bool),
    "a list of texts": _list_of(_is_text),
    "a list of whole numbers": _list_of(is_whole),
    "a list of numbers": _list_of(lambda value: is_whole(value) or isinstance(value, float)),
}
_TOKEN_IDS = tuple(f"tokenizer.ggml.{name}_token_id" for name in ("bos", "eos", "eot", "eom"))
_FIELDS = {
    "general.architecture": "a text",
    "tokenizer.chat_template": "a text",
    "tokenizer.ggml.model": "a text",
    "tokenizer.ggml.pre": "a text",
    "tokenizer.ggml.tokens": "a list of texts",
    "tokenizer.ggml.merges": "a list of texts",
    "tokenizer.ggml.token_type": "a list of whole numbers",
    "tokenizer.ggml.scores": "a list of numbers",
    "tokenizer.ggml.add_bos_token": "true or false",
    "tokenizer.ggml.add_eos_token": "true or false",
    "tokenizer.ggml.add_space_prefix": "true or false",
    "tokenizer.ggml.unknown_token_id": "a whole number",
    "tokenizer.ggml.padding_token_id": "a whole number",
    **dict.fromkeys(_TOKEN_IDS, "a whole number"),
}


def check_metadata(path: Path, metadata: dict[str, Any]) -> None:
    """Raise InvalidModel for a field of the wrong type, or one that does not fit the vocabulary."""

    def error(key: str, problem: str) -> InvalidModel:
        return InvalidModel(f"{path}: metadata field {key} {problem}; download or convert the model again.")

    for key, kind in _FIELDS.items():
        if key in metadata and not _KINDS[kind](metadata[key]):
            raise error(key, f"is {shown(metadata[key])}, but {kind} is needed")
    tokens = metadata.get("tokenizer.ggml.tokens")
    if tokens is None:
        return
    longest = max(map(len, tokens), default=0)
    if longest > MAX_TOKEN_LENGTH:
        raise error("tokenizer.ggml.tokens", f"has a token of {longest} characters, above {MAX_TOKEN_LENGTH}")
    for key in ("tokenizer.ggml.token_type", "tokenizer.ggml.scores"):
        if len(metadata.get(key, tokens)) != len(tokens):
            raise error(key, f"has {len(metadata[key])} entries for {len(tokens)} tokens")
    for key in _TOKEN_IDS:
        if key in metadata and not 0 <= metadata[key] < len(tokens):
            raise error(key, f"is {metadata[key]}, but there are {len(tokens)} tokens")
