"""Which tokens of each sequence a drafting model has computed: the K and V of its own layer group that it may read.

A running sequence is known by what the model ran for it, as long as it holds its blocks. A sequence that is new, or
that lost its blocks and got some back, is known as far as its leading blocks still hold what the model computed for the
same tokens. The rest is run again: a model never drafts from stale state.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Items
from dataclasses import dataclass, field

from foredraft.prefix import extended_name, root_name
from foredraft.proposers.occurrences import shared_prefix
from foredraft.types import Sequence

_MOST_DRAFTED = 256  # draft tokens at the end of a sequence: 64 of each stage that drafts for another


@dataclass
class _Computed:
    """What was computed for one sequence."""

    preemptions: int  # a sequence that was preempted since has lost its blocks
    root: bytes  # the name of its empty prefix
    tokens: list[int] = field(default_factory=list)  # committed and drafted ones, at the sequence's own slots
    blocks: list[int] = field(default_factory=list)  # where they are
    names: list[bytes] = field(default_factory=list)  # of its leading full blocks


class ComputedTokens:
    """The bookkeeping of one layer group. Only the model that owns the group writes to it."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._sequences: dict[int, _Computed] = {}
        self._writer: dict[int, int] = {}  # block -> the sequence for which it was written last
        self._valid: dict[int, bytes] = {}  # block -> the name of the prefix up to its end whose K and V it holds

    def num_computed(self, sequence: Sequence) -> int:
        """How many leading tokens need not be run; one is always left, because its logits are needed."""
        computed = self._sequences.get(sequence.id)
        if computed is None or computed.preemptions != sequence.counters.preemptions:
            computed = self._sequences[sequence.id] = self._found(sequence)
        # The target's own blocks stay. Those behind go back after every step and may have served another sequence.
        held = min(len(computed.names), sequence.num_computed_tokens // self._block_size)
        for block, now in zip(computed.blocks[held:], sequence.block_table[held:], strict=False):
            if block != now or self._writer.get(block) != sequence.id:
                break
            held += 1
        known = shared_prefix(computed.tokens, sequence.token_ids, _MOST_DRAFTED)
        return min(known, held * self._block_size, sequence.num_tokens - 1)

    def record(self, sequence: Sequence, known: int, drafted: Items[int], num_slots: int) -> None:
        """The model has run the first `known` tokens of the sequence at its slots, and, if those are all, `drafted`
        ones behind them. It may have left anything at the slots from there to `num_slots`."""
        computed, size = self._sequences[sequence.id], self._block_size
        same = min(known, shared_prefix(computed.tokens, sequence.token_ids, _MOST_DRAFTED))
        computed.tokens[same:] = [*sequence.token_ids[same:known], *drafted]
        kept = min(same // size, len(computed.names))
        del computed.names[kept:]
        held = min(kept, sequence.num_computed_tokens // size)  # the target's own blocks stay
        computed.blocks[held:] = sequence.block_table[held : -(-len(computed.tokens) // size)]
        for block in sequence.block_table[kept : -(-num_slots // size)]:
            self._writer[block] = sequence.id
            self._valid.pop(block, None)
        for index in range(len(computed.names), known // size):
            computed.names.append(self._next_name(computed, computed.tokens))
            self._valid[sequence.block_table[index]] = computed.names[index]

    def release(self, sequence_ids: Iterable[int]) -> None:
        for sequence_id in sequence_ids:
            self._sequences.pop(sequence_id, None)

    def _found(self, sequence: Sequence) -> _Computed:
        """As much of a sequence as its blocks hold already."""
        computed = _Computed(sequence.counters.preemptions, root_name(sequence.params.cache_salt))
        for block in sequence.block_table[: sequence.num_tokens // self._block_size]:
            name = self._next_name(computed, sequence.token_ids)
            if self._valid.get(block) != name:
                break
            computed.names.append(name)
        computed.tokens = sequence.token_ids[: len(computed.names) * self._block_size]
        computed.blocks = list(sequence.block_table[: len(computed.names)])
        return computed

    def _next_name(self, computed: _Computed, tokens: list[int]) -> bytes:
        """The name of the prefix that ends with the block after the named ones."""
        start = len(computed.names) * self._block_size
        parent = computed.names[-1] if computed.names else computed.root
        return extended_name(parent, tokens[start : start + self._block_size])
