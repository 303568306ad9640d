"""What turns logits into candidates: the native verbs beside those of the torch backend, which are the reference."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from foredraft.backends.native.backend import NativeBackend
from foredraft.backends.torch import TorchBackend
from foredraft.params import SamplingParams
from foredraft.sampling.draw import pick
from foredraft.sampling.likely import Drawing
from foredraft.sampling.noise import stream_key
from tests.backends import needs_native

pytestmark = needs_native
REFERENCE = TorchBackend("float32", torch.device("cpu"))
SHAPES = {
    "spread": lambda x: 4 * x,
    "flat": torch.zeros_like,
    "rising": lambda x: x.sort(dim=1).values,
    "ties": lambda x: (2 * x).round(),
    "zeros of both signs": lambda x: torch.where(x > 0, 0.0, -0.0),
    "far below zero": lambda x: x - 1e6,
    "mostly forbidden": lambda x: torch.where(x > 1, x, -math.inf),
    "all forbidden": lambda x: torch.full_like(x, -math.inf),
}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("columns", [1, 15, 16, 17, 100, 1025, 16_384])
def test_candidates_are_those_of_the_reference(backend: NativeBackend, columns: int, shape: str) -> None:
    """The very same columns, lowest first among equals; rows may be part of wider ones."""
    for rows in (1, 5):
        logits: Tensor = SHAPES[shape](torch.randn(rows, columns + 3))[:, :columns]
        for count in (1, 4, 64, 256):
            expected, found = REFERENCE.top(logits, count), backend.top(logits, count)
            assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))


GREEDY = SamplingParams(temperature=0).resolved({})
SETTINGS = [
    {"temperature": 0.0},
    {"temperature": 0.7},
    {"temperature": 30.0, "top_k": 5},
    {"temperature": 1.0, "top_p": 0.6},
    {"temperature": 1.3, "top_p": 0.9, "top_k": 40, "min_p": 0.02},
    {"temperature": 1.0, "min_p": 0.3},
]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("columns", [1, 15, 64, 65, 100, 1025, 16_384])
def test_what_will_probably_be_drawn_is_that_of_the_reference(backend: NativeBackend, columns: int, shape: str) -> None:
    """The same tokens in the same order, whatever the columns stand for, and about the same shares."""
    logits: Tensor = SHAPES[shape](torch.randn(len(SETTINGS), columns + 3))[:, :columns]
    drawings = [Drawing(SamplingParams(**each).resolved({}), 2**64 - 7 * row) for row, each in enumerate(SETTINGS)]
    shuffled = torch.stack([torch.randperm(200_000)[:columns] for _ in SETTINGS])
    for token_ids in (None, shuffled[0], shuffled):
        for count in (1, 4, 100):
            expected = REFERENCE.likely(logits, drawings, count, token_ids)
            found = backend.likely(logits, drawings, count, token_ids)
            assert torch.equal(found[1], expected[1])
            assert torch.allclose(found[0], expected[0], rtol=1e-5, atol=1e-9)
            assert torch.equal(found[0][:, 0] > 0, logits.isfinite().any(1))


def test_noise_decides_among_what_may_be_drawn(backend: NativeBackend) -> None:
    """With the target's own logits the token that it draws comes first; nothing below the floor has a share."""
    logits = torch.randn(40, 500)
    params = SamplingParams(temperature=0.9, top_k=6).resolved({})
    shares, columns = backend.likely(logits, [Drawing(params, stream_key(3, row)) for row in range(40)], 8)
    assert columns[:, 0].tolist() == [pick(row, params, 3, place) for place, row in enumerate(logits)]
    assert (shares[:, :6] > 0).all() and not shares[:, 6:].any()
    assert torch.allclose(shares.sum(1), torch.ones(40))
    assert len(set((columns[:, 0] - logits.argmax(1)).tolist())) > 5


def test_what_is_no_number_is_no_candidate(backend: NativeBackend) -> None:
    values, columns = backend.top(torch.tensor([[math.nan, 2.0, math.nan, 3.0], [math.nan] * 4]), 3)
    assert values.tolist() == [[3.0, 2.0, -math.inf], [-math.inf] * 3]
    assert columns.tolist() == [[3, 1, 0], [0, 0, 0]]


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("wrong", [math.nan, math.inf])
def test_where_logits_are_no_numbers_nothing_is_likely(
    backend: NativeBackend, settings: dict[str, Any], wrong: float
) -> None:
    logits = torch.randn(1, 200)
    logits[0, 77] = wrong
    drawings = [Drawing(SamplingParams(**settings).resolved({}), 5)]
    for each in (REFERENCE, backend):
        assert not each.likely(logits, drawings, 4)[0].any()


def test_wrong_input_is_an_exception_and_not_a_crash(backend: NativeBackend) -> None:
    for wrong in (torch.zeros(4), torch.zeros(2, 4).double(), torch.zeros(4, 2).T):
        with pytest.raises(ValueError, match="logits must be"):
            backend.top(wrong, 2)
        with pytest.raises(ValueError, match="logits must be"):
            backend.likely(wrong, [Drawing(GREEDY, 0)] * 2, 2)
    with pytest.raises(ValueError, match="refused its input"):
        backend.top(torch.zeros(2, 4), 0)
    with pytest.raises(ValueError, match="refused its input"):
        backend.top(torch.zeros(2, 0), 1)
    assert backend.top(torch.zeros(0, 4), 2)[0].shape == (0, 2)
    logits, drawings = torch.zeros(2, 4), [Drawing(GREEDY, 0)] * 2
    for ids in (torch.zeros(3, dtype=torch.int64), torch.zeros(1, 4, dtype=torch.int64), torch.zeros(4)):
        with pytest.raises(ValueError, match="token_ids must be"):
            backend.likely(logits, drawings, 2, ids)
    with pytest.raises(ValueError, match="as many drawings"):
        backend.likely(logits, drawings[:1], 2)
    with pytest.raises(ValueError, match="refused its input"):
        backend.likely(logits, drawings, 0)
    assert backend.likely(torch.zeros(0, 4), [], 2)[0].shape == (0, 2)
