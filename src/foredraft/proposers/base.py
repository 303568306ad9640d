"""What a proposer is: something that guesses the next tokens of a text, and may be wrong at no cost but time."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Items
from typing import Protocol

from foredraft.types import Commit, Draft, Sequence


class Proposer(Protocol):
    """Its state is a function of committed tokens. It knows nothing of the scheduler, the verifier or the batch."""

    name: str
    taps: frozenset[int]  # target layers whose residual stream it wants to see
    num_lookahead_tokens: int  # the most nodes that a draft of its default settings has

    def propose(self, sequences: Items[Sequence], budgets: Items[int]) -> list[Draft]:
        """One draft per sequence, of at most its budget of nodes; an empty one is an ordinary answer."""

    def observe(self, commits: Items[Commit]) -> None:
        """Learn what the texts really said."""

    def release(self, sequence_ids: Iterable[int]) -> None:
        """Forget sequences that have ended."""
