"""How few tokens a text can have: one that cannot fit into a context needs no tokenising."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    import tokenizers

_COMPOSED = 4  # the most characters that Unicode normalisation composes to one
_FORMS = frozenset({"NFC", "NFD", "NFKC", "NFKD"})
_KEEPING = frozenset({"ByteLevel", "Digits", "Metaspace"})  # pre-tokenizers that drop nothing
_FALLBACK = {f"<0x{byte:02X}>" for byte in range(256)}
_ROUNDED_DOWN = 1 - 1e-9  # sums of floats must not count a token too many
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
        is_byte_level = any(part["type"] == "ByteLevel" for part in pre_tokenizers)
        if is_byte_level:
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
        is_composed = any(part["type"] in _FORMS for part in normalizers)
        # Characters that can become one token.
        self._longest = (_COMPOSED if is_composed else 1) * max(map(len, vocabulary), default=1)
        self._dropped = [chr(byte) for byte in missing & _CONTROLS]
        self._counts_bytes = is_byte_level and not is_composed
        self._backend, self._byte_level = backend, byte_level

    @cached_property
    def _shares(self) -> NDArray[np.float64]:
        """The share that every byte has of a token at least: one by the length of the longest token with this byte.
        The shares of the bytes of a token add up to one at most. Bytes that no token has are dropped, and count for
        nothing."""
        longest = [0] * 256
        for token in self._backend.get_vocab(with_added_tokens=True):
            try:
                own = [self._byte_level[character] for character in token]
            except KeyError:  # added as plain text
                own = list(token.encode("utf-8", "surrogatepass"))
            for byte in own:
                longest[byte] = max(longest[byte], len(own))
        return np.array([1 / length if length else 0.0 for length in longest])

    def count(self, text: str) -> int:
        if not self._is_bounded:
            return 0
        if self._counts_bytes:
            found = np.bincount(np.frombuffer(text.encode("utf-8", "surrogatepass"), np.uint8), minlength=256)
            return int(found @ self._shares * _ROUNDED_DOWN)
        kept = len(text) - sum(map(text.count, self._dropped))
        return -(-kept // self._longest)


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
