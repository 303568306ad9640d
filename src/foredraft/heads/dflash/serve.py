"""A DFlash head as it is served: a block of rows in one pass, and a correction along the block.

The target's features are K and V of committed positions in every layer, at the slots of those positions. The rows of a
block see them and each other, in both directions unless a layer is causal. With n committed tokens, row k stands at
position n-1+k and predicts token n+k; in blocks that do not sample from the anchor it predicts the token at its own
position, so that there is one more row and the first is dropped. A correction tells a row the token before its own; it
is applied to the few most probable tokens only.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import groupby
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from foredraft.backends.base import Backend
from foredraft.backends.layers import LayerKV, Linear, Stack
from foredraft.batch import ForwardBatch, PackedBatch
from foredraft.heads.weights import HeadWeights, TapReader, layer_shape, norm_each
from foredraft.models.decoder import Decoder
from foredraft.types import Sequence


class BlockHead(Protocol):
    """A head whose drafts are blocks of rows: all that runners and corrections of blocks know of one."""

    backend: Backend
    shape: BlockShape
    stack: Stack
    output: Linear
    token_ids: Tensor  # [draft_vocab]

    def context(self, batch: ForwardBatch) -> Tensor:
        """Make committed positions part of what blocks see."""

    def blocks(self, batch: ForwardBatch) -> Tensor:
        """The rows of blocks (see `pack_blocks`) through all layers: [rows, hidden], normed."""

    def drafting(self, y: Tensor) -> Tensor:
        """The rows that predict a token, by sequence: [sequences, block, hidden]."""


class DFlashHead:
    def __init__(
        self, weights: HeadWeights, target: Decoder, taps: TapReader, kv: list[LayerKV], max_positions: int
    ) -> None:
        config = weights.config
        self.backend = backend = weights.backend
        self.embedding, self.taps, self.kv = weights.embedding(target), taps, kv
        is_causal = [layer in config.causal_layers for layer in range(config.num_layers)]
        self.shape = BlockShape(config.block + (not config.sample_from_anchor), all(is_causal))
        self.dropped = self.shape.rows - config.block
        self.tap_norms: list[Tensor] = []  # none where taps are read as they are
        self.injected: tuple[Linear, Linear] | None = None  # of anchors and of last features; None: rows are masked
        self.fc = weights.linear("fc.weight")
        self.hidden_norm = weights.vector("hidden_norm.weight")
        if config.block_input == "injected":
            self.tap_norms = [weights.vector(f"tap_norms.{index}.weight") for index in range(len(config.taps))]
            self.injected = weights.linear("anchor_proj.weight"), weights.linear("feature_proj.weight")
        # [block, hidden], or [1, hidden] for all rows but the anchor's
        self.masks = weights.vector("mask_embedding.weight").to(backend.activation_dtype)
        prefixes = [f"layers.{index}" for index in range(config.num_layers)]
        layers = (weights.layer(prefix, layer_shape(config, index)) for index, prefix in enumerate(prefixes))
        self.stack = weights.stack(tuple(layers), max_positions)
        # Layers one after the other in which rows see the same keys: their stack and caches, and whether they see only
        # those before them while other layers see all.
        self.parts: list[tuple[Stack, list[LayerKV], bool]] = []
        for causal, indices in groupby(range(config.num_layers), key=is_causal.__getitem__):
            some = list(indices)
            part = replace(self.stack, layers=self.stack.layers[some[0] : some[-1] + 1])
            self.parts.append((part, kv[some[0] : some[-1] + 1], causal and not self.shape.causal))
        self.keys_values = [weights.linear(*(f"{p}.self_attn.{side}_proj.weight" for side in "kv")) for p in prefixes]
        self.context_shape = replace(layer_shape(config), num_heads=0)  # of rows that only give keys and values
        self.output = weights.output(target)
        self.token_ids = weights.token_ids  # [draft_vocab]
        slots = len(kv[0].k)
        # [slots, hidden] of committed positions
        self.features = torch.empty((slots, config.hidden_size), dtype=backend.activation_dtype, device=backend.device)

    def context(self, batch: ForwardBatch) -> Tensor:
        """Make committed positions part of what blocks see. Returns their features [rows, hidden]."""
        backend, eps = self.backend, self.stack.norm_eps
        taps = self.taps.rows(batch.slots.clamp(min=0))
        taps = norm_each(taps, self.tap_norms, eps, backend)
        rows = backend.rms_norm(backend.linear(taps, self.fc), self.hidden_norm, eps)
        for layer, keys_values, kv in zip(self.stack.layers, self.keys_values, self.kv, strict=True):
            projected = backend.linear(rows, keys_values)
            backend.rope_and_store(projected, (None, layer.k_norm), self.stack.rope, kv, self.context_shape, batch)
        backend.store(rows, self.features, 0, batch.slots)
        return rows

    def blocks(self, batch: ForwardBatch) -> Tensor:
        backend = self.backend
        anchors = backend.embed(batch.token_ids, self.embedding)
        places = batch.positions - batch.prefix_lens  # in the block
        if self.injected is None:
            x = torch.where(places[:, None] == 0, anchors, self.masks)
        else:
            features = self.features[feature_slots(batch)]
            anchor, feature = self.injected
            x = backend.linear(anchors, anchor) + backend.linear(features, feature) + self.masks[places]
        for stack, kv, is_causal in self.parts:
            seen = replace(batch, path_lens=batch.path_lens.clamp(max=(places + 1).int())) if is_causal else batch
            x, normed = backend.run_layers(x, stack, kv, seen)
        return normed

    def drafting(self, y: Tensor) -> Tensor:
        return y.view(-1, self.shape.rows, y.shape[1])[:, self.dropped :]


class BlockShape(NamedTuple):
    rows: int
    causal: bool


def feature_slots(batch: ForwardBatch) -> Tensor:
    """Of every row of a block, the slot of the last position that has a feature: the one before the anchor."""
    last = (batch.prefix_lens - 1).clamp(min=0)
    table = batch.block_tables[batch.sequences, last // batch.block_size].long()
    return table * batch.block_size + last % batch.block_size


def pack_blocks(sequences: list[Sequence], shape: BlockShape, block_size: int) -> PackedBatch:
    """A block of rows for every sequence. Its K and V lie behind the blocks of the sequence's own tokens."""
    block = shape.rows
    count, rows = len(sequences), np.arange(block)
    lengths = np.array([sequence.num_tokens for sequence in sequences])
    block_tables = np.zeros((count, max(len(sequence.block_table) for sequence in sequences)), np.int32)
    for index, sequence in enumerate(sequences):
        block_tables[index, : len(sequence.block_table)] = sequence.block_table
    places = (-(-lengths // block_size) * block_size)[:, None] + rows[None, :]  # [sequences, block]
    slots = (
        np.take_along_axis(block_tables, places // block_size, 1).astype(np.int64) * block_size + places % block_size
    )
    anchors = np.array([sequence.token_ids[-1] for sequence in sequences]).repeat(block)
    positions = (lengths[:, None] - 1 + rows[None, :]).reshape(-1)
    prefix_lens = (lengths - 1).repeat(block)
    path_lens = np.tile(rows + 1, count) if shape.causal else np.full(count * block, block)
    return PackedBatch(
        wide=np.array([anchors, positions, slots.reshape(-1)], np.int64),
        narrow=np.array([np.arange(count).repeat(block), prefix_lens, path_lens], np.int32),
        block_tables=block_tables,
        paths=np.repeat(places, block, axis=0).astype(np.int32),
        row_counts=[block] * count,
        logit_rows=None,
        block_size=block_size,
        max_keys=int(lengths.max()) - 1 + block,
        reach=int(places.max()) + 1,
    )


def blocks_behind(plan: ForwardBatch, lengths: Tensor, anchors: Tensor, shape: BlockShape) -> ForwardBatch:
    """What `pack_blocks` makes, on the device: a block behind each of the first sequences of a plan, which have
    `lengths` tokens with `anchors` as their last; those of length 0 store nothing."""
    size, count, device, block = plan.block_size, len(lengths), lengths.device, shape.rows
    rows = torch.arange(block, device=device)
    places = (lengths + size - 1)[:, None] // size * size + rows[None, :]  # [sequences, block]
    sequences = torch.arange(count, device=device)[:, None].expand(count, block)
    slots = plan.block_tables[sequences, places // size].long() * size + places % size
    return ForwardBatch(
        token_ids=anchors.repeat_interleave(block),
        positions=((lengths - 1).clamp(min=0)[:, None] + rows).flatten(),
        slots=torch.where(lengths[:, None] > 0, slots, -1).flatten(),
        sequences=sequences.flatten().int(),
        block_tables=plan.block_tables,
        prefix_lens=(lengths - 1).clamp(min=0).int().repeat_interleave(block),
        paths=places.int().repeat_interleave(block, 0),
        path_lens=(rows + 1 if shape.causal else torch.full_like(rows, block)).int().repeat(count),
        logit_rows=None,
        block_size=size,
        max_keys=plan.max_keys,
    )


class Correction:
    """Logits of the rows of blocks. This one corrects none: a row predicts its token without knowing the one before."""

    y: Tensor  # [sequences, block, hidden]
    logits: Tensor  # [sequences, block, draft_vocab], of rows that do not know the token before
    first: Linear  # of a Markov term: W1

    def __init__(self, head: BlockHead, weights: HeadWeights) -> None:
        self.head = head
        self._confidence: tuple[Tensor, Tensor] | None = None  # weight [1, 1, width] and bias [1]
        self._reads_code = weights.config.confidence == "row and code"
        if weights.config.confidence != "none":
            weight, bias = (weights.vector(f"confidence_head.proj.{part}") for part in ("weight", "bias"))
            self._confidence = weight[None], bias

    def confidence(self, lanes: Tensor, depth: int, previous: Tensor) -> Tensor | None:
        """How probable it is that one of the tokens at a depth behind these previous ones is accepted: [rows]; None
        where the head does not say."""
        if self._confidence is None:
            return None
        (weight, bias), backend = self._confidence, self.head.backend
        rows = self.y[lanes, depth].float()
        if self._reads_code:
            rows = torch.cat([rows, backend.embed(previous, self.first).float()], dim=1)
        return (backend.dots(weight, torch.zeros_like(lanes), rows)[:, 0] + bias).sigmoid()

    def begin(self, y: Tensor, anchors: Tensor) -> Tensor:
        """The logits [sequences, draft_vocab] of the tokens behind the anchors, from y [sequences, block, hidden]."""
        self.y = y
        self.logits = self.head.backend.logits(y.flatten(0, 1), self.head.output).view(*y.shape[:2], -1)
        return self.logits[:, 0]

    def after(self, lanes: Tensor, depth: int, previous: Tensor) -> tuple[Tensor, Tensor]:
        """The logits of the tokens at a depth behind these previous ones, and the target's ids of their columns."""
        return self.logits[lanes, depth], self.head.token_ids


class Corrected(Correction):
    """The most probable tokens of every row, among which the token before it then decides."""

    SHORTLIST = 64

    columns: Tensor  # [sequences, block, shortlist] of the draft vocabulary
    weight: Linear  # what the correction is a product with: a row per token of the draft vocabulary

    def shortlist(self) -> None:
        """All rows are looked at together: on a GPU that takes as long as one of them."""
        columns = self.head.backend.top(self.logits.flatten(0, 1), self.SHORTLIST)[1]
        self.columns = columns.view(*self.logits.shape[:2], -1)
        self._rows = self.head.backend.embed(columns.flatten(), self.weight).view(*columns.shape, -1)

    def product(self, depth: int, lanes: Tensor, rows: Tensor) -> Tensor:
        """Rows [rows, width] · the shortlisted rows of the weight at a depth, of each row's lane: [rows, shortlist]."""
        return self.head.backend.dots(self._rows, lanes * self.logits.shape[1] + depth, rows)


class Markov(Corrected):
    """logits += W2 · W1[previous token]."""

    def __init__(self, head: BlockHead, weights: HeadWeights) -> None:
        super().__init__(head, weights)
        self.first, self.weight = (weights.linear(f"markov_head.markov_{part}", is_head=True) for part in ("w1", "w2"))

    def begin(self, y: Tensor, anchors: Tensor) -> Tensor:
        uncorrected = super().begin(y, anchors)
        self.shortlist()
        return uncorrected + self.head.backend.logits(self._factors(y[:, 0], anchors), self.weight)

    def after(self, lanes: Tensor, depth: int, previous: Tensor) -> tuple[Tensor, Tensor]:
        columns = self.columns[lanes, depth]
        added = self.product(depth, lanes, self._factors(self.y[lanes, depth], previous))
        return self.logits[lanes[:, None], depth, columns] + added, self.head.token_ids[columns]

    def _factors(self, y: Tensor, previous: Tensor) -> Tensor:
        """[rows, rank], from the output of rows [rows, hidden] and the tokens before theirs."""
        return self.head.backend.embed(previous, self.first)


class GatedMarkov(Markov):
    """logits += W2 · (sigmoid(Wg · [y; W1[previous token]]) * W1[previous token])."""

    def __init__(self, head: BlockHead, weights: HeadWeights) -> None:
        super().__init__(head, weights)
        self.gate = weights.linear("markov_head.gate_proj.weight")

    def _factors(self, y: Tensor, previous: Tensor) -> Tensor:
        codes = super()._factors(y, previous)
        gates = self.head.backend.linear(torch.cat([y.to(codes.dtype), codes], dim=1), self.gate)
        return (codes / (1 + (-gates.float()).exp())).to(codes.dtype)


class Refiner(Corrected):
    """y + Wo · silu(Wa · y + T[previous token]); the last row of T stands for an unknown one."""

    def __init__(self, head: BlockHead, weights: HeadWeights) -> None:
        super().__init__(head, weights)
        self.weight = head.output
        self.inner, self.outer = (weights.linear(f"refiner.{part}_proj.weight") for part in ("in", "out"))
        self.table = weights.linear("refiner.table.weight", is_head=True)

    def begin(self, y: Tensor, anchors: Tensor) -> Tensor:
        backend, (sequences, block, _) = self.head.backend, y.shape
        self._y, self._inner = y, backend.linear(y.flatten(0, 1), self.inner).view(sequences, block, -1)
        previous = anchors.new_full((sequences, block), self.table.outputs - 1)
        previous[:, 0] = anchors
        refined = self._refined(y.flatten(0, 1), self._inner.flatten(0, 1), previous.flatten())
        first = super().begin(refined.view_as(y), anchors)
        self.shortlist()
        return first

    def after(self, lanes: Tensor, depth: int, previous: Tensor) -> tuple[Tensor, Tensor]:
        columns = self.columns[lanes, depth]
        refined = self._refined(self._y[lanes, depth], self._inner[lanes, depth], previous)
        return self.product(depth, lanes, refined), self.head.token_ids[columns]

    def _refined(self, y: Tensor, inner: Tensor, previous: Tensor) -> Tensor:
        backend = self.head.backend
        return y + backend.linear(backend.silu(inner + backend.embed(previous, self.table)), self.outer)


CORRECTIONS = {"none": Correction, "markov": Markov, "refiner": Refiner}


def correction(head: BlockHead, weights: HeadWeights) -> Correction:
    kind = GatedMarkov if weights.config.markov_gate else CORRECTIONS[weights.config.correction]
    return kind(head, weights)
