"""What a tokenizer's file may make of a text. The `tokenizers` library ends the process when memory is short, so the
length of what it makes is limited before it begins.

Growth is counted in bytes: how many times as long a step makes a text at most, whatever the text is.
"""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from foredraft.errors import ForedraftError, InvalidModel

if TYPE_CHECKING:
    import tokenizers

MAX_BYTES = 1 << 27  # that a text may have on its way: the library keeps some 20 bytes for each
_MAX_READ_GROWTH = 1 << 14  # three times that of the longest chain of normalizers that models have
_MAX_WRITE_GROWTH = 16  # the decoders of models make texts no longer
_MAX_PIECES = 64  # of a template that adds special tokens
_REMEDY = "use the tokenizer that belongs to the model"
_STEPS = ("normalizers", "pretokenizers", "decoders")  # of a Sequence
_GROWTH = {
    **{"NFC": 3, "NFD": 3, "NFKC": 11, "NFKD": 11},  # as Unicode says
    **{"Lowercase": 2, "BertNormalizer": 2 * 3 * 2},  # a few letters; spaces around ideographs, accents, letters
    **{"BPEDecoder": 2, "WordPiece": 2, "CTC": 2},  # spaces
}


def check_tokenizer_file(file: Path, raw: Mapping[str, Any]) -> None:
    """Raise InvalidModel for a tokenizer.json that may make a text very much longer. Reading it normalises the tokens
    that are added to the vocabulary, so this comes first."""
    try:
        read = growth(raw.get("normalizer"), raw.get("pre_tokenizer")) * _copies(raw.get("post_processor"))
        write = growth(raw.get("decoder"))
    except RecursionError as error:
        raise InvalidModel(f"{file}: its steps are nested too deeply; {_REMEDY}.") from error
    for what, found, most in (("read", read, _MAX_READ_GROWTH), ("write", write, _MAX_WRITE_GROWTH)):
        if found > most:
            raise InvalidModel(
                f"{file}: the steps that {what} a text may make it {found:g} times as long, but {most} times is "
                f"supported; {_REMEDY}."
            )
    added = sum(_length(token.get("content")) for token in _list(raw.get("added_tokens")) if isinstance(token, dict))
    if added * read > MAX_BYTES:
        raise InvalidModel(f"{file}: the added tokens have {added} bytes, which is too much; {_REMEDY}.")


def max_prompt_bytes(backend: tokenizers.Tokenizer) -> int:
    """The longest text that the tokenizer is given."""
    parts = (backend.normalizer, backend.pre_tokenizer, backend.post_processor)
    normalizer, pre_tokenizer, processor = (None if part is None else json.loads(part.__getstate__()) for part in parts)
    return int(MAX_BYTES / (growth(normalizer, pre_tokenizer) * _copies(processor)))


def growth(*steps: Any) -> float:
    """Of steps one after the other, as tokenizer.json describes them."""
    return math.prod((_growth(step) for step in steps if step is not None), start=1.0)


def _growth(step: Any) -> float:
    """Fields of other types than they should have are left to the library, which refuses them."""
    kind = step.get("type") if isinstance(step, dict) else None
    if kind is None:
        return math.inf  # the library takes some of these for what they look like
    if kind == "Sequence":
        return growth(*(each for name in _STEPS for each in _list(step.get(name))))
    if kind == "Replace":
        return _replaced(step.get("pattern"), _length(step.get("content")))
    if kind == "Prepend":
        return 1 + _length(step.get("prepend"))
    if kind == "Precompiled":
        return _precompiled(step.get("precompiled_charsmap"))
    if kind == "Metaspace":  # for spaces, and before every piece
        return max(1, _length(step.get("replacement"))) * 2
    if kind == "ByteLevel":  # a byte becomes a letter, and a space may come before every piece
        return 2 * (2 if step.get("add_prefix_space") else 1)
    return _GROWTH.get(str(kind), 1)


def _copies(processor: Any) -> float:
    """How often the ids of a text are repeated by the processor, which also puts special tokens around them."""
    if not isinstance(processor, dict):
        return 1.0
    pieces, special = _list(processor.get("single")), processor.get("special_tokens")
    tokens = special.values() if isinstance(special, dict) else ()
    ids = [_list(token.get("ids")) for token in tokens if isinstance(token, dict)]
    if max(map(len, (pieces, *ids))) > _MAX_PIECES:
        return math.inf
    texts = sum(not isinstance(piece, dict) or "SpecialToken" not in piece for piece in pieces)
    return math.prod(map(_copies, _list(processor.get("processors"))), start=float(max(1, texts)))


def _replaced(pattern: Any, content: int) -> float:
    string = _length(pattern.get("String")) if isinstance(pattern, dict) else 0
    return max(1.0, content / string) if string else 1.0 + content  # an expression may match between any two letters


def _precompiled(charsmap: Any) -> float:
    """The longest replacement. Four bytes give the length of the search tree behind them; then come replacements."""
    try:
        data = base64.b64decode(charsmap)
    except (TypeError, ValueError):
        return math.inf
    replacements = data[4 + int.from_bytes(data[:4], "little") :]
    return float(max(map(len, replacements.split(b"\0")), default=1) or 1)


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _length(text: Any) -> int:
    return len(text.encode("utf-8", "surrogatepass")) if isinstance(text, str) else 0


def raise_as(kind: type[ForedraftError], what: str, remedy: str, error: BaseException) -> NoReturn:
    """Raise what the library raised as an error of this kind. Its panics are BaseExceptions, as KeyboardInterrupt is,
    which stays what it is."""
    if not isinstance(error, Exception) and type(error).__module__ != "pyo3_runtime":
        raise error
    problem = " ".join(str(error).split())[:300] or type(error).__name__
    raise kind(f"{what} ({problem}); {remedy}.") from error
