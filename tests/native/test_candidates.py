"""What turns logits into candidates: the native verbs beside those of the torch backend, which are the reference."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from foredraft.backends.native.backend import NativeBackend
from foredraft.backends.torch import TorchBackend
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
            shares, columns_again = backend.likely(logits, count)
            assert torch.equal(columns_again, found[1])
            probabilities = REFERENCE.likely(logits.double(), count)[0]  # none where all is forbidden
            assert torch.allclose(shares.double(), probabilities, rtol=1e-5, atol=1e-7, equal_nan=True)


def test_what_is_no_number_is_no_candidate(backend: NativeBackend) -> None:
    values, columns = backend.top(torch.tensor([[math.nan, 2.0, math.nan, 3.0], [math.nan] * 4]), 3)
    assert values.tolist() == [[3.0, 2.0, -math.inf], [-math.inf] * 3]
    assert columns.tolist() == [[3, 1, 0], [0, 0, 0]]


def test_wrong_input_is_an_exception_and_not_a_crash(backend: NativeBackend) -> None:
    for wrong in (torch.zeros(4), torch.zeros(2, 4).double(), torch.zeros(4, 2).T):
        with pytest.raises(ValueError, match="logits must be"):
            backend.top(wrong, 2)
        with pytest.raises(ValueError, match="logits must be"):
            backend.likely(wrong, 2)
    with pytest.raises(ValueError, match="refused its input"):
        backend.top(torch.zeros(2, 4), 0)
    with pytest.raises(ValueError, match="refused its input"):
        backend.top(torch.zeros(2, 0), 1)
    assert backend.top(torch.zeros(0, 4), 2)[0].shape == (0, 2)
