"""Drafts with a DFlash head: a block of rows through a few small layers in one pass, corrected along every path.
Costs one run of as many rows as the block has, whatever the depth, and a small product per node of the tree.
Shines where rows are cheap: it drafts deep trees for less than any head that runs token by token."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Items
from typing import ClassVar

import torch
from torch import Tensor

from foredraft.backends.tree_ops import Nodes
from foredraft.batch import ForwardBatch, PackedBatch
from foredraft.heads.dflash.serve import BlockHead, Correction, DFlashHead, blocks_behind, correction, pack_blocks
from foredraft.heads.propose import HeadDrafter, HeadRunner, new_nodes
from foredraft.proposers.model.candidates import NodeLogits
from foredraft.proposers.model.computed_tokens import ComputedTokens
from foredraft.proposers.model.run_ahead import Ends, run_ahead
from foredraft.proposers.model.tree import computed_up_to
from foredraft.runtime.runner import Replayed
from foredraft.types import Sequence, Work


class BlockRunner(HeadRunner):
    """A head that drafts blocks. The first run of a call runs the blocks of its sequences; further ones correct their
    rows."""

    serves: ClassVar[Callable[..., BlockHead]]

    def _load(self) -> None:
        self._computed = ComputedTokens(self.block_size)
        self._head = head = type(self).serves(*self._add_layers())
        self._correction = correction(head, self._weights)
        self._context, self._blocks = (Replayed(head.backend, head.stack.layers[0].shape) for _ in range(2))
        self._context.warm(self.block_size, self._target.max_model_len, head.context)
        self._blocks.warm(self.block_size, self._target.max_model_len, head.blocks)
        ahead = BlockAhead(head, self._correction)
        self._ahead = run_ahead(ahead, head.backend, head.stack.layers[0].shape, self.block_size)

    def record(self, sequence: Sequence, known: int, drafted: Items[int], num_slots: int) -> None:
        """The last token has no features yet, so it is not part of the context."""
        super().record(sequence, min(known, sequence.num_tokens - 1), drafted, num_slots)

    def logits(self, works: Items[Work]) -> NodeLogits:
        if works[0].num_new_tokens:
            return self._begin(works)
        nodes = new_nodes(works)
        lanes, previous = (
            torch.tensor(values, device=self.backend.device)
            for values in ([self._lanes[node.sequence_id] for node in nodes], [node.token for node in nodes])
        )
        (depth,) = {node.depth for node in nodes}  # trees grow level by level
        return _after(self._correction, lanes, depth, previous)

    def _begin(self, works: Items[Work]) -> NodeLogits:
        """Run the features of tokens that are new to the head, then a block for every sequence that is up to date."""
        head = self._head
        self._context(self._packed(works), head.context)
        ended = [work for work in works if work.reaches_end]
        if not ended:
            return NodeLogits(torch.empty(0, 1))
        self._lend(ended, begins=True)
        sequences = [work.sequence for work in ended]
        y = self._blocks(pack_blocks(sequences, head.shape, self.block_size), head.blocks)
        anchors = torch.tensor([sequence.token_ids[-1] for sequence in sequences], device=self.backend.device)
        return _begun(self._correction, head.drafting(y), anchors)

    def _packed(self, works: Items[Work]) -> PackedBatch:
        """The tokens of works that have features: all but the last one of a sequence, and one at least, because a
        block reads the last feature."""
        run: list[Work] = []
        for sequence, num_new_tokens, *_ in works:
            end = min(sequence.num_computed_tokens + num_new_tokens, sequence.num_tokens - 1)
            start = min(sequence.num_computed_tokens, end - 1)
            run.append(Work(computed_up_to(sequence, start), end - start))
        return super()._packed(run)


class BlockAhead:
    """A whole draft on the device: the features of new tokens, the blocks behind them, and their correction."""

    def __init__(self, head: BlockHead, correction: Correction) -> None:
        self._head, self._correction = head, correction

    def begin(self, plan: ForwardBatch, ends: Ends) -> NodeLogits:
        head = self._head
        assert head.backend.tree_ops is not None
        head.context(plan)
        rows = blocks_behind(plan, ends.lengths, ends.tokens, head.shape)
        batch = head.backend.tree_ops.batch(plan, rows, head.shape.rows)
        y = head.drafting(head.blocks(batch))
        return _begun(self._correction, y, ends.tokens)

    def extend(self, nodes: Nodes, batch: ForwardBatch, depth: int) -> NodeLogits:
        return _after(self._correction, batch.sequences.long(), depth, nodes.token_ids)


def _begun(correction: Correction, y: Tensor, anchors: Tensor) -> NodeLogits:
    """The logits behind anchors, from the rows of their blocks."""
    logits, lanes = correction.begin(y, anchors), torch.arange(len(anchors), device=anchors.device)
    return NodeLogits(logits, correction.head.token_ids, correction.confidence(lanes, 0, anchors))


def _after(correction: Correction, lanes: Tensor, depth: int, previous: Tensor) -> NodeLogits:
    logits, token_ids = correction.after(lanes, depth, previous)
    return NodeLogits(logits, token_ids, correction.confidence(lanes, depth, previous))


class DFlashRunner(BlockRunner):
    serves = DFlashHead


class DFlash(HeadDrafter):
    kind = "dflash"
    runner = DFlashRunner


PROPOSER = DFlash
