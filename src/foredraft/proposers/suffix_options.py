"""The options of the proposer `suffix`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from foredraft.errors import InvalidSpec


@dataclass(frozen=True)
class SuffixOptions:
    k: int = 16  # nodes of a draft
    min_n: int = 2  # shortest suffix that is looked up, and the longest that is told apart
    max_n: int = 16
    depth: float = 3.0  # a match of n tokens is followed for at most depth * n
    min_score: float = 0.1  # a node that is reached less often than this is not drafted
    store: int = 100_000  # tokens of earlier answers that are remembered, of all salts together; 0: none
    store_doubt: float = 1.0  # times as much as what the sequence itself holds, what earlier answers hold is doubted
    tree: str = "dynamic"  # or chain: every node has its most frequent child only

    owner_only: ClassVar[frozenset[str]] = frozenset({"store"})  # options that no request of a server may choose

    def __post_init__(self) -> None:
        if not 1 <= self.k <= 64:
            raise InvalidSpec(f"suffix: k={self.k} must be from 1 to 64.")
        if not 1 <= self.min_n <= self.max_n <= 32:
            raise InvalidSpec(f"suffix: min_n={self.min_n}, max_n={self.max_n} must keep 1 ≤ min_n ≤ max_n ≤ 32.")
        if not (0 < self.min_score < 1 and 0 < self.depth <= 64 and 0 <= self.store <= 10**7):
            raise InvalidSpec(
                f"suffix: min_score={self.min_score} must lie between 0 and 1, depth={self.depth} above 0 and up to "
                f"64, store={self.store} from 0 to 10000000."
            )
        if not 1 <= self.store_doubt <= 64:
            raise InvalidSpec(f"suffix: store_doubt={self.store_doubt} must be from 1 to 64.")
        if self.tree not in ("dynamic", "chain"):
            raise InvalidSpec(f"suffix: tree={self.tree!r} must be dynamic or chain.")

    @property
    def lengths(self) -> tuple[int, ...]:
        """The n-grams that are looked up. Their lengths double: the longest that is found leaves few occurrences to
        compare."""
        return tuple(self.min_n << step for step in range(5) if self.min_n << step <= self.max_n)
