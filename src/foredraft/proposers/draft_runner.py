"""A draft model, as its proposers share it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from collections.abc import Sequence as Items
from dataclasses import dataclass

from torch import Tensor

from foredraft.backends.tree_ops import Nodes
from foredraft.batch import ForwardBatch, pack
from foredraft.proposers.candidates import NodeLogits
from foredraft.proposers.computed_tokens import ComputedTokens
from foredraft.proposers.draft_trees import TreeShape
from foredraft.proposers.run_ahead import Ends, Levels, run_ahead, split_catch_up
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

    def __post_init__(self) -> None:
        runner = self.runner
        self.backend = runner.backend
        self.catch_up_beside = 32 if runner.backend.tree_ops is None else 2048  # two tiles; a run that fills a GPU
        ahead = DraftAhead(runner, self.vocab_size)
        self._ahead = run_ahead(ahead, runner.backend, runner.decoder.layers[0].shape, self.block_size)

    @property
    def runs_ahead(self) -> bool:
        return self._ahead is not None

    def can_draft(self, sequence: Sequence, known: int) -> bool:
        return self.can_read(sequence.token_ids[known:])

    def can_read(self, tokens: Iterable[int]) -> bool:
        """Whether the model has all of these tokens: its vocabulary may be padded to fewer than the target has."""
        return max(tokens, default=0) < self.runner.decoder.config.vocab_size

    def num_computed(self, sequence: Sequence) -> int:
        return sequence.num_computed_tokens if self.computed is None else self.computed.num_computed(sequence)

    def record(self, sequence: Sequence, known: int, drafted: Items[int], num_slots: int) -> None:
        if self.computed is not None:
            self.computed.record(sequence, known, drafted, num_slots)

    def release(self, sequence_ids: Iterable[int]) -> None:
        if self.computed is not None:
            self.computed.release(sequence_ids)

    def ahead(self, works: Items[Work], shape: TreeShape) -> Levels | None:
        longest = max(work.sequence.num_tokens for work in works) + shape.depth
        if self._ahead is None or longest > len(self.runner.decoder.rope):
            return None
        behind, works = split_catch_up(works, shape.depth)
        if behind:
            self.logits(behind)
        return self._ahead(works, pack(works, self.block_size), shape)

    def logits(self, works: Items[Work]) -> NodeLogits:
        """The logits that the works need."""
        return _by_token(self.runner.forward(pack(works, self.block_size)).logits, self.runner, self.vocab_size)


class DraftAhead:
    """A whole draft on the device."""

    def __init__(self, runner: Runner, vocab_size: int) -> None:
        self._runner, self._vocab_size = runner, vocab_size

    def begin(self, plan: ForwardBatch, ends: Ends) -> NodeLogits:
        return self._logits(self._run(plan)[ends.rows])

    def extend(self, nodes: Nodes, batch: ForwardBatch, depth: int) -> NodeLogits:
        return self._logits(self._run(batch))

    def _run(self, batch: ForwardBatch) -> Tensor:
        runner = self._runner
        return runner.decoder.run(batch, runner.kv, runner.backend)

    def _logits(self, normed: Tensor) -> NodeLogits:
        logits = self._runner.decoder.logits(normed, self._runner.backend)
        return _by_token(logits, self._runner, self._vocab_size)


def _by_token(logits: Tensor, runner: Runner, vocab_size: int) -> NodeLogits:
    """[rows, vocab], where vocab is the model's own, or the narrower of its and the target's."""
    own = runner.decoder.vocabulary
    return NodeLogits(logits[:, :vocab_size]) if own is None else NodeLogits(logits, own.token_ids)
