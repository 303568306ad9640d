"""Training of DFlash heads: blocks behind random places of the answers, each row against the target."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from foredraft.heads.base import BLOCK_INPUTS, CORRECTIONS, MAX_BLOCK
from foredraft.heads.dflash.module import DFlashModule
from foredraft.heads.train import HeadStudent
from foredraft.models.fields import MAX_LAYERS
from foredraft.train.features import FrozenTarget
from foredraft.train.losses import best_tokens, masked_loss
from foredraft.train.student import Start, one_of, whole
from foredraft.train.target_batch import TargetBatch

_ROW_DECAY = 2.5  # the weight of row k is exp(-k / this)
_UNKNOWN = 0.15  # of the refiner's rows behind the first learn without the token before theirs
_EVALUATED_AT_ONCE = 64  # anchors of a sequence
_EVALUATED_DEPTH = 7
_RANK = 256  # of a correction


@dataclass(frozen=True)
class Options:
    layers: int = whole(2, MAX_LAYERS)
    block: int = whole(8, MAX_BLOCK)
    correction: str = one_of("refiner", CORRECTIONS)
    input: str = one_of("injected", BLOCK_INPUTS)


class DFlashStudent(HeadStudent[DFlashModule]):
    """A block behind anchor i has rows for positions i + 1, …, i + block, which stand at i, …, i + block - 1."""

    def __init__(self, name: str, head: DFlashModule, target: FrozenTarget, token_ids: Tensor, depth: int) -> None:
        super().__init__(name, head, target, token_ids, depth)
        with torch.no_grad():
            if head.config.block_input == "masked":
                head.mask_embedding.weight.copy_(target.embedding[head.config.mask_token_id])
            else:  # embeddings are small; beside the feature they should count from the start
                head.anchor_proj.weight.div_(target.embedding.float().square().mean().sqrt())

    def loss(self, seen: TargetBatch, generator: torch.Generator) -> Tensor:
        config = self.module.config
        y, places = self._blocks(seen, self._random_anchors(seen, generator))
        inside = places < seen.batch.lengths[:, None]
        places = places.clamp(max=seen.batch.tokens.shape[1] - 1)
        index = torch.where(inside, seen.label_rows.gather(1, places), -1)
        previous = seen.batch.tokens.gather(1, places)
        row = torch.arange(places.shape[1], device=places.device) % config.block
        if config.correction == "refiner":
            draws = torch.rand(places.shape, generator=generator, device=places.device)
            previous = torch.where((draws < _UNKNOWN) & (row > 0), config.target_vocab_size, previous)
        valid = index >= 0
        rows, weight = self.module.output(y[valid], previous[valid])
        scale = torch.exp(-row / _ROW_DECAY).expand_as(places)[valid]
        return masked_loss(rows, weight, seen.labels, index[valid], scale)

    @torch.no_grad()
    def drafts(self, seen: TargetBatch) -> Tensor:
        config, (batch, length) = self.module.config, seen.batch.tokens.shape
        found = seen.batch.tokens.new_zeros(batch, length, config.block)
        for start in range(1, length, _EVALUATED_AT_ONCE):
            anchors = torch.arange(start, min(length, start + _EVALUATED_AT_ONCE), device=found.device)
            y, places = self._blocks(seen, anchors.expand(batch, -1))
            previous = seen.batch.tokens.gather(1, places.clamp(max=length - 1))
            rows, weight = self.module.output(y, previous)
            tokens = best_tokens(rows, weight, self.module.token_ids)
            found[:, anchors] = tokens.view(batch, len(anchors), config.block)
        return found.permute(2, 0, 1)[: self.depth]

    def _random_anchors(self, seen: TargetBatch, generator: torch.Generator) -> Tensor:
        """About as many rows as the batch has positions: int64 [batch, blocks], tokens of the answers but the last."""
        batch = seen.batch
        count = max(1, batch.tokens.shape[1] // self.module.config.block)
        draws = torch.rand((len(batch.tokens), count), generator=generator, device=batch.tokens.device)
        first = batch.prompt_lens[:, None].clamp(min=1)
        span = (batch.lengths[:, None] - 1 - first).clamp(min=1)
        return first + (draws * span).long().clamp(max=span - 1)

    def _blocks(self, seen: TargetBatch, anchors: Tensor) -> tuple[Tensor, Tensor]:
        """Blocks behind `anchors` [batch, blocks], places of tokens, 1 or later: y [batch, blocks × block, hidden], and
        the place of each row's previous token [batch, blocks × block]."""
        block = self.module.config.block
        features = self.module.features(seen.features.taps(self.module.config.taps))
        embeddings = seen.target.embed(seen.batch.tokens.gather(1, anchors))
        last = features.gather(1, (anchors - 1)[:, :, None].expand(-1, -1, features.shape[2]))
        places = (anchors[:, :, None] + torch.arange(block, device=anchors.device)).flatten(1)
        of_block = torch.arange(places.shape[1], device=anchors.device) // block
        known = seen.positions[0] < anchors.repeat_interleave(block, dim=1)[:, :, None]  # [batch, rows, length]
        own = (of_block[:, None] == of_block).expand(len(anchors), -1, -1)
        y = self.module.blocks(
            self.module.rows(embeddings, last),
            places,
            self.module.context(features, seen.positions),
            torch.cat([known, own], dim=2)[:, None],
        )
        return y, places


def build(options: Options, start: Start) -> DFlashStudent:
    config = replace(
        start.shape,
        kind="dflash",
        taps=start.spread_taps(0.1, 0.3, 0.5, 0.7, 0.9),
        num_layers=options.layers,
        block=options.block,
        correction=options.correction,
        rank=0 if options.correction == "none" else _RANK,
        block_input=options.input,
        mask_token_id=_mask_token(start) if options.input == "masked" else 0,
    )
    depth = min(_EVALUATED_DEPTH, options.block)
    return DFlashStudent(start.name, DFlashModule(config), start.target, start.token_ids, depth)


def _mask_token(start: Start) -> int:
    """The last token outside the draft vocabulary, which holds the most frequent ones: hardly ever an anchor."""
    outside = torch.ones(start.shape.target_vocab_size, dtype=torch.bool)
    outside[start.token_ids.cpu()] = False
    return int(outside.nonzero()[-1]) if outside.any() else len(outside) - 1
