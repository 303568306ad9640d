"""GBNF, the grammars of llama.cpp, as a syntax tree."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import NoReturn

from foredraft.errors import InvalidParameter

LAST_CHARACTER = 0x10FFFF
_SURROGATES = (0xD800, 0xDFFF)
_MOST_NESTED = 100  # brackets
_TOKEN = re.compile(
    r"""(?:\s|\#[^\n]*)+ | (?P<text>"(?:[^"\\\n]|\\.)*") | (?P<chars>\[\^?(?:[^\]\\\n]|\\.)*\]) | (?P<is>::=)
    | (?P<name>[A-Za-z0-9_-]+) | (?P<bounds>\{\s*\d{1,6}\s*(?:,\s*(?:\d{1,6})?\s*)?\}) | (?P<mark>[()|*+?.])""",
    re.VERBOSE,
)
_CHARACTER = re.compile(r"\\x([0-9A-Fa-f]{2})|\\u([0-9A-Fa-f]{4})|\\U([0-9A-Fa-f]{8})|\\(.)|(.)", re.DOTALL)
_ESCAPED = {"n": "\n", "r": "\r", "t": "\t"}

Ranges = tuple[tuple[int, int], ...]  # of code points, both ends included, in order


@dataclass(frozen=True, eq=False)
class Chars:
    """One character out of these."""

    ranges: Ranges


@dataclass(frozen=True, eq=False)
class Joined:
    """All items, one behind the other."""

    items: tuple[Node, ...]


@dataclass(frozen=True, eq=False)
class Either:
    """One of the items."""

    items: tuple[Node, ...]


@dataclass(frozen=True, eq=False)
class Repeated:
    item: Node
    least: int
    most: int | None


@dataclass(frozen=True, eq=False)
class Rule:
    """A rule, by its name."""

    name: str


Node = Chars | Joined | Either | Repeated | Rule


def parse(text: str) -> dict[str, Node]:
    """The rules by name, `root` among them; raises InvalidParameter."""
    rules = _Reader(text).rules()
    if "root" not in rules:
        _refuse("it has no rule root")
    return rules


def _refuse(reason: str) -> NoReturn:
    raise InvalidParameter(f"grammar cannot be used: {reason}.")


class _Reader:
    def __init__(self, text: str) -> None:
        self._tokens: list[tuple[str, str]] = []  # kind and text
        self._place = 0
        self._depth = 0
        self._named: set[str] = set()  # by other rules
        place = 0
        while place < len(text):
            found = _TOKEN.match(text, place)
            if found is None:
                line = text.count("\n", 0, place) + 1
                _refuse(f"line {line} of the GBNF cannot be read at {text[place : place + 20]!r}")
            if found.lastgroup is not None:
                self._tokens.append((found.lastgroup, found[0]))
            place = found.end()

    def rules(self) -> dict[str, Node]:
        rules: dict[str, Node] = {}
        while self._place < len(self._tokens):
            if not self._begins_rule():
                _refuse(f"{self._tokens[self._place][1][:20]!r} stands where a rule should begin, as in name ::= ...")
            name = self._tokens[self._place][1]
            self._place += 2
            rules[name] = self._either()
        if missing := sorted(self._named - rules.keys()):
            _refuse(f"the rule {missing[0][:40]!r} is not defined")
        return rules

    def _begins_rule(self) -> bool:
        return [kind for kind, _ in self._tokens[self._place : self._place + 2]] == ["name", "is"]

    def _either(self) -> Node:
        branches = [self._joined()]
        while self._tokens[self._place : self._place + 1] == [("mark", "|")]:
            self._place += 1
            branches.append(self._joined())
        return branches[0] if len(branches) == 1 else Either(tuple(branches))

    def _joined(self) -> Node:
        items: list[Node] = []
        while self._place < len(self._tokens) and not self._begins_rule():
            kind, text = self._tokens[self._place]
            if text in ("|", ")") and kind == "mark":
                break
            self._place += 1
            if kind == "bounds" or (kind == "mark" and text in "*+?"):
                if not items:
                    _refuse(f"{text!r} has nothing in front of it")
                items.append(Repeated(items.pop(), *_bounds(text)))
            else:
                items.append(self._item(kind, text))
        return items[0] if len(items) == 1 else Joined(tuple(items))

    def _item(self, kind: str, text: str) -> Node:
        if kind == "text":
            codes = _codes(text[1:-1])
            return Joined(tuple(Chars(((code, code),)) for code in codes))
        if kind == "chars":
            return Chars(_class(text[1:-1]))
        if kind == "name":
            self._named.add(text)
            return Rule(text)
        if text == ".":
            return Chars(_without(()))
        if text != "(":
            _refuse(f"{text[:20]!r} stands where a text, a class or a rule should be")
        self._depth += 1
        if self._depth > _MOST_NESTED:
            _refuse(f"more than {_MOST_NESTED} brackets are open at once")
        inner = self._either()
        if self._tokens[self._place : self._place + 1] != [("mark", ")")]:
            _refuse("a bracket is not closed")
        self._place += 1
        self._depth -= 1
        return inner


def _bounds(text: str) -> tuple[int, int | None]:
    if text in "*+?":
        return {"*": (0, None), "+": (1, None), "?": (0, 1)}[text]
    least, comma, most = text.strip("{}").partition(",")
    if not comma:
        return int(least), int(least)
    return int(least), int(most) if most.strip() else None


def _codes(text: str) -> list[int]:
    codes = []
    for byte, short, long, escaped, plain in _CHARACTER.findall(text):
        digits = byte or short or long
        codes.append(int(digits, 16) if digits else ord(_ESCAPED.get(escaped, escaped) or plain))
    if any(code > LAST_CHARACTER for code in codes):
        _refuse("it has an escape of a character that there is not")
    return codes


def _class(text: str) -> Ranges:
    """What stands between square brackets. A `-` that is not escaped and has neighbours makes a range."""
    is_negated = text.startswith("^")
    parts = [found[0] for found in _CHARACTER.finditer(text[is_negated:])]
    codes = [_codes(part)[0] for part in parts]
    ranges, place = [], 0
    while place < len(parts):
        end = place + 2 if place + 2 < len(parts) and parts[place + 1] == "-" else place
        if codes[end] < codes[place]:
            _refuse(f"the class [{text[:40]}] has a range whose end comes first")
        ranges.append((codes[place], codes[end]))
        place = end + 1
    return _without(tuple(ranges)) if is_negated else _merged(ranges)


def _merged(ranges: list[tuple[int, int]]) -> Ranges:
    merged: list[tuple[int, int]] = []
    for low, high in sorted(ranges):
        if merged and low <= merged[-1][1] + 1:
            merged[-1] = merged[-1][0], max(high, merged[-1][1])
        else:
            merged.append((low, high))
    return tuple(merged)


def _without(ranges: Ranges) -> Ranges:
    """All characters but these."""
    kept, low = [], 0
    for first, last in _merged([*ranges, _SURROGATES]):
        if low < first:
            kept.append((low, first - 1))
        low = last + 1
    return (*kept, (low, LAST_CHARACTER)) if low <= LAST_CHARACTER else tuple(kept)
