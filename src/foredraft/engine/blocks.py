"""The block pool: who owns which KV blocks. Integers and hashes only; the tensors live in kv.py.

A block is free, or held by one or more sequences. A full block of committed, computed tokens gets a name (the hash of
everything up to its end), stays findable by that name after its holders have gone, and is forgotten only when it is
needed, least recently used first. Where layers with a window keep fewer blocks, window_blocks.py says which.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

from foredraft.engine.window_blocks import WindowBlocks
from foredraft.prefix import extended_name, root_name
from foredraft.types import Sequence


class BlockPool:
    """Hands out blocks of `block_size` tokens. `num_free_blocks` counts forgettable ones too."""

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        salt: str = "",
        prefix_caching: bool = True,
        windows: WindowBlocks | None = None,
    ) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.prefix_caching = prefix_caching
        self.windows = windows  # None: all layers keep all blocks
        self._salt = salt
        self._holders = [0] * num_blocks
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))  # least recently used first
        self._block_of_name: dict[bytes, int] = {}
        self._name_of_block: dict[int, bytes] = {}
        self._chains: dict[int, list[bytes]] = {}  # names of a sequence's leading named blocks, by sequence id

    @property
    def num_free_blocks(self) -> int:
        return len(self._free)

    @property
    def num_available_blocks(self) -> int:
        """How many blocks `reserve` could add now."""
        free = len(self._free)
        return free if self.windows is None else min(free, self.windows.num_available)

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def reserve(self, sequence: Sequence, num_tokens: int) -> bool:
        """Make the sequence's table cover `num_tokens`. All or nothing: False leaves everything as it was."""
        if num_tokens <= len(sequence.block_table) * self.block_size:
            return True  # as in nearly every step
        missing = self.blocks_for(num_tokens) - len(sequence.block_table)
        if missing > self.num_available_blocks:
            return False
        for _ in range(missing):
            block, _none = self._free.popitem(last=False)
            name = self._name_of_block.pop(block, None)
            if name is not None:
                del self._block_of_name[name]
            self._holders[block] = 1
            if self.windows is not None:
                self.windows.add(block)
            sequence.block_table.append(block)
        return True

    def truncate(self, sequence: Sequence, num_tokens: int) -> None:
        """Give back the blocks that lie wholly beyond `num_tokens`."""
        keep = self.blocks_for(num_tokens)
        assert keep >= len(self._chains.get(sequence.id, ())), "named blocks hold committed tokens and are never cut"
        while len(sequence.block_table) > keep:
            self._release_last(sequence)

    def free(self, sequence: Sequence, forget: bool = False) -> None:
        """Give back all blocks. With `forget`, what only this sequence holds is not found again."""
        names = self._chains.pop(sequence.id, [])
        if forget:
            for name, block in zip(names, sequence.block_table, strict=False):
                if self._block_of_name.get(name) == block and self._holders[block] == 1:
                    del self._block_of_name[name], self._name_of_block[block]
        while sequence.block_table:  # the tail first, so that the shared head of a prefix is the last to be forgotten
            self._release_last(sequence)

    def match_prefix(self, sequence: Sequence) -> int:
        """Attach the longest known prefix to a sequence without blocks; returns how many tokens it covers.

        At least one known token is left to compute, because its logits are needed.
        """
        assert not sequence.block_table and sequence.id not in self._chains
        chain = self._chains[sequence.id] = self._known_prefix(sequence)
        for name in chain:
            block = self._block_of_name[name]
            if self._holders[block] == 0:
                del self._free[block]
            self._holders[block] += 1
            sequence.block_table.append(block)
        if self.windows is not None:
            self.windows.enter(sequence.id, sequence.block_table)
        return len(chain) * self.block_size

    def num_cached_tokens(self, sequence: Sequence) -> int:
        """How many tokens `match_prefix` would cover now."""
        return len(self._known_prefix(sequence)) * self.block_size

    def _known_prefix(self, sequence: Sequence) -> list[bytes]:
        """The names of the leading blocks that can be found. Log probabilities of a prompt need all of it computed."""
        chain: list[bytes] = []
        if not self.prefix_caching or sequence.params.prompt_logprobs is not None:
            return chain
        for index in range((sequence.num_tokens - 1) // self.block_size):
            name = self._name(chain, sequence, index)
            if name not in self._block_of_name:
                break
            chain.append(name)
        if self.windows is not None:
            del chain[self.windows.num_found([self._block_of_name[name] for name in chain]) :]
        return chain

    def register(self, sequence: Sequence) -> None:
        """Name the blocks that have become full of computed tokens, and let go of what no window reaches any more."""
        if self.prefix_caching:
            chain = self._chains.setdefault(sequence.id, [])
            for index in range(len(chain), sequence.num_computed_tokens // self.block_size):
                chain.append(self._name(chain, sequence, index))
                self._give_name(chain[index], sequence.block_table[index])
        if self.windows is not None:
            for block in self.windows.slide(sequence.id, sequence.block_table, sequence.num_computed_tokens):
                if block not in self._name_of_block:
                    self.windows.forget(block)

    def _give_name(self, name: bytes, block: int) -> None:
        """The first block of a name keeps it, unless layers with a window have lost what it held."""
        known = self._block_of_name.get(name)
        if known is not None and self.windows is not None and not self.windows.keeps(known):
            del self._name_of_block[known]
            if not self._holders[known]:
                self._free.move_to_end(known, last=False)
            known = None
        if known is None:
            self._block_of_name[name] = block
            self._name_of_block[block] = name

    def check_integrity(self, sequences: Iterable[Sequence]) -> None:
        """Raise AssertionError unless every block is either free or held by exactly these sequences."""
        holders, held = [0] * self.num_blocks, list(sequences)
        for sequence in held:
            assert len(set(sequence.block_table)) == len(sequence.block_table), f"{sequence.id} holds a block twice"
            for index, block in enumerate(sequence.block_table):
                holders[block] += 1
                full = (index + 1) * self.block_size <= sequence.num_computed_tokens
                assert full or block not in self._name_of_block, f"block {block} is named before it is full"
        assert holders == self._holders, "holders are miscounted"
        if self.windows is not None:
            self.windows.check_integrity({each.id: each.block_table for each in held}, self._name_of_block)
        assert set(self._free) == {b for b in range(self.num_blocks) if not holders[b]}, (
            "a block is leaked or given twice"
        )
        assert {b: n for n, b in self._block_of_name.items()} == self._name_of_block, "names do not match blocks"
        shared = {b for b in range(self.num_blocks) if holders[b] > 1}
        if self.windows is not None:  # those that layers with a window have lost may have lost their names
            shared = {block for block in shared if self.windows.keeps(block)}
        assert shared <= set(self._name_of_block), "a block is shared without a name"

    def _release_last(self, sequence: Sequence) -> None:
        block = sequence.block_table.pop()
        if self.windows is not None:
            self.windows.leave(sequence.id, len(sequence.block_table), block)
        self._holders[block] -= 1
        if self._holders[block] == 0:
            self._free[block] = None
            if block not in self._name_of_block:  # nothing to remember: use it up first
                self._free.move_to_end(block, last=False)
                if self.windows is not None:
                    self.windows.forget(block)

    def _name(self, chain: list[bytes], sequence: Sequence, index: int) -> bytes:
        """The name of block `index`: a hash over the name before it and its own tokens."""
        parent = chain[index - 1] if index else root_name(self._salt, sequence.params.cache_salt)
        return extended_name(parent, sequence.token_ids[index * self.block_size : (index + 1) * self.block_size])
