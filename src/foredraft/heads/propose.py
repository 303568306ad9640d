"""What the proposers with trained heads share: their options, and what a head needs of the target and of the cache."""

from __future__ import annotations

from abc import ABC, abstractmethod
from array import array
from collections.abc import Iterable
from collections.abc import Sequence as Items
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from foredraft.backends.choose import choose_backend
from foredraft.backends.layers import LayerKV
from foredraft.backends.row_tiles import set_tiles_beside
from foredraft.batch import PackedBatch, pack
from foredraft.config import DTYPES
from foredraft.errors import InvalidSpec
from foredraft.heads.base import MAX_BLOCK
from foredraft.heads.files import HeadFiles
from foredraft.heads.weights import HeadWeights, TapReader, layer_config
from foredraft.models.decoder import Decoder
from foredraft.proposers.model.candidates import NodeLogits
from foredraft.proposers.model.computed_tokens import ComputedTokens
from foredraft.proposers.model.depths import FEW
from foredraft.proposers.model.drafter import TreeDrafter
from foredraft.proposers.model.run_ahead import split_catch_up
from foredraft.proposers.model.tree import TreeShape
from foredraft.proposers.model.whole_drafts import Ahead, WholeDrafts
from foredraft.proposers.target import TargetModel
from foredraft.types import Sequence, Work

MOST_NODES = MAX_BLOCK  # that a tree of a head may have, run or drafted: it fits where a block does
TREES = ("chain", "static", "dynamic")


