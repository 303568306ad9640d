"""Drafts by the longest suffix that occurred earlier in the same sequence: it copies what followed there.
Costs a few dictionary look-ups per step, whatever the length of the sequence.
Shines where the answer copies: editing code, quoting, summarising, repeating itself."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from foredraft.errors import InvalidSpec
from foredraft.proposers.base import Proposer
from foredraft.proposers.occurrences import Occurrences
from foredraft.proposers.target import TargetModel
from foredraft.types import NO_DRAFT, Draft, Sequence


@dataclass(frozen=True)
class NgramOptions:
    k: int = 10  # draft tokens
    min_n: int = 2  # shortest and longest suffix that is looked up
    max_n: int = 4
    which: str = "latest"  # occurrence that is copied from: latest or earliest

    def __post_init__(self) -> None:
        if not 1 <= self.k <= 64:
            raise InvalidSpec(f"ngram: k={self.k} must be from 1 to 64.")
        if not 1 <= self.min_n <= self.max_n <= 16:
            raise InvalidSpec(f"ngram: min_n={self.min_n}, max_n={self.max_n} must keep 1 ≤ min_n ≤ max_n ≤ 16.")
        if self.which not in ("latest", "earliest"):
            raise InvalidSpec(f"ngram: which={self.which!r} must be latest or earliest.")


class Ngram(Proposer):
    """One index per sequence. Every query adds the tokens that are new since the last one."""

    name = "ngram"
    Options = NgramOptions

    def __init__(self, options: NgramOptions, target: TargetModel | None = None) -> None:
        self.options = options
        self.num_lookahead_tokens = options.k
        self._lengths = tuple(range(options.min_n, options.max_n + 1))
        self._indexes: dict[int, Occurrences] = {}

    def draft(self, sequence: Sequence, budget: int) -> Draft:
        tokens = sequence.token_ids
        index = self._indexes.get(sequence.id)
        if index is None:
            index = self._indexes[sequence.id] = Occurrences(self._lengths)
        index.follow(tokens)
        length = min(budget, self.options.k)
        # What ends with no known n-gram of the shortest length ends with none of a longer one.
        is_known = length > 0 and index.places(tokens, self._lengths[0], 1)
        for n in reversed(self._lengths) if is_known else ():
            places = index.places(tokens, n)
            if places:
                place = places[-1 if self.options.which == "latest" else 0]
                confidence = 1 - 0.5 ** (n / 2)  # a longer match is more often right
                return Draft.chain(_copied(tokens, place, length), confidence, self.name)
        return NO_DRAFT

    def release(self, sequence_ids: Iterable[int]) -> None:
        for sequence_id in sequence_ids:
            self._indexes.pop(sequence_id, None)


def _copied(tokens: list[int], place: int, length: int) -> list[int]:
    """The tokens that followed. At the end of the sequence it goes on with what was just copied: a loop continues."""
    period = len(tokens) - place
    return [tokens[place + offset % period] for offset in range(length)]
