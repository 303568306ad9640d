"""Token ids to text, one by one: characters that span tokens, and stop strings that span tokens."""

from __future__ import annotations

from typing import Protocol

_CONTEXT_TOKENS = 4  # prompt tokens decoded along, because some tokenizers drop the space of a first token


class Decodes(Protocol):
    """The part of a tokenizer that turns ids into text."""

    def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str: ...


class Detokenizer:
    """The text of one growing sequence. `text` is everything decoded so far, cut at the first stop string."""

    def __init__(self, tokenizer: Decodes, prompt: list[int], stops: tuple[str, ...]) -> None:
        self._tokenizer = tokenizer
        self._stops = stops
        self._ids = list(prompt[-_CONTEXT_TOKENS:])
        self._prefix = 0  # decoding starts here ...
        self._read = len(self._ids)  # ... and up to here is already in `text`
        self.text = ""
        self.shown = 0  # how much of `text` has been handed out by `take`

    def append(self, token: int) -> str | None:
        """Take one token; returns the stop string that it completes, if any, which then ends `text`."""
        self._ids.append(token)
        known = self._tokenizer.decode(self._ids[self._prefix : self._read])
        whole = self._tokenizer.decode(self._ids[self._prefix :])
        if len(whole) <= len(known) or whole.endswith("\ufffd"):
            return None  # part of a character, or nothing to see
        self._prefix, self._read = self._read, len(self._ids)
        return self._extend(whole[len(known) :])

    def finish(self) -> None:
        """No more tokens: whatever is left of an incomplete character becomes text."""
        known = self._tokenizer.decode(self._ids[self._prefix : self._read])
        self._extend(self._tokenizer.decode(self._ids[self._prefix :])[len(known) :])
        self._prefix = self._read = len(self._ids)

    def stable(self) -> int:
        """How much of `text` can be shown: all but an end that may yet become a stop string."""
        held = 0
        for stop in self._stops:
            for size in range(min(len(stop) - 1, len(self.text)), held, -1):
                if self.text.endswith(stop[:size]):
                    held = size
                    break
        return len(self.text) - held

    def take(self, upto: int) -> str:
        """The text not handed out before, up to that place."""
        piece = self.text[self.shown : upto]
        self.shown += len(piece)
        return piece

    def _extend(self, piece: str) -> str | None:
        longest = max(map(len, self._stops), default=1)
        start = max(0, len(self.text) - longest + 1)
        self.text += piece
        found = [(self.text.find(stop, start), -len(stop), stop) for stop in self._stops]
        hits = sorted(hit for hit in found if hit[0] >= 0)
        if not hits:
            return None
        self.text = self.text[: hits[0][0]]
        return hits[0][2]
