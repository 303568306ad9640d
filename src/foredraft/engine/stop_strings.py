"""Search for many stop strings in a text that grows: an Aho-Corasick automaton. A character costs the same however many
stop strings there are and however long they are."""

from __future__ import annotations

from collections import deque

START = 0  # the state before any character


class StopStrings:
    """The automaton of some stop strings. It holds no text, so the samples of a request share it.

    A state stands for the longest end of the text that is a beginning of a stop string.
    """

    def __init__(self, strings: tuple[str, ...]) -> None:
        self.strings = strings
        self._next: list[dict[str, int]] = [{}]  # by state: the states that one more character leads to
        self._fallback = [START]  # by state: the next shorter end that is a beginning too
        self._found: list[str | None] = [None]  # by state: the longest stop string that ends there
        self.depth = [0]  # by state: its length in characters
        for string in strings:
            self._add(string)
        self._link()

    def advance(self, state: int, piece: str) -> tuple[int, tuple[int, str] | None]:
        """The state after a piece, and the stop string that begins first in it (of several the longest), with its
        place: where it begins, counted from the beginning of the piece and negative for one that began before."""
        best: tuple[int, int, str] | None = None  # place, minus length, string
        for index, character in enumerate(piece, 1):
            while state and character not in self._next[state]:
                state = self._fallback[state]
            state = self._next[state].get(character, START)
            if (string := self._found[state]) is not None:
                match = (index - len(string), -len(string), string)
                best = match if best is None else min(best, match)
        return state, None if best is None else (best[0], best[2])

    def _add(self, string: str) -> None:
        state = START
        for character in string:
            if character not in self._next[state]:
                self._next[state][character] = len(self._next)
                self._next.append({})
                self._fallback.append(START)
                self._found.append(None)
                self.depth.append(self.depth[state] + 1)
            state = self._next[state][character]
        self._found[state] = string

    def _link(self) -> None:
        """Find every state's fallback, shorter states first."""
        states = deque(self._next[START].values())
        while states:
            state = states.popleft()
            for character, longer in self._next[state].items():
                shorter = self._fallback[state]
                while shorter and character not in self._next[shorter]:
                    shorter = self._fallback[shorter]
                self._fallback[longer] = self._next[shorter].get(character, START)
                self._found[longer] = self._found[longer] or self._found[self._fallback[longer]]
                states.append(longer)
