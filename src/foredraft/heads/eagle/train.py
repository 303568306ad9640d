"""Training of EAGLE heads: a few steps with the head's own output fed back, each step against the target."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from foredraft.heads.base import MAX_BLOCK
from foredraft.heads.eagle.module import EagleModule
from foredraft.heads.module import KeysValues
from foredraft.heads.train import HeadStudent, Module
from foredraft.train.losses import best_tokens, masked_loss
from foredraft.train.student import MAX_WIDTH, Start, whole
from foredraft.train.target_batch import TargetBatch

UNROLLED = 3
_STEP_WEIGHT = 0.8  # of each step, in units of the one before


@dataclass(frozen=True)
class Options:
    depth: int = whole(5, MAX_BLOCK)
    inner: int = whole(0, MAX_WIDTH)  # width of its feed-forward layer; 0: the target's
    # The most frequent tokens, whose rows of the output head are trained; those of the others are the target's times a
    # matrix. 0: all tokens of the draft vocabulary.
    own: int = whole(0, MAX_WIDTH)


class UnrolledStudent(HeadStudent[Module]):
    """Chains start at every position t at once. Step j of the chain of t stands at position t + j; its keys are the
    first rows of the chains up to t, and the later rows of its own chain."""

    @abstractmethod
    def start(self, seen: TargetBatch) -> Tensor:
        """What the first rows read beside the embedding: [batch, length, hidden]."""

    @abstractmethod
    def step(
        self, embeddings: Tensor, h: Tensor, positions: Tensor, past: list[KeysValues], mask: Tensor | None
    ) -> tuple[Tensor, Tensor, KeysValues]:
        """What the next rows read of these, what the output head reads, and the rows' own K and V."""

    @abstractmethod
    def output(self, seen: TargetBatch) -> Tensor:
        """The weight of the output head: [draft_vocab, hidden]."""

    def loss(self, seen: TargetBatch, generator: torch.Generator) -> Tensor:
        weight = self.output(seen)
        losses = [
            _STEP_WEIGHT**step * masked_loss(rows, weight, seen.labels, index)
            for step, (rows, index) in enumerate(self._unroll(seen, UNROLLED))
        ]
        return torch.stack(losses).sum() / sum(_STEP_WEIGHT**step for step in range(UNROLLED))

    @torch.no_grad()
    def drafts(self, seen: TargetBatch) -> Tensor:
        token_ids, weight = self.module.token_ids, self.output(seen)
        found = [best_tokens(rows, weight, token_ids) for rows, _ in self._unroll(seen, self.depth)]
        # The chain of t drafts behind the committed token t + 1.
        return torch.stack([torch.nn.functional.pad(tokens[:, :-1], (1, 0)) for tokens in found])

    def _unroll(self, seen: TargetBatch, steps: int) -> list[tuple[Tensor, Tensor]]:
        """The rows of each step that the output head reads [batch, length, hidden], and those of their labels [batch,
        length]."""
        h = self.start(seen)
        past: list[KeysValues] = []
        unrolled = []
        for step in range(steps):
            embeddings = seen.target.embed(seen.batch.ahead(1 + step))
            mask = chain_mask(h.shape[1], step, h.device) if step else None
            h, rows, own = self.step(embeddings, h, seen.positions + step, past, mask)
            past.append(own)
            unrolled.append((rows, seen.rows_ahead(1 + step)))
        return unrolled


class EagleStudent(UnrolledStudent[EagleModule]):
    def start(self, seen: TargetBatch) -> Tensor:
        return self.module.fc(seen.features.taps(self.module.config.taps))

    def step(
        self, embeddings: Tensor, h: Tensor, positions: Tensor, past: list[KeysValues], mask: Tensor | None
    ) -> tuple[Tensor, Tensor, KeysValues]:
        y, own = self.module.midlayer(embeddings, h, positions, past, mask)
        return y, self.module.norm(y), own

    def output(self, seen: TargetBatch) -> Tensor:
        return self.module.output(seen.head)


def chain_mask(length: int, step: int, device: torch.device) -> Tensor:
    """[1, 1, length, (step + 1) × length]: causal over the first rows, then one key of each later step."""
    causal = torch.ones(length, length, dtype=torch.bool, device=device).tril()
    own = torch.eye(length, dtype=torch.bool, device=device)
    return torch.cat([causal, *[own] * step], dim=1)[None, None]


def build(options: Options, start: Start) -> EagleStudent:
    shape = start.shape
    mapped = max(0, shape.draft_vocab_size - options.own) if options.own else 0
    config = replace(
        shape,
        kind="eagle",
        taps=start.spread_taps(0.1, 0.5, 0.9),
        block=options.depth,
        intermediate_size=options.inner or shape.intermediate_size,
        mapped_vocab_size=mapped,
    )
    module = EagleModule(config)
    if mapped:
        module.mapped.zero_()[start.frequencies.argsort(stable=True)[:mapped]] = True
        with torch.no_grad():
            torch.nn.init.eye_(module.output_map.weight).div_(start.target.config.logits_divisor)
    return EagleStudent(start.name, module, start.target, start.token_ids, options.depth)
