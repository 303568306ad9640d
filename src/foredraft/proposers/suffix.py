"""Drafts what followed the longest known suffix, in this sequence and in earlier answers: a tree, frequent ones first.
Costs a few look-ups per committed token and a few dozen comparisons per step, whatever the length of the sequence.
Shines where traffic repeats itself: agents, templates, edits, retries."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Items
from functools import partial

from foredraft.proposers.base import Proposer
from foredraft.proposers.suffix_native import native_texts
from foredraft.proposers.suffix_text import SEPARATOR, PlainText, SuffixOptions, Text
from foredraft.proposers.target import TargetModel
from foredraft.types import NO_DRAFT, Commit, Draft, Sequence

_MOST_SALTS = 1024  # among whose requests answers are shared


class Suffix(Proposer):
    """One text per running sequence, and one of finished answers for every salt. Together these have a limit; beyond
    it the oldest answers are forgotten. Beyond the limit of salts, all answers of the salt that was used least recently
    are forgotten. Answers are shared only among requests of equal salts."""

    name = "suffix"
    Options = SuffixOptions

    def __init__(self, options: SuffixOptions, target: TargetModel | None = None) -> None:
        self.options = options
        self.num_lookahead_tokens = options.k
        self._new_text: Callable[[], Text] = native_texts(options) or partial(PlainText, options)
        self._running: dict[int, Text] = {}
        self.clear()

    def draft(self, sequence: Sequence, budget: int) -> Draft:
        salt = sequence.params.cache_salt
        text = self._running.get(sequence.id)
        if text is None:
            text = self._running[sequence.id] = self._new_text()
            self._use(salt)
        text.follow(sequence.token_ids)
        tokens, parents, scores = text.draft(self._stores.get(salt), min(budget, self.options.k))
        return Draft(tokens, parents, scores, (self.name,) * len(tokens)) if tokens else NO_DRAFT

    def observe(self, commits: Items[Commit]) -> None:
        for commit in commits:
            sequence = commit.sequence
            if commit.finish_reason in ("stop", "length") and sequence.may_be_remembered:
                self._remember(sequence.params.cache_salt, sequence.output_token_ids)

    def release(self, sequence_ids: Iterable[int]) -> None:
        for sequence_id in sequence_ids:
            self._running.pop(sequence_id, None)

    def clear(self) -> None:
        """Forget all finished answers."""
        self._stores: dict[str, Text] = {}  # by salt, least recently used first; none is empty
        self._answers: deque[tuple[str, int]] = deque()  # salts and sizes of those in the stores, oldest first
        self._num_stored = 0  # tokens in all stores

    def _remember(self, salt: str, answer: list[int]) -> None:
        size = len(answer) + 1
        if size > self.options.store:
            return
        self._use(salt)
        if salt not in self._stores:
            self._stores[salt] = self._new_text()
        self._stores[salt].extend((*answer, SEPARATOR))
        self._answers.append((salt, size))
        self._num_stored += size
        while len(self._stores) > _MOST_SALTS:
            self._forget_salt(next(iter(self._stores)))
        while self._num_stored > self.options.store:
            oldest, size = self._answers.popleft()
            store = self._stores[oldest]
            store.forget(size)
            self._num_stored -= size
            if store.start == store.end:
                del self._stores[oldest]

    def _use(self, salt: str) -> None:
        """Mark a salt as the one that was used last."""
        if salt in self._stores:
            self._stores[salt] = self._stores.pop(salt)

    def _forget_salt(self, salt: str) -> None:
        store = self._stores.pop(salt)
        self._num_stored -= store.end - store.start
        self._answers = deque(answer for answer in self._answers if answer[0] != salt)
