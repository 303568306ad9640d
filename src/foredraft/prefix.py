"""Names of token prefixes: equal names mean equal tokens from the first one on, under equal salts.

A name is a hash over the name before it and the tokens of one more block, so a chain of names costs one hash a block.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterable

_DIGEST_BYTES = 16  # enough that nobody can make two prefixes collide and see another request's tokens


def root_name(*salts: str) -> bytes:
    """The name of the empty prefix. Prefixes under different salts never share a name.

    A salt may hold lone surrogates: JSON can write them, and plain UTF-8 cannot.
    """
    joined = "".join(f"{len(salt)}:{salt}" for salt in salts)
    return hashlib.blake2b(joined.encode("utf-8", "surrogatepass"), digest_size=_DIGEST_BYTES).digest()


def extended_name(name: bytes, tokens: Iterable[int]) -> bytes:
    """The name of a prefix that is longer by `tokens`."""
    return hashlib.blake2b(name + array("q", tokens).tobytes(), digest_size=_DIGEST_BYTES).digest()
