"""Drafting with a whole model: a smaller one, the target in fewer bits, or its first layers. Another proposer may draft
for the model, as the model drafts for the target."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from collections.abc import Sequence as Items
from dataclasses import dataclass, replace
from functools import partial

from torch import Tensor

from foredraft.backends.base import Backend
from foredraft.backends.choose import choose_backend
from foredraft.backends.row_tiles import set_tiles_beside
from foredraft.backends.tree_ops import Nodes
from foredraft.batch import ForwardBatch, pack
from foredraft.errors import InvalidSpec
from foredraft.models.checkpoint import Checkpoint
from foredraft.models.decoder import Decoder, load_decoder
from foredraft.proposers.base import Proposer
from foredraft.proposers.model.candidates import NodeLogits
from foredraft.proposers.model.computed_tokens import ComputedTokens
from foredraft.proposers.model.drafter import TreeDrafter
from foredraft.proposers.model.run_ahead import Ends, Levels, run_ahead, split_catch_up
from foredraft.proposers.model.tree import Tree, TreeShape
from foredraft.proposers.target import TargetModel
from foredraft.runtime.runner import Runner
from foredraft.types import NO_DRAFT, Commit, Sequence, Work


@dataclass(eq=False)
class WholeModel:
    """A model that drafts: its runner, and the tokens of each sequence that it has computed. Proposers that differ only
    in their options share one."""

    runner: Runner
    block_size: int
    vocab_size: int  # of the target: ids beyond it cannot be drafted
    computed: ComputedTokens | None  # None: its K and V are the target's own
    close: Callable[[], None]  # ends one use of it

    def __post_init__(self) -> None:
        runner = self.runner
        self.backend = runner.backend
        self.catch_up_beside = 32 if runner.backend.tree_ops is None else 2048  # two tiles; a run that fills a GPU
        ahead = WholeModelAhead(runner, self.vocab_size)
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

    def ahead(self, works: Items[Work], shape: TreeShape, budgets: Items[int], min_score: float) -> Levels | None:
        longest = max(work.sequence.num_tokens for work in works) + shape.depth
        if self._ahead is None or longest > len(self.runner.decoder.rope):
            return None
        behind, works = split_catch_up(works, shape)
        if behind:
            self.logits(behind)
        self.runner.tell_window_map()
        return self._ahead(works, pack(works, self.block_size), shape, budgets, min_score)

    def logits(self, works: Items[Work]) -> NodeLogits:
        """The logits that the works need."""
        return _by_token(self.runner.forward(pack(works, self.block_size)).logits, self.runner, self.vocab_size)


@dataclass(frozen=True)
class WholeModelAhead:
    """A whole draft on the device."""

    runner: Runner
    vocab_size: int

    def begin(self, plan: ForwardBatch, ends: Ends) -> NodeLogits:
        return self._logits(plan, ends.rows)

    def extend(self, nodes: Nodes, batch: ForwardBatch, depth: int) -> NodeLogits:
        return self._logits(batch, slice(None))

    def _logits(self, batch: ForwardBatch, rows: Tensor | slice) -> NodeLogits:
        decoder, backend = self.runner.decoder, self.runner.backend
        normed = decoder.run(batch, self.runner.kv, backend)[rows]
        return _by_token(decoder.logits(normed, backend), self.runner, self.vocab_size)


def _by_token(logits: Tensor, runner: Runner, vocab_size: int) -> NodeLogits:
    """[rows, vocab], where vocab is the model's own, or the narrower of its and the target's."""
    own = runner.decoder.vocabulary
    return NodeLogits(logits[:, :vocab_size]) if own is None else NodeLogits(logits, own.token_ids)


def second_model(name: str, checkpoint: Checkpoint, dtype: str, target: TargetModel, rounds_all: bool) -> WholeModel:
    """A whole model beside the target; `rounds_all` as in load_decoder."""
    load = partial(load_decoder, checkpoint, dtype, target.max_model_len, rounds_all=rounds_all)
    return beside(f"{name} {dtype}", dtype, target, load)


def beside(name: str, dtype: str, target: TargetModel, load_model: Callable[[Backend], Decoder]) -> WholeModel:
    """A model with a layer group of its own; loaded once under its name."""

    def load() -> WholeModel:
        backend = choose_backend(target.runner.backend.name, dtype, target.runner.backend.device, target.threads)
        decoder = load_model(backend)
        set_tiles_beside(target.runner.backend, backend, decoder.linears)
        runner = Runner(decoder, backend, target.kv.add_group(name, decoder.config, backend))
        runner.warm(target.kv.block_size, target.max_model_len)
        return WholeModel(
            runner,
            target.kv.block_size,
            target.checkpoint.config.vocab_size,
            ComputedTokens(target.kv.block_size),
            close=partial(target.draft_models.release, name),
        )

    return target.draft_models.acquire(name, load)


@dataclass(frozen=True)
class DrafterOptions:
    """The options of all draft models."""

    k: int = 4  # draft tokens, one after the other
    width: int = 1  # branches at every depth; 1 is a chain

    def __post_init__(self) -> None:
        if not (self.k >= 1 and self.width >= 1 and self.k * self.width <= 64):
            raise InvalidSpec(f"k={self.k}, width={self.width}: both must be at least 1, and k times width at most 64.")


class ModelDrafter(TreeDrafter):
    """Drafts with a model. `helper`, if there is one, drafts for the model as the model drafts for the target. The
    draft is the same without it."""

    def __init__(self, name: str, model: WholeModel, options: DrafterOptions, helper: Proposer | None = None) -> None:
        super().__init__(name, model, TreeShape(options.k, options.width))
        self.runner = model
        self.helper = helper

    def observe(self, commits: Items[Commit]) -> None:
        if self.helper is not None:
            self.helper.observe(commits)

    def release(self, sequence_ids: Iterable[int]) -> None:
        ids = list(sequence_ids)
        super().release(ids)
        if self.helper is not None:
            self.helper.release(ids)

    def close(self) -> None:
        super().close()
        if self.helper is not None:
            self.helper.close()

    def clear(self) -> None:
        if self.helper is not None:
            self.helper.clear()

    def _can_run_ahead(self, tree: Tree) -> bool:
        return self.helper is None and super()._can_run_ahead(tree)

    def _works(self, growing: list[Tree]) -> list[Work]:
        """The works, each with the helper's draft behind its chain; the model adds a token of its own behind that."""
        if self.helper is None:
            return super()._works(growing)
        extended = [replace(g.sequence, token_ids=[*g.sequence.token_ids, *g.tokens]) for g in growing]
        drafts = self.helper.propose(extended, [tree.budget - len(tree.tokens) - 1 for tree in growing], 0.0)
        readable = [draft if self.runner.can_read(draft.tokens) else NO_DRAFT for draft in drafts]
        return [self._work(tree, below) for tree, below in zip(growing, readable, strict=True)]
