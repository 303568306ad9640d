"""GBNF as Lark, which the parser reads: rules over lexemes.

The parser's lexer takes the longest match, and GBNF knows no lexer: `[a-z]* "end"` fits "the end". So what is regular
becomes one lexeme only where the longest match is the right one. Wherever a lexeme could go on with a character that
may also follow it, or follow another lexeme that it begins with, it is split into its parts, at last into single
characters: these are always right, and slow.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NoReturn

from foredraft.errors import InvalidParameter
from foredraft.sampling.gbnf import Chars, Either, Joined, Node, Ranges, Repeated, Rule, parse

_MOST_RULES = 512
_MOST_POSITIONS = 4000  # characters of all lexemes, repetitions counted as often as they are written out
_MOST_PAIRS = 200_000  # of positions that one text may reach
_MOST_LENGTH = 262_144  # characters of the grammar that is made


def to_lark(text: str) -> str:
    """Raises InvalidParameter for a text that is no GBNF, or too large."""
    try:
        return _Translation(parse(text)).lark()
    except RecursionError:
        _too_large()


@dataclass
class _Lexemes:
    """The positions of all lexemes, as Glushkov numbers the characters of regular expressions."""

    masks: list[int] = field(default_factory=list)  # which characters a position takes
    owners: list[Node] = field(default_factory=list)  # the lexeme of a position
    follow: list[set[int]] = field(default_factory=list)  # the positions that may come next within the lexeme


_Part = tuple[bool, frozenset[int], frozenset[int]]  # of a lexeme: may be empty; its first and its last positions
_EMPTY: _Part = (True, frozenset(), frozenset())


class _Translation:
    def __init__(self, rules: dict[str, Node]) -> None:
        self._rules = rules
        self._split: set[Node] = set()  # regular nodes that are no lexemes
        if len(rules) > _MOST_RULES:
            _too_large()
        regular = _regular_rules(rules)
        self._regular = {node for rule in rules.values() for node in _nodes(rule) if _names(node) <= regular}
        edges = sorted({edge for each in self._all_chars() for low, high in each.ranges for edge in (low, high + 1)})
        self._edges = edges  # between two of them all characters are alike

    def lark(self) -> str:
        while conflict := self._conflict():
            self._split |= conflict
        return self._written()

    def _resolved(self, node: Node) -> Node:
        """Equal lexemes are one: a rule's name stands for what it is."""
        while isinstance(node, Rule):
            node = self._rules[node.name]
        return node

    def _is_lexeme(self, node: Node) -> bool:
        return node in self._regular and self._resolved(node) not in self._split

    def _all_chars(self) -> Iterable[Chars]:
        for rule in self._rules.values():
            yield from (node for node in _nodes(rule) if isinstance(node, Chars))

    def _mask(self, ranges: Ranges) -> int:
        mask = 0
        for low, high in ranges:
            first, last = bisect_left(self._edges, low), bisect_left(self._edges, high + 1)
            mask |= (1 << last) - (1 << first)
        return mask

    def _conflict(self) -> set[Node]:
        """Lexemes that are to be split."""
        lexemes, parts = _Lexemes(), dict[Node, _Part]()
        for node in self._reached_lexemes():
            parts[node] = self._part(node, node, lexemes)
        followers = self._followers(parts, lexemes)
        firsts = [position for part in parts.values() for position in part[1]]
        lasts = {position for part in parts.values() for position in part[2]}
        masks, found = lexemes.masks, set[Node]()
        pairs = {(one, other) for one in firsts for other in firsts if masks[one] & masks[other]}
        waiting = list(pairs)
        while waiting:  # two positions that the same text reaches
            one, other = waiting.pop()
            if one in lasts:
                longer = 0
                for position in lexemes.follow[other]:
                    longer |= masks[position]
                if longer & followers[lexemes.owners[one]]:
                    found.add(lexemes.owners[other])
            for step in lexemes.follow[one]:
                for along in lexemes.follow[other]:
                    if masks[step] & masks[along] and (step, along) not in pairs:
                        pairs.add((step, along))
                        waiting.append((step, along))
            if len(pairs) > _MOST_PAIRS:
                _too_large()
        return found

    def _reached_lexemes(self) -> list[Node]:
        found, seen = dict[Node, None](), {"root"}
        waiting: list[Node] = [self._rules["root"]]
        while waiting:
            node = waiting.pop()
            if self._is_lexeme(node):
                found[self._resolved(node)] = None
            elif isinstance(node, Rule):
                if node.name not in seen:
                    seen.add(node.name)
                    waiting.append(self._rules[node.name])
            else:
                waiting += _children(node)
        return list(found)

    def _part(self, node: Node, owner: Node, lexemes: _Lexemes) -> _Part:
        if isinstance(node, Rule):
            return self._part(self._rules[node.name], owner, lexemes)
        if isinstance(node, Chars):
            if len(lexemes.masks) >= _MOST_POSITIONS:
                _too_large()
            lexemes.masks.append(self._mask(node.ranges))
            lexemes.owners.append(owner)
            lexemes.follow.append(set())
            place = frozenset({len(lexemes.masks) - 1})
            return False, place, place
        if isinstance(node, Either):
            parts = [self._part(item, owner, lexemes) for item in node.items]
            first = frozenset(position for part in parts for position in part[1])
            last = frozenset(position for part in parts for position in part[2])
            return any(part[0] for part in parts), first, last
        part = _EMPTY
        if isinstance(node, Joined):
            for item in node.items:
                part = _join(part, self._part(item, owner, lexemes), lexemes)
            return part
        if not self._part(node.item, owner, lexemes)[1]:
            return _EMPTY  # however often
        for _ in range(node.least):
            part = _join(part, self._part(node.item, owner, lexemes), lexemes)
        if node.most is None:
            _, first, last = again = self._part(node.item, owner, lexemes)
            _join(again, again, lexemes)
            return _join(part, (True, first, last), lexemes)
        for _ in range(node.most - node.least):
            _, first, last = self._part(node.item, owner, lexemes)
            part = _join(part, (True, first, last), lexemes)
        return part

    def _followers(self, parts: dict[Node, _Part], lexemes: _Lexemes) -> dict[Node, int]:
        """By lexeme: the characters with which what follows it may begin."""
        begins: dict[str, tuple[bool, int]] = dict.fromkeys(self._rules, (False, 0))
        behind: dict[str, int] = dict.fromkeys(self._rules, 0)
        followers = dict.fromkeys(parts, 0)

        def begin(node: Node) -> tuple[bool, int]:
            if self._is_lexeme(node):
                is_empty, first, _ = parts.get(self._resolved(node), _EMPTY)
                return is_empty, _union(lexemes.masks[position] for position in first)
            if isinstance(node, Rule):
                return begins[node.name]
            inner = [begin(item) for item in _children(node)]
            if isinstance(node, Either):
                return any(each[0] for each in inner), _union(each[1] for each in inner)
            if isinstance(node, Repeated):
                return inner[0][0] or not node.least, inner[0][1]
            return _first_of(inner)

        def spread(node: Node, after: int) -> None:
            if self._is_lexeme(node):
                if (lexeme := self._resolved(node)) in followers:
                    followers[lexeme] |= after
            elif isinstance(node, Rule):
                behind[node.name] |= after
            elif isinstance(node, Joined):
                for place, item in enumerate(node.items):
                    is_empty, mask = _first_of([begin(rest) for rest in node.items[place + 1 :]])
                    spread(item, mask | (after if is_empty else 0))
            else:
                again = begin(node.item)[1] if isinstance(node, Repeated) and node.most != 1 else 0
                for item in _children(node):
                    spread(item, after | again)

        state: object = None
        while state != (state := (dict(begins), dict(behind), dict(followers))):
            for name, rule in self._rules.items():
                begins[name] = begin(rule)
            for name, rule in self._rules.items():
                spread(rule, behind[name])
        return followers

    def _written(self) -> str:
        names = {name: f"r{number}" for number, name in enumerate(self._rules)}
        lexemes: dict[str, str] = {}  # names by pattern
        length = 0

        def written(node: Node) -> str:
            nonlocal length
            if self._is_lexeme(node):
                pattern = self._pattern(node)
                length += len(pattern)
                if length > _MOST_LENGTH:
                    _too_large()
                return lexemes.setdefault(pattern, f"T{len(lexemes)}") if pattern else '""'
            if isinstance(node, Rule):
                return names[node.name]
            inner = [written(item) for item in _children(node)]
            if isinstance(node, Repeated):
                return f"({inner[0]}){_times(node)}"
            return f"({(' | ' if isinstance(node, Either) else ' ').join(inner)})" if inner else '""'

        root = self._rules["root"]
        lines = [f"start: {written(root) if self._is_lexeme(root) else names['root']}"]
        used, waiting = {"root"}, ["root"]
        while waiting:
            name = waiting.pop()
            if not self._is_lexeme(self._rules[name]):
                lines.append(f"{names[name]}: {written(self._rules[name])}")
                reached = {each for each in _names(self._rules[name]) if each not in used}
                used |= reached
                waiting += sorted(reached)
        return "\n".join([*lines, *(f"{name}: /{pattern}/" for pattern, name in lexemes.items())])

    def _pattern(self, node: Node) -> str:
        """A lexeme as a regular expression."""
        if isinstance(node, Rule):
            return self._pattern(self._rules[node.name])
        if isinstance(node, Chars):
            ranges = [f"\\x{{{low:x}}}" + (f"-\\x{{{high:x}}}" if high > low else "") for low, high in node.ranges]
            return f"[{''.join(ranges)}]" if ranges else _no_characters()
        inner = [self._pattern(item) for item in _children(node)]
        if isinstance(node, Repeated):
            return f"(?:{inner[0]}){_times(node)}" if inner[0] else ""
        if sum(map(len, inner)) > _MOST_LENGTH:
            _too_large()
        return f"(?:{'|'.join(inner)})" if isinstance(node, Either) else "".join(inner)


