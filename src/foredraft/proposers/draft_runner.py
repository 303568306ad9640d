"""A draft model, as its proposers share it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from collections.abc import Sequence as Items
from dataclasses import dataclass

from foredraft.batch import pack
from foredraft.proposers.candidates import NodeLogits
from foredraft.proposers.computed_tokens import ComputedTokens
from foredraft.runtime.runner import Runner
from foredraft.types import Sequence, Work


@dataclass(eq=False)
class DraftRunner:
    """A draft model: its runner, and the tokens of each sequence that it has computed. Proposers that differ only in
    their options share one."""

    runner: Runner
    block_size: int
    vocab_size: int  # of the target: ids beyond it cannot be drafted
    computed: ComputedTokens | None  # None: its K and V are the target's own
    close: Callable[[], None]  # ends one use of it
    catch_up_beside: int = 32  # two tiles

    def can_draft(self, sequence: Sequence, known: int) -> bool:
        return self.can_read(sequence.token_ids[known:])

    def can_read(self, tokens: Iterable[int]) -> bool:
        """Whether the model has all of these tokens: its vocabulary may be padded to fewer than the target has."""
        return max(tokens, default=0) < self.runner.decoder.config.vocab_size

    def num_computed(self, sequence: Sequence) -> int:
        return sequence.num_computed_tokens if self.computed is None else self.computed.num_computed(sequence)

    def record(self, sequence: Sequence, tokens: list[int], num_slots: int) -> None:
        if self.computed is not None:
            self.computed.record(sequence, tokens, num_slots)

    def release(self, sequence_ids: Iterable[int]) -> None:
        if self.computed is not None:
            self.computed.release(sequence_ids)

    def logits(self, works: Items[Work]) -> NodeLogits:
        """The logits that the works need: [rows, vocab], where vocab is the narrower of the two."""
        return NodeLogits(self.runner.forward(pack(works, self.block_size)).logits[:, : self.vocab_size])
