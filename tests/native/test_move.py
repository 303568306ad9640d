"""What a cache holds moves from slot to slot as in plain torch."""

from __future__ import annotations

import random

import pytest
import torch

from foredraft.backends.base import move
from foredraft.backends.native.backend import NativeBackend
from tests.backends import needs_native

pytestmark = needs_native


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_moves_are_those_of_the_reference(backend: NativeBackend, dtype: torch.dtype) -> None:
    """Also where a slot is both read and written, and where there is work for all threads."""
    rng = random.Random(4)
    expected = [torch.randn(shape).to(dtype) for shape in ((60, 200, 3, 64), (1, 200, 41), (2, 200, 1, 1), (0, 200, 3))]
    found = [cache.clone() for cache in expected]
    for count in (0, 1, 3, 70, 200):
        moves = list(zip(rng.sample(range(200), count), rng.sample(range(200), count), strict=True))
        move(expected, torch.tensor(moves, dtype=torch.int64).view(-1, 2).T)
        backend.move(found, moves)
        assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True)), count
    backend.move(found, [(5, 6), (6, 7), (7, 5)])
    assert torch.equal(found[0][:, [6, 7, 5]], expected[0][:, [5, 6, 7]])


def test_what_lies_elsewhere_is_refused(backend: NativeBackend) -> None:
    cache = torch.zeros(2, 8, 4)
    for moves in ([(0, 8)], [(8, 0)], [(-1, 0)], [(0, 1), (3, -1)]):
        with pytest.raises(ValueError, match="move refused its input"):
            backend.move([cache], moves)
    with pytest.raises(ValueError, match="cache must be a contiguous"):
        backend.move([cache.transpose(0, 1)], [(0, 1)])
