"""Token ids to text, one by one: characters that span tokens, and stop strings that span tokens."""

from __future__ import annotations

from typing import Protocol

from foredraft.engine.stop_strings import START, StopStrings

_CONTEXT_TOKENS = 4  # prompt tokens decoded along, because some tokenizers drop the space of a first token
_MOST_PENDING = 3  # a character has at most four bytes, so one that is incomplete spans at most so many tokens
_INCOMPLETE = "\ufffd"  # what decoders write for bytes that are no character (yet)


class Decodes(Protocol):
    """The part of a tokenizer that turns ids into text."""

    def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str: ...

    def text_of(self, token: int) -> str | None:
        """What the token adds to any text of whole characters; None where that depends on its neighbours."""


class Detokenizer:
    """The text of one growing sequence. `text` is everything decoded so far, cut at the first stop string.

    A character that begins in the prompt and ends in the output belongs to the output. Text that nobody follows is
    decoded at once when it is read, provided that no stop string has to be found in it.
    """

    def __init__(
        self,
        tokenizer: Decodes,
        prompt: list[int],
        stops: StopStrings,
        is_followed: bool = True,
        min_tokens: int = 0,  # in the text of so many, stop strings do not count
    ) -> None:
        self._tokenizer = tokenizer
        self._stops = stops
        self._state = START  # of the search for stop strings, after `text`
        self._num_unsearched = min_tokens + 1  # tokens up to the first one whose text is searched
        self._is_deferred = not is_followed and not stops.strings
        self._deferred: list[int] = []  # tokens that are still to be decoded
        self._ids = list(prompt[-_CONTEXT_TOKENS:])
        self._prefix = 0  # decoding starts here ...
        self._read = len(self._ids)  # ... and up to here is already in the text
        self._text = ""
        self.shown = 0  # how much of `text` has been handed out by `take`

    @property
    def text(self) -> str:
        self._decode_deferred()
        return self._text

    def append(self, token: int) -> str | None:
        """Take one token; returns the stop string that it completes, if any, which then ends `text`."""
        self._num_unsearched -= self._num_unsearched > 0
        if self._is_deferred:
            self._deferred.append(token)
            return None
        return self._append(token)

    def finish(self) -> str | None:
        """No more tokens: whatever is left of an incomplete character becomes text; returns a stop string as `append`
        does."""
        self._decode_deferred()
        piece = self._new_text()
        if not piece:  # bytes that continue a character of the prompt and do not complete it
            piece = self._tokenizer.decode(self._ids[self._read :])
        self._prefix = self._read = len(self._ids)
        return self._extend(piece)

    def stable(self) -> int:
        """How much of `text` can be shown: all but an end that may yet become a stop string."""
        return 0 if self._is_deferred else len(self._text) - self._stops.depth[self._state]

    def take(self, upto: int) -> str:
        """The text not handed out before, up to that place."""
        piece = self._text[self.shown : upto]
        self.shown += len(piece)
        return piece

    def _append(self, token: int) -> str | None:
        ids = self._ids
        is_whole = self._read == len(ids)  # no character is incomplete
        ids.append(token)
        piece = self._tokenizer.text_of(token) if is_whole else None
        if piece is None:
            piece = self._new_text()
        if not piece or piece.endswith(_INCOMPLETE):  # part of a character, or nothing to see
            if self._has_no_text(token):
                ids.pop()
                return None
            return self._flush(len(ids) - _MOST_PENDING)
        self._prefix, self._read = self._read, len(ids)
        return self._extend(piece)

    def _decode_deferred(self) -> None:
        tokens, self._deferred = self._deferred, []
        for token in tokens:
            self._append(token)

    def _has_no_text(self, token: int) -> bool:
        """Whether the last token adds nothing, neither alone nor behind those before it: a special token."""
        if self._tokenizer.decode([token]):
            return False
        ids = self._ids[self._prefix :]
        return self._tokenizer.decode(ids) == self._tokenizer.decode(ids[:-1])

    def _flush(self, end: int) -> str | None:
        """Make text of the tokens before `end`, although they are no characters: no later token completes them.
        Otherwise bytes that are never a character would all be decoded again with every token."""
        if end <= self._read:
            return None
        ids = self._ids[self._prefix :]
        if not self._tokenizer.decode(ids).startswith(self._tokenizer.decode(ids[: end - self._prefix])):
            return None  # a character spans `end`
        piece = self._new_text(end)
        # Bytes before `end` may still share one mark with bytes behind it, so they are decoded along.
        self._prefix, self._read = max(self._prefix, end - _MOST_PENDING), end
        return self._extend(piece)

    def _new_text(self, end: int | None = None) -> str:
        """What the tokens after those that were read, up to `end`, add to their text."""
        known = self._tokenizer.decode(self._ids[self._prefix : self._read])
        whole = self._tokenizer.decode(self._ids[self._prefix : end])
        start = len(known.rstrip(_INCOMPLETE))  # an incomplete character at the end of the prompt may be whole now
        while start < len(known) and whole[start : start + 1] == _INCOMPLETE:
            start += 1
        return whole[start:]

    def _extend(self, piece: str) -> str | None:
        known = len(self._text)
        self._text += piece
        if not self._stops.strings or self._num_unsearched:
            return None
        self._state, found = self._stops.advance(self._state, piece)
        if found is None:
            return None
        self._state = START
        place, string = found
        self._text = self._text[: known + place]
        return string
