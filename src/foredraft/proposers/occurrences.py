"""Where the n-grams of a text have occurred: the index behind proposers that copy."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable

MOST_TAKEN_BACK = 64  # a text loses no more than a draft's tokens: it is enough to compare so many


class Occurrences:
    """For n-grams of a few lengths, the places that follow them in a list of tokens, in order.

    The list grows and shrinks at its end and is forgotten from its start; each token costs a look-up or two per length
    that is asked for, whatever the length of the list. Places are counted from the first token there ever was. An
    n-gram is known by a 64-bit hash; a collision costs a bad draft, nothing else.

    The n-grams of a length are looked at when they are asked for: most positions of most texts end with a short one
    that is new, and then nobody asks for longer ones.

    Forgotten tokens and places stay where they are until they are half of their list: to cut a list costs its length.
    """

    def __init__(self, lengths: tuple[int, ...]) -> None:
        self.lengths = lengths
        self.tokens: list[int] = []
        self.offset = 0  # the place of tokens[0]
        self.start = 0  # the place of the first token that is not forgotten
        self._places: dict[int, list[int]] = {}
        self._known = dict.fromkeys(lengths, 0)  # by length: the n-grams before this place have been looked at

    def __len__(self) -> int:
        """How many n-grams are known."""
        return len(self._places)

    @property
    def end(self) -> int:
        return self.offset + len(self.tokens)

    def follow(self, text: list[int]) -> None:
        """Become the index of `text`: what was there before, but for some of its last tokens, and more. Not for a list
        of which something was forgotten."""
        self.shrink(shared_prefix(text, self.tokens, MOST_TAKEN_BACK))
        self.extend(text[len(self.tokens) :])

    def extend(self, tokens: Iterable[int]) -> None:
        self.tokens.extend(tokens)

    def shrink(self, length: int) -> None:
        """Take tokens back from the end until so many are left."""
        while self.end - self.start > length:
            self.tokens.pop()
            end = self.end
            for n, known in self._known.items():
                if known > end >= self.start + n:
                    key = self._key(end, n)
                    places = self._places[key]
                    assert places[-1] == end
                    places.pop()
                    self._tidy(key, n)
                    self._known[n] = end

    def forget(self, count: int) -> None:
        """Forget the oldest tokens, and every n-gram that begins among them."""
        first, self.start = self.start, self.start + count
        for n, known in self._known.items():
            for end in range(first + n, min(first + n + count, known)):
                self._tidy(self._key(end, n), n)
        if 2 * (self.start - self.offset) >= len(self.tokens):
            del self.tokens[: self.start - self.offset]
            self.offset = self.start

    def places(self, suffix: list[int], n: int, most: int | None = None) -> list[int]:
        """The places that follow earlier occurrences of the last n tokens of `suffix`, oldest first; with `most`, the
        last so many of them, at a cost that does not depend on how many there are. Not to be changed."""
        if self._known[n] < self.end:
            self._look_at(n)
        places = self._places.get(hash(tuple(suffix[-n:])), []) if len(suffix) >= n else []
        if most is not None:
            places = places[-most:]
        oldest = self.start + n  # leading places may be of n-grams that are forgotten
        return places if not places or places[0] >= oldest else places[bisect_left(places, oldest) :]

    def matched(self, place: int, suffix: list[int], limit: int) -> int:
        """How many tokens before `place` are also the last ones of `suffix`, up to a limit."""
        length, tokens, before = 0, self.tokens, place - self.offset - 1
        limit = min(limit, place - self.start, len(suffix))
        while length < limit and tokens[before - length] == suffix[-1 - length]:
            length += 1
        return length

    def _look_at(self, n: int) -> None:
        """Find the n-grams of this length that were not looked at yet."""
        tokens, places, offset, end = self.tokens, self._places, self.offset, self.end
        for place in range(max(self._known[n], self.start + n), end):
            key = hash(tuple(tokens[place - n - offset : place - offset]))  # as `_key` has it
            if key in places:
                places[key].append(place)
            else:
                places[key] = [place]
        self._known[n] = end

    def _key(self, end: int, n: int) -> int:
        end -= self.offset
        return hash(tuple(self.tokens[end - n : end]))

    def _tidy(self, key: int, n: int) -> None:
        """Drop an n-gram that has no places left, and forgotten places once they are half of all."""
        places, oldest = self._places.get(key), self.start + n
        if places is None:
            return  # forgotten a moment ago, with a later place of the same n-gram
        if not places or places[-1] < oldest:
            del self._places[key]
        elif places[len(places) // 2] < oldest:
            del places[: bisect_left(places, oldest)]


def shared_prefix(one: list[int], other: list[int], most_drafted: int) -> int:
    """How many leading tokens two states of one text have in common. They differ in their last tokens only, which may
    have been drafts, so it is enough to compare those: the text may be long."""
    limit = min(len(one), len(other))
    tail = max(0, limit - most_drafted)
    if one[tail:limit] == other[tail:limit]:
        return limit
    return next(place for place in range(limit) if one[place] != other[place])
