"""The prompts that training text answers: files of them, less whatever an evaluation asks."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from foredraft.reports.prompts import read_turns

_BETWEEN_WORDS = re.compile(r"[\W_]+")
_PIECE_WORDS = 13  # so many words in a row are no coincidence
_SHORTEST = 12  # characters of an invented prompt that can mean something


def read_prompts(files: Iterable[Path]) -> list[str]:
    """The prompts of all files, one JSON object a line; of several turns the first. No prompt comes twice."""
    return list(dict.fromkeys(turns[0] for file in files for turns in read_turns(file)))


class Excluded:
    """Texts of evaluations. A prompt is excluded if it is one of them, or holds one, or is part of one: case, spaces
    and punctuation do not count."""

    def __init__(self, files: Iterable[Path] = ()) -> None:
        self._texts = {normalised(turn) for file in files for turns in read_turns(file) for turn in turns}
        self._pieces = {piece for text in self._texts for piece in _pieces(text)}

    def __contains__(self, prompt: str) -> bool:
        text = normalised(prompt)
        return text in self._texts or not self._pieces.isdisjoint(_pieces(text))


def normalised(text: str) -> str:
    """Words in lower case, parted by one space."""
    return _BETWEEN_WORDS.sub(" ", text.lower()).strip()


def usable_inventions(texts: Sequence[str], excluded: Excluded) -> list[str]:
    """The invented prompts that read like one: long enough, complete, different, and in no evaluation."""
    usable: dict[str, str] = {}
    for text in map(str.strip, texts):
        if len(text) >= _SHORTEST and "\N{REPLACEMENT CHARACTER}" not in text and text not in excluded:
            usable.setdefault(normalised(text), text)
    usable.pop("", None)
    return list(usable.values())


def _pieces(text: str) -> Iterator[tuple[str, ...]]:
    words = text.split()
    return zip(*(words[offset:] for offset in range(_PIECE_WORDS)))
