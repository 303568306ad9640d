"""Texts that `suffix` copies from, in C: what `suffix_text.PlainText` does, in a tenth of the time."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Items
from ctypes import CDLL, PyDLL, byref, c_int64
from functools import cache, partial
from struct import Struct, pack
from typing import Self
from weakref import finalize

from foredraft.backends.native.header import CONSTANTS, STRUCTURES
from foredraft.backends.native.library import load_library
from foredraft.proposers.occurrences import MOST_TAKEN_BACK
from foredraft.proposers.suffix_text import Nodes, SuffixOptions, doubt_of

_NOTHING: Nodes = ((), (), ())
_Rules, _Nodes = STRUCTURES["fd_suffix_rules"], STRUCTURES["fd_nodes"]
# What reads so many integers or floats out of memory, faster than ctypes does.
_INTEGERS, _NUMBERS = (
    [Struct(f"{count}{kind}").unpack_from for count in range(CONSTANTS["FD_NODES"] + 1)] for kind in "id"
)


class _Drafting:
    """What the texts of a proposer share: the library, the rules of drafts, and where C leaves a draft."""

    def __init__(self, library: CDLL, options: SuffixOptions) -> None:
        self.library = library
        self.lengths = (c_int64 * len(options.lengths))(*options.lengths)
        self.rules = _Rules(
            options.max_n, options.tree == "chain", options.depth, options.min_score, options.store_doubt
        )
        self.rules.doubts[1:] = [doubt_of(matched) for matched in range(1, len(self.rules.doubts))]
        self.nodes = _Nodes()
        self.arguments = byref(self.rules), byref(self.nodes)


class NativeText:
    """A text whose tokens and n-grams are held by C until nobody holds the text."""

    def __init__(self, drafting: _Drafting) -> None:
        library = drafting.library
        self.start = 0
        self.end = 0
        self._drafting = drafting
        self._text: int | None = library.fd_text_new(drafting.lengths, len(drafting.lengths))
        if self._text is None:
            raise MemoryError("There is no memory for a text to draft from.")
        finalize(self, library.fd_text_free, self._text)

    def __len__(self) -> int:
        return self.sizes()[1]

    def sizes(self) -> tuple[int, int]:
        """How many tokens and n-grams are held, forgotten tokens that were not yet cut off among them."""
        num_tokens, num_grams = c_int64(), c_int64()
        self._drafting.library.fd_text_size(self._text, byref(num_tokens), byref(num_grams))
        return num_tokens.value, num_grams.value

    def follow(self, text: list[int]) -> None:
        tail = max(0, self.end - MOST_TAKEN_BACK)
        if self._replace(tail, text[tail:]):
            self._replace(0, text)  # where some tokens differ, so may earlier ones

    def extend(self, tokens: Items[int]) -> None:
        self._replace(self.end, tokens)

    def forget(self, count: int) -> None:
        if self._drafting.library.fd_text_forget(self._text, count):
            raise ValueError(f"{count} tokens cannot be forgotten of {self.end - self.start}.")
        self.start += count

    def draft(self, store: Self | None, size: int) -> Nodes:
        drafting = self._drafting
        stored = None if store is None else store._text
        count: int = drafting.library.fd_text_draft(self._text, stored, size, *drafting.arguments)
        if not count:
            return _NOTHING
        nodes, integers, numbers = drafting.nodes, _INTEGERS[count], _NUMBERS[count]
        return (
            integers(nodes, _Nodes.tokens.offset),
            integers(nodes, _Nodes.parents.offset),
            numbers(nodes, _Nodes.scores.offset),
        )

    def _replace(self, place: int, tokens: Items[int]) -> int:
        """Have these tokens from a place on; returns how many others stood there."""
        count = len(tokens)
        packed = pack(f"{count}i", *tokens)
        taken_back: int = self._drafting.library.fd_text_replace(self._text, place, packed, count)
        if taken_back < 0:
            raise MemoryError(f"There is no memory for {count} tokens to draft from.")
        self.end = place + count
        return taken_back


def native_texts(options: SuffixOptions) -> Callable[[], NativeText] | None:
    """What makes the texts of a proposer; None where no library was built that this processor can run."""
    library = library_of_texts()
    return None if library is None else partial(NativeText, _Drafting(library, options))


@cache
def library_of_texts() -> CDLL | None:
    """Other threads of Python wait while one of its functions runs. That takes microseconds; to let them run, and then
    to wait for them, may take milliseconds."""
    return load_library(PyDLL)
