"""What a run was replayed as reaches the draws behind it, and only where the logits lie where that run left them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch

from foredraft.backends.layers import AttentionShape
from foredraft.backends.torch import TorchBackend
from foredraft.batch import ForwardBatch, PackedBatch, pack
from foredraft.params import SamplingParams
from foredraft.runtime.runner import Replayed
from foredraft.types import Sequence, Work

SHAPE = AttentionShape(1, 1, 4, 4, 1.0, 0, 1e-5)
ROWS = 8  # of the captured run


@dataclass(frozen=True)
class Captured(ForwardBatch):
    """A plan of a run that is replayed with more rows than the batch has."""

    @property
    def num_rows(self) -> int:
        return ROWS

    @property
    def num_logits(self) -> int:
        return ROWS

    @property
    def replayed_rows(self) -> int:
        return ROWS


class Captures(TorchBackend):
    def prepare(self, batch: PackedBatch, shape: AttentionShape) -> ForwardBatch:
        return Captured(**vars(super().prepare(batch, shape)))


def batch_of(num_tokens: int, params: SamplingParams) -> PackedBatch:
    sequence = Sequence(0, "", 0, list(range(num_tokens)), num_tokens, params, 0, 9, block_table=[0])
    return pack([Work(sequence, num_tokens)], block_size=16)


@pytest.mark.parametrize(
    ("backend", "params", "wanted", "replayed"),
    [
        (Captures, SamplingParams(prompt_logprobs=1), 3, ROWS),
        (Captures, SamplingParams(), 1, 0),  # one row of many is a copy of its logits
        (TorchBackend, SamplingParams(), 1, 0),
    ],
)
def test_rows_of_a_captured_run_are_told(backend: Any, params: SamplingParams, wanted: int, replayed: int) -> None:
    def compute(plan: ForwardBatch) -> torch.Tensor:
        return torch.zeros(plan.num_logits, 5)

    replayer = Replayed(backend("float32", torch.device("cpu")), SHAPE)
    output = replayer.forward(batch_of(3, params.resolved({})), compute)
    assert output.logits.shape == (wanted, 5)
    assert output.replayed_rows == replayed
