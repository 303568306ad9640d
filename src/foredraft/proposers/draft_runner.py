"""A model that guesses, as its proposers share it."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from foredraft.engine.batch import pack
from foredraft.engine.runner import Runner
from foredraft.proposers.accounts import Accounts
from foredraft.types import Sequence, Work


@dataclass(eq=False)
class DraftRunner:
    """A model that guesses: its runner, and what it has run of each text. Proposers that differ only in their options
    share one."""

    runner: Runner
    block_size: int
    vocab_size: int  # of the target: what lies beyond cannot be guessed
    accounts: Accounts | None  # None: its K and V are the target's own

    def known_tokens(self, sequence: Sequence) -> int:
        return sequence.num_computed_tokens if self.accounts is None else self.accounts.known_tokens(sequence)

    def wrote(self, sequence: Sequence, tokens: list[int], num_slots: int) -> None:
        if self.accounts is not None:
            self.accounts.wrote(sequence, tokens, num_slots)

    def logits(self, works: list[Work]) -> list[Tensor]:
        """Of every work the logits that it asks for: [num_logits, vocab]."""
        logits = self.runner.forward(pack(works, self.block_size, self.runner.backend.device)).logits
        return list(logits[:, : self.vocab_size].split([work.num_logits for work in works]))