def _join(one: _Part, other: _Part, lexemes: _Lexemes) -> _Part:
    for position in one[2]:
        lexemes.follow[position] |= other[1]
    first = one[1] | other[1] if one[0] else one[1]
    last = one[2] | other[2] if other[0] else other[2]
    return one[0] and other[0], first, last


def _first_of(parts: Iterable[tuple[bool, int]]) -> tuple[bool, int]:
    """Of parts one behind the other: whether all may be empty, and the characters that may come first."""
    mask = 0
    for is_empty, first in parts:
        mask |= first
        if not is_empty:
            return False, mask
    return True, mask


def _union(masks: Iterable[int]) -> int:
    total = 0
    for mask in masks:
        total |= mask
    return total


def _times(node: Repeated) -> str:
    return f"{{{node.least},{'' if node.most is None else node.most}}}"


def _children(node: Node) -> tuple[Node, ...]:
    if isinstance(node, Joined | Either):
        return node.items
    return (node.item,) if isinstance(node, Repeated) else ()


def _nodes(node: Node) -> Iterable[Node]:
    yield node
    for child in _children(node):
        yield from _nodes(child)


def _names(node: Node) -> set[str]:
    return {each.name for each in _nodes(node) if isinstance(each, Rule)}


def _regular_rules(rules: dict[str, Node]) -> set[str]:
    """Those that lead to no rule that contains itself."""
    regular = set[str]()
    needed = {name: _names(rule) for name, rule in rules.items()}
    while found := {name for name, names in needed.items() if names <= regular}:
        regular |= found
        needed = {name: names for name, names in needed.items() if name not in found}
    return regular


def _too_large() -> NoReturn:
    raise InvalidParameter("grammar cannot be used: the GBNF is too large; use fewer rules and lower its repetitions.")


def _no_characters() -> NoReturn:
    raise InvalidParameter("grammar cannot be used: the GBNF has a class of no characters.")
