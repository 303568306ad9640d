"""Drafts with an EAGLE head: one decoder layer over the target's own features, trained to foresee its tokens.
Costs a run of that layer and of a small output head per depth of the tree, a fiftieth of the target's own each.
Shines on open text, where nothing can be copied."""

from __future__ import annotations

from collections.abc import Sequence as Items

from torch import Tensor

from foredraft.backends.tree_ops import Nodes
from foredraft.batch import ForwardBatch
from foredraft.heads.dflash.propose import BlockRunner
from foredraft.heads.eagle.serve import EagleHead, FusedEagleHead, ParallelEagleHead
from foredraft.heads.propose import HeadDrafter, HeadOptions, HeadRunner
from foredraft.proposers.model.candidates import NodeLogits
from foredraft.proposers.model.computed_tokens import ComputedTokens
from foredraft.proposers.model.grow_ahead import GrowAhead
from foredraft.proposers.model.run_ahead import Ends, run_ahead
from foredraft.proposers.target import TargetModel
from foredraft.runtime.runner import Replayed
from foredraft.types import Sequence, Work


class EagleRunner(HeadRunner):
    """An EAGLE head. A draft token's K and V are computed again, from the target's features, once it is committed."""

    def _load(self) -> None:
        self._computed = ComputedTokens(self.block_size)
        self._head = head = self._served()(*self._add_layers())
        self._advance, self._extend = (Replayed(head.backend, head.stack.layers[0].shape) for _ in range(2))
        self._advance.warm(self.block_size, self._target.max_model_len, head.advance)
        self._extend.warm(self.block_size, self._target.max_model_len, head.extend)
        self._ahead = run_ahead(EagleAhead(head), head.backend, head.stack.layers[0].shape, self.block_size)
        taps_head = head.as_taps_head
        grow = None if taps_head is None else head.backend.tree_grower(taps_head)
        if grow is not None:
            self._ahead = GrowAhead(grow)

    def _served(self) -> type[EagleHead]:
        return FusedEagleHead if self._weights.config.fuses_embedding else EagleHead

    def num_computed(self, sequence: Sequence) -> int:
        """The first token is never run: there is no feature before it."""
        return max(1, super().num_computed(sequence))

    def logits(self, works: Items[Work]) -> NodeLogits:
        begins = works[0].num_new_tokens > 0
        assert all((work.num_new_tokens > 0) == begins for work in works)
        self._lend(works, begins)
        batch, head = self._packed(works), self._head
        logits = self._advance(batch, head.advance) if begins else self._extend(batch, head.extend)
        return NodeLogits(logits, head.token_ids)


class EagleAhead:
    """A whole draft on the device: every row reads the output of the row before it, wherever that lies."""

    def __init__(self, head: EagleHead) -> None:
        self._head = head

    def begin(self, plan: ForwardBatch, ends: Ends) -> NodeLogits:
        y, normed = self._head.run(plan, self._head.tapped(plan))
        self._y = y[ends.rows]
        return self._logits(normed[ends.rows])

    def extend(self, nodes: Nodes, batch: ForwardBatch, depth: int) -> NodeLogits:
        self._y, normed = self._head.run(batch, self._y[nodes.parents])
        return self._logits(normed)

    def _logits(self, normed: Tensor) -> NodeLogits:
        return NodeLogits(self._head.backend.logits(normed, self._head.output), self._head.token_ids)


class ParallelEagleRunner(BlockRunner):
    """A P-EAGLE head. The first token has no feature before it, so it is not part of the context."""

    serves = ParallelEagleHead

    def num_computed(self, sequence: Sequence) -> int:
        return max(1, super().num_computed(sequence))

    def can_draft(self, sequence: Sequence, known: int) -> bool:
        """There must be some context."""
        return sequence.num_tokens > 2 and super().can_draft(sequence, known)


class Eagle(HeadDrafter):
    kind = "eagle"
    runner: type[HeadRunner] = EagleRunner
    drafts_on = True

    def __init__(self, options: HeadOptions, target: TargetModel) -> None:
        files = target.heads.get(self.kind)
        if files is not None and files.config.block_input == "masked":
            self.runner, self.drafts_on = ParallelEagleRunner, False
        super().__init__(options, target)


PROPOSER = Eagle