@dataclass(frozen=True)
class HeadOptions:
    k: int = 0  # depth of a draft; 0: that of the head
    nodes: int = 16  # of a tree
    width: int = 4  # branches that are followed at every depth
    tree: str = "dynamic"
    dtype: str = "auto"  # of the head's weights; auto: 8 or 4 bits where the file has them, else the target's

    def __post_init__(self) -> None:
        if not (0 <= self.k <= MOST_NODES and 1 <= self.nodes <= MOST_NODES and 1 <= self.width <= MOST_NODES):
            raise InvalidSpec(
                f"k={self.k}, nodes={self.nodes}, width={self.width}: k must be from 0, which means the head's own, to "
                f"{MOST_NODES}, and the others from 1 to {MOST_NODES}."
            )
        if self.k * self.width > MOST_NODES and self.tree != "chain":
            raise InvalidSpec(f"k={self.k}, width={self.width}: k times width must be at most {MOST_NODES}.")
        if self.tree not in TREES:
            raise InvalidSpec(f"tree={self.tree!r} is not known; use {', '.join(TREES)}.")
        if self.dtype not in ("auto", *DTYPES):
            raise InvalidSpec(f"dtype={self.dtype!r} is not known; use auto, {', '.join(DTYPES)}.")

    def shape(self, name: str, own_depth: int, most: int) -> TreeShape:
        """The shape of the trees, for a head that drafts `own_depth` tokens unless told, and `most` at most."""
        if self.k > most:
            raise InvalidSpec(f"{name}: k={self.k} must be at most {most}, which is what this head drafts.")
        depth = self.k or min(own_depth, most)
        if self.tree == "chain":
            return TreeShape(depth, 1, prunes=True, nodes=depth)
        width = max(1, min(self.width, MOST_NODES // depth))
        return TreeShape(depth, width, prunes=True, nodes=self.nodes, static=self.tree == "static")


class HeadRunner(ABC):
    """A head as a model that drafts (see DraftingModel): the parts that are the same for every kind."""

    _computed: ComputedTokens | None = None  # for kinds with K and V of their own
    _ahead: Ahead | None = None  # for kinds whose whole drafts can run without the host

    def __init__(self, name: str, files: HeadFiles, dtype: str, target: TargetModel) -> None:
        """`name` is that of its cache group, and `dtype` the option of its proposer."""
        shared, taps, is_auto = target.runner.backend, target.runner.taps, dtype == "auto"
        assert taps is not None, "heads are loaded with the model, whose runs then write taps"
        # A backend of its own: it may be warmed on another thread while the target runs.
        backend = choose_backend(shared.name, target.dtype, shared.device, target.threads)
        self.backend = backend
        self.block_size = target.kv.block_size
        self.vocab_size = target.runner.decoder.config.vocab_size
        # A head is small: running so many rows takes no longer than a step of the target.
        self.catch_up_beside = 256 if backend.tree_ops is None else 2048
        self._name, self._target = name, target
        self._lanes: dict[int, int] = {}  # the sequences of a call, by their ids
        self._taps = TapReader(files.config, taps, backend)
        self._weights = HeadWeights(files.config, files.read(), target.dtype if is_auto else dtype, is_auto, backend)
        self._load()
        set_tiles_beside(shared, backend, self._weights.linears)

    @abstractmethod
    def _load(self) -> None:
        """Make the head out of its weights and taps."""

    def _add_layers(self) -> tuple[HeadWeights, Decoder, TapReader, list[LayerKV], int]:
        """What a head with layers is loaded from: with the target, the K and V of these layers in the target's cache,
        which has scratch blocks for draft tokens, and the number of positions."""
        target, config = self._target, layer_config(self._weights.config)
        blocks = scratch_blocks(target.max_num_seqs, self.block_size)
        kv = target.kv.add_group(self._name, config, self.backend, blocks)
        return self._weights, target.runner.decoder, self._taps, kv, target.max_model_len + MOST_NODES

    def close(self) -> None:
        self._target.draft_models.release(self._name)

    @property
    def runs_ahead(self) -> bool:
        return self._ahead is not None

    @property
    def stops_early(self) -> bool:
        """Whether whole drafts end where no further level is worth its time."""
        return self._ahead is not None and self._ahead.stops_early

    def ahead(self, works: Items[Work], shape: TreeShape, budgets: Items[int], min_score: float) -> WholeDrafts | None:
        if self._ahead is None:
            return None
        behind, works = split_catch_up(works, shape)
        if behind:
            self.logits(behind)
        self._lend(works, begins=True)
        return self._ahead(works, self._packed(works), shape, budgets, min_score)

    def _lend(self, works: Items[Work], begins: bool) -> None:
        """Put scratch blocks, in which the call keeps K and V of draft tokens, behind those of the own tokens of its
        sequences, which are copies made for it; `begins`: anew. They lie behind the blocks of the pool."""
        if begins:
            self._lanes = {work.sequence.id: lane for lane, work in enumerate(works)}
        count = scratch_blocks(1, self.block_size)
        for sequence in (work.sequence for work in works):
            first = self._target.kv.num_blocks + self._lanes[sequence.id] * count
            table = array("i", sequence.block_table[: -(-sequence.num_tokens // self.block_size)])
            table.extend(range(first, first + count))
            sequence.block_table = table

    def _packed(self, works: Items[Work]) -> PackedBatch:
        """What the head runs of works."""
        return pack(works, self.block_size)

    def warm(self, shape: TreeShape, max_sequences: int) -> None:
        """Make what whole drafts of this shape need on the device, for up to so many sequences at once."""
        if self._ahead is not None:
            self._ahead.warm(shape, self._target.max_model_len, min(max_sequences, self._target.max_num_seqs))

    @abstractmethod
    def logits(self, works: Items[Work]) -> NodeLogits:
        """See DraftingModel. The works of one call are all new tokens, or all new nodes."""

    def can_draft(self, sequence: Sequence, known: int) -> bool:
        """Whether the target has run all tokens but the last, so that their taps are there."""
        return sequence.num_tokens > 1 and sequence.num_computed_tokens >= sequence.num_tokens - 1

    def num_computed(self, sequence: Sequence) -> int:
        return sequence.num_tokens - 1 if self._computed is None else self._computed.num_computed(sequence)

    def record(self, sequence: Sequence, known: int, drafted: Items[int], num_slots: int) -> None:
        """Only committed tokens count: those of the draft were run with features that the head made up."""
        if self._computed is not None:
            self._computed.record(sequence, known, (), sequence.num_tokens)

    def release(self, sequence_ids: Iterable[int]) -> None:
        if self._computed is not None:
            self._computed.release(sequence_ids)


class NewNode(NamedTuple):
    """A node whose logits are wanted: which token of which sequence, and at which depth. The root has depth 0."""

    sequence_id: int
    depth: int
    token: int


def new_nodes(works: Items[Work]) -> list[NewNode]:
    """The nodes that works have logits for, in order."""
    nodes: list[NewNode] = []
    for work in works:
        sequence, draft = work.sequence, work.draft
        if work.num_new_tokens and work.reaches_end:
            nodes.append(NewNode(sequence.id, 0, sequence.token_ids[-1]))
        depths = draft.depths
        for node in range(work.num_computed_nodes, len(draft)):
            nodes.append(NewNode(sequence.id, depths[node], draft.tokens[node]))
    return nodes


def scratch_blocks(num_sequences: int, block_size: int) -> int:
    return num_sequences * -(-MOST_NODES // block_size)


class HeadDrafter(TreeDrafter):
    """Drafts with the head of one kind that was loaded with the model."""

    Options = HeadOptions
    is_head = True
    kind: ClassVar[str]
    runner: type[HeadRunner]
    drafts_on = False  # from its own output: each level is a run, and a draft may be longer than the head's block

    def __init__(self, options: HeadOptions, target: TargetModel) -> None:
        if self.kind not in target.heads:
            has = f"it has {', '.join(target.heads)}" if target.heads else "it has none"
            raise InvalidSpec(
                f"{self.kind}: no head of this kind was loaded with the model, {has}; start with head=PATH, or train "
                f"one: foredraft train {self.kind} --out PATH."
            )
        files, name = target.heads[self.kind], f"{self.kind} {options.dtype}"
        config = files.config
        shape = options.shape(self.kind, config.block, MOST_NODES if self.drafts_on else config.block)
        # Loaded once for all proposers of this kind.
        model = target.draft_models.acquire(name, lambda: self.runner(name, files, options.dtype, target))
        shallower = [] if shape.static or model.stops_early or not self.drafts_on else shape.shallower
        super().__init__(self.kind, model, shape, shallower)
        model.warm(shape, target.max_num_seqs)
        for each in shallower:
            model.warm(each, FEW)
        self.taps = frozenset(config.taps)
        self.acceptance = config.acceptance
