"""`min_tokens`: a constraint under which no token ends the output before it has so many, with a grammar or without."""

from __future__ import annotations

from collections.abc import Sequence as Items

import torch
from torch import Tensor

from foredraft.constraint import Constraint


class MinTokens:
    """Forbids the tokens `ends` until there are `min_tokens`. A grammar goes first: where it allows nothing but an end,
    the output ends."""

    def __init__(self, min_tokens: int, ends: frozenset[int], vocab_size: int, grammar: Constraint | None) -> None:
        self._min_tokens = min_tokens
        self._ends = ends
        self._end_ids = sorted(ends)
        self._all = torch.ones(vocab_size, dtype=torch.bool)
        self._grammar = grammar
        self._num_accepted = 0  # where no grammar counts them

    @property
    def num_accepted(self) -> int:
        return self._num_accepted if self._grammar is None else self._grammar.num_accepted

    @property
    def error(self) -> str | None:
        return None if self._grammar is None else self._grammar.error

    def mask(self, path: Items[int]) -> Tensor:
        allowed: Tensor = self._all if self._grammar is None else self._grammar.mask(path)
        if self.num_accepted + len(path) >= self._min_tokens:
            return allowed
        longer = allowed.clone()
        longer[self._end_ids] = False
        return longer if longer.any() else allowed

    def accept(self, tokens: Items[int]) -> None:
        self._num_accepted += len(tokens)
        if self._grammar is not None:
            self._grammar.accept(tokens)

    def num_valid(self, path: Items[int]) -> int:
        num_valid = len(path) if self._grammar is None else self._grammar.num_valid(path)
        early = path[: max(0, self._min_tokens - self.num_accepted)]
        return min(num_valid, next((place for place, token in enumerate(early) if token in self._ends), num_valid))

    def forced(self, path: Items[int]) -> list[int]:
        return [] if self._grammar is None else self._grammar.forced(path)

    def is_complete(self, path: Items[int]) -> bool:
        return self._grammar is not None and self._grammar.is_complete(path)
