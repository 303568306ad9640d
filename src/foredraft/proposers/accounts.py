"""What a drafting model has run of each text: which K and V of its own layer group may be read.

A text is known by what the model ran for it, as long as it holds its blocks. A text that is new, or that lost its
blocks and got some back, is known as far as its leading blocks still hold what the model wrote for the same tokens.
What is not known is run again: a model never guesses from stale state.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from foredraft.proposers.occurrences import shared_prefix
from foredraft.types import Sequence


@dataclass
class _Account:
    preemptions: int  # a text that was preempted since has lost its blocks
    tokens: list[int] = field(default_factory=list)  # what was run, committed and guessed, at the text's own slots
    blocks: list[int] = field(default_factory=list)  # where that was
    names: list[int] = field(default_factory=list)  # of its leading full blocks


class Accounts:
    """The books of one layer group. Only the model that owns the group writes to it."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._texts: dict[int, _Account] = {}
        self._writer: dict[int, int] = {}  # block -> the text for which it was written to last
        self._valid: dict[int, int] = {}  # block -> the name of the text up to its end, of which it holds K and V

    def known_tokens(self, sequence: Sequence) -> int:
        """How many leading tokens of a text need not be run; one is always left, because its logits are wanted."""
        account = self._texts.get(sequence.id)
        if account is None or account.preemptions != sequence.counters.preemptions:
            account = self._texts[sequence.id] = self._found(sequence)
        # The target's own blocks stay; those behind go back after every step and may have served another text since.
        held = min(len(account.names), sequence.num_computed_tokens // self._block_size)
        for block, now in zip(account.blocks[held:], sequence.block_table[held:], strict=False):
            if block != now or self._writer.get(block) != sequence.id:
                break
            held += 1
        known = shared_prefix(account.tokens, sequence.token_ids)
        return min(known, held * self._block_size, sequence.num_tokens - 1)

    def wrote(self, sequence: Sequence, tokens: list[int], num_slots: int) -> None:
        """The model has run `tokens` at the text's slots, and may have left anything at those from there to
        `num_slots`."""
        account, size = self._texts[sequence.id], self._block_size
        committed = shared_prefix(tokens, sequence.token_ids)
        kept = min(committed, shared_prefix(account.tokens, tokens)) // size
        del account.names[kept:]
        account.tokens, account.blocks = tokens, sequence.block_table[: -(-len(tokens) // size)]
        for block in sequence.block_table[kept : -(-num_slots // size)]:
            self._writer[block] = sequence.id
            self._valid.pop(block, None)
        for index in range(len(account.names), committed // size):
            account.names.append(_name(account.names, tokens, size))
            self._valid[sequence.block_table[index]] = account.names[index]

    def release(self, sequence_ids: Iterable[int]) -> None:
        for sequence_id in sequence_ids:
            self._texts.pop(sequence_id, None)

    def _found(self, sequence: Sequence) -> _Account:
        """As much of the text as its blocks hold already."""
        account = _Account(sequence.counters.preemptions)
        for block in sequence.block_table[: sequence.num_tokens // self._block_size]:
            name = _name(account.names, sequence.token_ids, self._block_size)
            if self._valid.get(block) != name:
                break
            account.names.append(name)
        account.tokens = sequence.token_ids[: len(account.names) * self._block_size]
        return account


def _name(names: list[int], tokens: list[int], size: int) -> int:
    """The name of the block after those: a hash over everything up to its end."""
    start = len(names) * size
    return hash((names[-1] if names else 0, *tokens[start : start + size]))
