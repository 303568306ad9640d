"""Training of MTP layers: a few steps with the layer's own output fed back, each step against the target, whose output
head stays as it is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from foredraft.heads.base import MAX_BLOCK
from foredraft.heads.eagle.train import UnrolledStudent
from foredraft.heads.module import KeysValues
from foredraft.heads.mtp.module import MtpModule
from foredraft.train.student import Facts, Start, whole
from foredraft.train.target_batch import TargetBatch

_LABELS = 1 << 31  # that exist at once: all positions of a batch for small vocabularies, a part of them for large ones


@dataclass(frozen=True)
class Options:
    depth: int = whole(3, MAX_BLOCK)


class MtpStudent(UnrolledStudent[MtpModule]):
    def start(self, seen: TargetBatch) -> Tensor:
        return seen.features.normed

    def step(
        self, embeddings: Tensor, h: Tensor, positions: Tensor, past: list[KeysValues], mask: Tensor | None
    ) -> tuple[Tensor, Tensor, KeysValues]:
        y, own = self.module(embeddings, h, positions, past, mask)
        return y, y, own

    def output(self, seen: TargetBatch) -> Tensor:
        return seen.target.head / seen.target.config.logits_divisor

    def loss(self, seen: TargetBatch, generator: torch.Generator) -> Tensor:
        return super().loss(seen.over_all_tokens(_LABELS // len(seen.target.head), generator), generator)

    def save(self, folder: Path, acceptance: Sequence[float], provenance: Facts) -> None:
        super().save(folder, acceptance, {**provenance, "vocabulary_coverage": 1.0})


def build(options: Options, start: Start) -> MtpStudent:
    target, scaling = start.target.config, start.target.config.rope_scaling
    window = target.window_of_layer(target.num_layers)  # longer than the texts of training
    config = replace(
        start.shape,
        kind="mtp",
        taps=(target.num_layers,),
        block=options.depth,
        draft_vocab_size=target.vocab_size,
        shares_output=True,
        qk_norm=target.qk_norm,
        sliding_window=window,
        sliding_layers=(0,) if window else (),
        rope_scaling=None if scaling is not None and scaling.kind == "longrope" else scaling,
    )
    every_token = torch.arange(target.vocab_size)
    return MtpStudent(start.name, MtpModule(config), start.target, every_token, options.depth)
