"""Fails on retired words in code and documentation: one thing has one name, and it is the name that readers know.

Identifiers are read with `tokenize` and split at underscores and capitals. Prose is what people read: comments,
docstrings and other strings, Markdown, and the comments of C files. A line that needs a retired word carries the mark
`words: allow` in a comment.

    python tools/words.py [FILE_OR_FOLDER …]
"""

from __future__ import annotations

import io
import keyword
import re
import sys
import tokenize
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
SCOPE = ("src", "docs", "benchmarks", "README.md")
SUFFIXES = (".py", ".md", ".c", ".h")
ALLOWED = "words: allow"

# Parts of identifiers, in lower case, and what to write instead.
IDENTIFIERS = {
    **dict.fromkeys(("guess", "guesses", "guessed", "guesser", "guessing"), "draft, propose, proposer"),
    "said": "target_argmax",
    "waking": "catch_up",
    "asking": "query",
    "settled": "stable",
    **dict.fromkeys(("law", "laws"), "distribution"),
    **dict.fromkeys(("belief", "beliefs", "believed"), "confidence, probability"),
    **dict.fromkeys(("wrote", "accounts"), "computed tokens"),
    "unread": "catch_up",
}
# Whole identifiers, because as parts they are ordinary (`__enter__`).
WHOLE_IDENTIFIERS = {"enter": "register", "retire": "finish", "ways": "branches"}

# Prose, ignoring case. Ordinary English is not meant: "everybody said so" passes.
PROSE = {
    r"guess\w*": "draft, draft token, propose",
    r"laws?": "distribution",
    r"beliefs?|believed": "confidence, probability",
    r"asking": "query, propose",
    r"waking|unread": "catch up, catch-up tokens",
    r"settled": "stable",
    r"ways on|ways to go on": "branches, paths",
    r"(target|model) (has |had )?said": "target argmax",
    r"proposers? (is|are|was|were) (not |never )?asked|asked? (a|the|all|every|its) proposers?": "query",
    r"what it takes": "cost, time",
}
ORDINARY = re.compile(
    r"Moore's law|law of large numbers|waking (a thread|another|torch's other threads)", re.IGNORECASE
)

_PROSE = [(re.compile(rf"\b(?:{pattern})\b", re.IGNORECASE), instead) for pattern, instead in PROSE.items()]
_PARTS = re.compile(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])")
_C_COMMENT = re.compile(r"/\*.*?\*/|//[^\n]*", re.DOTALL)


@dataclass(frozen=True)
class Finding:
    """A retired word, where it is, and what to write instead."""

    file: Path
    line: int
    word: str
    instead: str

    def __str__(self) -> str:
        return f'{self.file}:{self.line}: "{self.word}" is retired; write {self.instead}'


def check(files: Iterable[Path]) -> list[Finding]:
    return [finding for file in files for finding in check_file(file)]


def check_file(file: Path) -> Iterator[Finding]:
    text = file.read_text(encoding="utf-8")
    lines = text.split("\n")  # as findings count them: `splitlines` also parts lines at form feeds and the like
    for line, word, instead in sorted(_found(file.suffix, text)):
        if ALLOWED not in lines[line - 1]:
            yield Finding(file, line, word, instead)


def _found(suffix: str, text: str) -> Iterator[tuple[int, str, str]]:
    if suffix == ".py":
        yield from _in_python(text)
    elif suffix in (".c", ".h"):
        for comment in _C_COMMENT.finditer(text):
            yield from _in_prose(comment.group(), 1 + text.count("\n", 0, comment.start()))
    else:
        yield from _in_prose(text, 1)


def _in_python(text: str) -> Iterator[tuple[int, str, str]]:
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        kind = tokenize.tok_name[token.type]
        if kind == "NAME" and not keyword.iskeyword(token.string):
            yield from ((token.start[0], word, instead) for word, instead in _in_identifier(token.string))
        elif kind in ("COMMENT", "STRING", "FSTRING_MIDDLE"):
            yield from _in_prose(token.string, token.start[0])


def _in_identifier(name: str) -> Iterator[tuple[str, str]]:
    if name in WHOLE_IDENTIFIERS:
        yield name, WHOLE_IDENTIFIERS[name]
    for part in _PARTS.findall(name):
        if part.lower() in IDENTIFIERS:
            yield name, IDENTIFIERS[part.lower()]


def _in_prose(text: str, first_line: int) -> Iterator[tuple[int, str, str]]:
    """Words may be parted by a line break; a finding is told at the line where it begins."""
    plain = ORDINARY.sub(lambda ordinary: " " * len(ordinary.group()), text)
    flat = re.sub(r"\s", " ", plain)
    for pattern, instead in _PROSE:
        for match in pattern.finditer(flat):
            yield first_line + text.count("\n", 0, match.start()), match.group(), instead


def files_in(places: Iterable[Path]) -> Iterator[Path]:
    for place in places:
        found = sorted(place.rglob("*")) if place.is_dir() else [place]
        yield from (file for file in found if file.suffix in SUFFIXES and file.is_file())


def main() -> None:
    places = [Path(argument) for argument in sys.argv[1:]] or [ROOT / name for name in SCOPE]
    findings = check(files_in(places))
    for finding in findings:
        print(finding)
    sys.exit(bool(findings))


if __name__ == "__main__":
    main()
