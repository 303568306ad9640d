"""A model with its KV layers: `forward` turns a packed batch into logits, and writes the taps on the way. Target and
draft model are two of these."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from foredraft.backends.base import Backend
from foredraft.backends.layers import AttentionShape, LayerKV, Taps, window_map_of
from foredraft.batch import ForwardBatch, PackedBatch
from foredraft.models.decoder import Decoder
from foredraft.params import SamplingParams
from foredraft.sampling.draw import NodeDraw, Sampler
from foredraft.types import NO_DRAFT, Sequence


@dataclass(frozen=True)
class ForwardOutput:
    logits: Tensor  # [wanted rows, vocab] float32
    replayed_rows: int = 0  # as in ForwardBatch


class Runner:
    """Weights, their place in the KV cache, and where the residual streams go that heads read. Every run writes them,
    so whatever of the target's K and V is valid has valid taps."""

    def __init__(self, decoder: Decoder, backend: Backend, kv: list[LayerKV], taps: Taps | None = None) -> None:
        self.decoder = decoder
        self.backend = backend
        self.kv = kv
        self.taps = taps
        self._replayed = Replayed(backend, decoder.layers[0].shape)
        self._window_map = window_map_of(kv)

    @torch.inference_mode()
    def forward(self, batch: PackedBatch) -> ForwardOutput:
        """The batch through the model."""
        self.tell_window_map()
        return self._replayed.forward(batch, self._compute)

    def tell_window_map(self) -> None:
        """Before each run, where it is not `forward` that runs: where blocks lie in layers with a window."""
        if self._window_map is not None:
            self._window_map.tell_device()

    def sampler(self, output: ForwardOutput) -> Sampler:
        """How tokens are drawn from what a run gave."""
        return partial(self.backend.sample, replayed_rows=output.replayed_rows)

    def warm(self, block_size: int, max_keys: int) -> None:
        """Make what later runs need, and the draws of tokens behind them (see Replayed.warm)."""
        nobody = Sequence(-1, "", 0, [0], 1, SamplingParams().resolved({}), seed=0, max_tokens=1)

        def draw(output: ForwardOutput) -> None:
            rows = range(len(output.logits))
            self.sampler(output)(output.logits, [NodeDraw(row, nobody, NO_DRAFT, -1, 0) for row in rows])

        self._replayed.warm(block_size, max_keys, self._compute, draw)

    def _compute(self, plan: ForwardBatch) -> Tensor:
        normed = self.decoder.run(plan, self.kv, self.backend, self.taps)
        wanted = normed if plan.logit_rows is None else normed[plan.logit_rows]
        return self.decoder.logits(wanted, self.backend)


class Replayed:
    """A computation of logits from batches, planned by the backend and replayed where it has a graph of it."""

    def __init__(self, backend: Backend, shape: AttentionShape) -> None:
        self._backend, self._shape = backend, shape

    def __call__(self, batch: PackedBatch, compute: Callable[[ForwardBatch], Tensor]) -> Tensor:
        """[wanted rows, vocab]"""
        return self.forward(batch, compute).logits

    def forward(self, batch: PackedBatch, compute: Callable[[ForwardBatch], Tensor]) -> ForwardOutput:
        """A backend may run more rows than there are, and compute all their logits: what was not wanted is cut off
        here."""
        plan = self._backend.prepare(batch, self._shape)
        logits = self._backend.replay(self, plan, compute)
        if plan.num_rows != batch.num_rows or plan.num_logits != batch.num_logits:
            if batch.logit_rows is not None:  # a copy, which lies elsewhere
                return ForwardOutput(logits[torch.tensor(batch.logit_rows, dtype=torch.int64, device=logits.device)])
            logits = logits[: batch.num_rows]
        return ForwardOutput(logits, plan.replayed_rows)

    @torch.inference_mode()
    def warm(
        self,
        block_size: int,
        max_keys: int,
        compute: Callable[[ForwardBatch], Tensor],
        then: Callable[[ForwardOutput], object] = lambda output: None,
    ) -> None:
        """Make what later runs need, where the backend makes something for each shape of run: a request that comes upon
        a new shape would wait for it. `then` is told what each run gives."""
        for plan in self._backend.warm_plans(self._shape, block_size, max_keys):
            then(ForwardOutput(self._backend.replay(self, plan, compute), plan.replayed_rows))
