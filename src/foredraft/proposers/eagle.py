"""Drafts with an EAGLE head: one decoder layer over the target's own features, trained to foresee its tokens.
Costs a run of that layer and of a small output head per depth of the tree, a fiftieth of the target's own each.
Shines on open text, where nothing can be copied."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Items

from torch import Tensor

from foredraft.backends.tree_ops import Nodes
from foredraft.batch import ForwardBatch, pack
from foredraft.models.heads.eagle import EagleHead, load_eagle
from foredraft.proposers.candidates import NodeLogits
from foredraft.proposers.computed_tokens import ComputedTokens
from foredraft.proposers.draft_trees import TreeShape
from foredraft.proposers.head_runner import MOST_NODES, HeadDrafter, HeadOptions, HeadRunner, LoadedHead, Scratch
from foredraft.proposers.run_ahead import Ends, Levels, run_ahead, split_catch_up
from foredraft.proposers.target import TargetModel
from foredraft.runtime.runner import Replayed
from foredraft.types import Sequence, Work


class Eagle(HeadDrafter):
    """See the module."""

    Options = HeadOptions
    kind = "eagle"

    def __init__(self, options: HeadOptions, target: TargetModel) -> None:
        def load(found: LoadedHead) -> EagleRunner:
            kv, positions = found.add_layers(target), target.max_model_len + MOST_NODES
            embedding = target.runner.decoder.embedding
            head = load_eagle(found.weights, embedding, found.taps, kv, positions, found.backend)
            return EagleRunner(head, target, found.close)

        model = self.acquire(target, options.dtype, load)
        super().__init__(model, options, self.files(target).config, MOST_NODES)


class EagleRunner(HeadRunner):
    """An EAGLE head. A draft token's K and V are computed again, from the target's features, once it is committed."""

    def __init__(self, head: EagleHead, target: TargetModel, close: Callable[[], None]) -> None:
        super().__init__(head.backend, target, ComputedTokens(target.kv.block_size), close)
        self._head = head
        self._scratch = Scratch(target)
        self._advance, self._extend = (Replayed(head.backend, head.stack.layers[0].shape) for _ in range(2))
        self._advance.warm(self.block_size, target.max_model_len, head.advance)
        self._extend.warm(self.block_size, target.max_model_len, head.extend)
        self._ahead = run_ahead(EagleAhead(head), head.backend, head.stack.layers[0].shape, self.block_size)

    def num_computed(self, sequence: Sequence) -> int:
        """The first token is never run: there is no feature before it."""
        return max(1, super().num_computed(sequence))

    def logits(self, works: Items[Work]) -> NodeLogits:
        begins = works[0].num_new_tokens > 0
        assert all((work.num_new_tokens > 0) == begins for work in works)
        self._scratch.lend(works, begins)
        batch, head = pack(works, self.block_size), self._head
        logits = self._advance(batch, head.advance) if begins else self._extend(batch, head.extend)
        return NodeLogits(logits, head.token_ids)

    def ahead(self, works: Items[Work], shape: TreeShape) -> Levels | None:
        if self._ahead is None:
            return None
        behind, works = split_catch_up(works, shape.depth)
        if behind:
            self.logits(behind)
        self._scratch.lend(works, begins=True)
        return self._ahead(works, pack(works, self.block_size), shape)


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
