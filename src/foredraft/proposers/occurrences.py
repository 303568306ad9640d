"""Where the n-grams of a text have occurred: the index behind proposers that copy."""

from __future__ import annotations

_MOST_TAKEN_BACK = 64  # a text loses no more than a draft's tokens: it is enough to compare so many


class Occurrences:
    """For n-grams of a few lengths, the places that follow them in a list of tokens, in order.

    The list grows and shrinks at its end and is forgotten from its start; each token costs one look-up per length.
    Places are counted from the first token there ever was. An n-gram is known by a 64-bit hash; a collision costs a bad
    guess, nothing else.
    """

    def __init__(self, lengths: tuple[int, ...]) -> None:
        self.lengths = lengths
        self.tokens: list[int] = []
        self.start = 0  # the place of tokens[0]: how many were forgotten
        self._places: dict[int, list[int]] = {}

    def __len__(self) -> int:
        """How many n-grams are known."""
        return len(self._places)

    @property
    def end(self) -> int:
        return self.start + len(self.tokens)

    def follow(self, text: list[int]) -> None:
        """Become the index of `text`: what was there before, but for some of its last tokens, and more."""
        known = len(self.tokens)
        tail = max(0, known - _MOST_TAKEN_BACK)
        if text[tail:known] != self.tokens[tail:]:
            self.shrink(shared_prefix(text, self.tokens))
        for token in text[len(self.tokens) :]:
            self.append(token)

    def append(self, token: int) -> None:
        end = len(self.tokens)
        for n in self.lengths:
            if end >= n:
                self._places.setdefault(self._key(end, n), []).append(self.start + end)
        self.tokens.append(token)

    def shrink(self, length: int) -> None:
        """Take tokens back from the end until so many are left."""
        while len(self.tokens) > length:
            self.tokens.pop()
            for n in self.lengths:
                if len(self.tokens) >= n:
                    self._take(len(self.tokens), n, -1)

    def forget(self, count: int) -> None:
        """Forget the oldest tokens, and every n-gram that begins among them."""
        for n in self.lengths:
            for end in range(n, min(n + count, len(self.tokens))):
                self._take(end, n, 0)
        del self.tokens[:count]
        self.start += count

    def places(self, suffix: list[int], n: int) -> list[int]:
        """The places that follow earlier occurrences of the last n tokens of `suffix`, oldest first. Not to be
        changed."""
        return self._places.get(hash(tuple(suffix[-n:])), []) if len(suffix) >= n else []

    def matched(self, place: int, suffix: list[int], limit: int) -> int:
        """How many tokens before `place` are also the last ones of `suffix`, up to a limit."""
        length, tokens, before = 0, self.tokens, place - self.start - 1
        limit = min(limit, before + 1, len(suffix))
        while length < limit and tokens[before - length] == suffix[-1 - length]:
            length += 1
        return length

    def _key(self, end: int, n: int) -> int:
        return hash(tuple(self.tokens[end - n : end]))

    def _take(self, end: int, n: int, side: int) -> None:
        """Remove a place from one end of its n-gram's list."""
        key = self._key(end, n)
        places = self._places[key]
        assert places[side] == self.start + end
        places.pop(side)
        if not places:
            del self._places[key]


def shared_prefix(one: list[int], other: list[int]) -> int:
    """How many leading tokens two texts have in common."""
    limit = min(len(one), len(other))
    if one[:limit] == other[:limit]:
        return limit
    return next(place for place in range(limit) if one[place] != other[place])
