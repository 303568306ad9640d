"""How few tokens a text can have: one that cannot fit into a context needs no tokenising."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import tokenizers

_COMPOSED = 4  # characters at most that Unicode normalisation composes to one
_FORMS = frozenset({"NFC", "NFD", "NFKC", "NFKD"})
_KEEPING = frozenset({"ByteLevel", "Digits", "Metaspace"})  # pre-tokenizers that drop nothing
_FALLBACK = {f"<0x{byte:02X}>" for byte in range(256)}
_CONTROLS = frozenset({*range(0x20), 0x7F})


class LeastTokens:
    """`count(text)` is never more than the tokens of the text; 0 where a part of the tokenizer may drop characters or
    join any number of them. `vocabulary` has the added tokens too, and `byte_level` the bytes by the characters that
    stand for them in tokens."""

    def __init__(
        self, backend: tokenizers.Tokenizer, vocabulary: dict[str, int], byte_level: Mapping[str, int]
    ) -> None:
        normalizers, pre_tokenizers = list(_parts(backend.normalizer)), list(_parts(backend.pre_tokenizer))
        missing: set[int] = set()
        if any(part["type"] == "ByteLevel" for part in pre_tokenizers):
            missing = {byte for character, byte in byte_level.items() if character not in vocabulary}
            # Every character beyond ASCII has a byte below 0xC0, which is in the vocabulary.
            knows_all = not any(byte < 0xC0 and byte not in _CONTROLS for byte in missing)
        else:
            knows_all = bool(getattr(backend.model, "byte_fallback", False)) and vocabulary.keys() >= _FALLBACK
        self._is_bounded = (
            knows_all
            and all(map(_keeps_characters, normalizers))
            and all(map(_keeps_text, pre_tokenizers))
            and not any(token.lstrip or token.rstrip for token in backend.get_added_tokens_decoder().values())
        )
        composed = _COMPOSED if any(part["type"] in _FORMS for part in normalizers) else 1
        self._longest = composed * max(map(len, vocabulary), default=1)  # characters that can become one token
        self._dropped = [chr(byte) for byte in missing & _CONTROLS]

    def count(self, text: str) -> int:
        kept = len(text) - sum(map(text.count, self._dropped))
        return -(-kept // self._longest) if self._is_bounded else 0


def _parts(component: Any) -> Iterator[dict[str, Any]]:
    """A normalizer or pre-tokenizer as the library saves it, without sequences."""
    waiting = [] if component is None else [json.loads(component.__getstate__())]
    while waiting:
        part = waiting.pop()
        if part["type"] == "Sequence":
            waiting += part.get("normalizers") or part.get("pretokenizers") or ()
        else:
            yield part


def _keeps_characters(normalizer: dict[str, Any]) -> bool:
    """Whether it leaves at least one character for every one, but for those that are composed."""
    if normalizer["type"] == "Replace":
        return len(normalizer["pattern"].get("String", "")) == 1 and bool(normalizer["content"])
    return normalizer["type"] in _FORMS or normalizer["type"] == "Prepend"


def _keeps_text(pre_tokenizer: dict[str, Any]) -> bool:
    is_cut = pre_tokenizer["type"] in ("Split", "Punctuation") and pre_tokenizer["behavior"] != "Removed"
    return is_cut or pre_tokenizer["type"] in _KEEPING
