"""Draft trees that grow on a GPU: the kernels choose what the reference chooses.

Without a device, TRITON_INTERPRET=1 runs this slowly on the CPU, without graphs.
"""

from __future__ import annotations

import os

import pytest
import torch

pytest.importorskip("triton", reason="the CUDA kernels need Triton")
from foredraft.backends.cuda.trees import CudaTreeOps
from foredraft.backends.tree_ops import Candidates, Choice, Nodes, Noise, Places
from tests.tree_reference import TorchTreeOps

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not INTERPRETED and not torch.cuda.is_available(), reason="needs a CUDA device"),
]
DEVICE = torch.device("cpu" if INTERPRETED else "cuda")


def candidates(rows: int, count: int) -> Candidates:
    return Candidates(
        torch.zeros((rows, count), dtype=torch.int64, device=DEVICE), torch.zeros((rows, count), device=DEVICE)
    )


LIMITS = {  # top-p, logarithm of min-p and top-k of three sequences
    "none": ([1.0] * 3, [-torch.inf] * 3, [0] * 3),
    "some": ([0.9, 0.9, 0.8], [-torch.inf] * 3, [20, 20, 0]),
    "few": ([1.0] * 3, [-torch.inf, -3.0, -torch.inf], [3, 3, 1]),
}


@pytest.mark.parametrize("ids", ["none", "shared", "own"])
@pytest.mark.parametrize("noisy", [False, True])
@pytest.mark.parametrize("limits", LIMITS)
@pytest.mark.parametrize("columns", [64, 1000, 2048, 4500])
def test_likely_tokens_are_those_of_the_reference(columns: int, limits: str, noisy: bool, ids: str) -> None:
    generator = torch.Generator().manual_seed(columns)
    wide = (3 * torch.randn((6, columns + 24), generator=generator)).to(DEVICE)
    wide[1, : columns - 20] = -torch.inf  # as a grammar may leave it
    logits = wide[:, :columns]  # a narrower view of a model's vocabulary
    names = {"none": None, "shared": torch.randperm(5000, generator=generator)[:columns].to(DEVICE)}
    names["own"] = torch.stack([torch.randperm(5000, generator=generator)[:columns] for _ in range(6)]).to(DEVICE)
    keys = torch.randint(-(2**62), 2**62, (3,), generator=generator).to(DEVICE)
    temperatures = torch.tensor([0.3, 0.0, 1.5] if noisy else [0.0] * 3, dtype=torch.float64)
    top_ps, min_p_logs, top_ks = LIMITS[limits]
    floats = (torch.tensor(each, dtype=torch.float64, device=DEVICE) for each in (top_ps, min_p_logs))
    noise = Noise(keys, temperatures.to(DEVICE), *floats, torch.tensor(top_ks, device=DEVICE))
    found = candidates(6, 4), candidates(6, 4)
    for ops, into in zip((CudaTreeOps(), TorchTreeOps()), found, strict=True):
        ops.likely(logits, names[ids], noise, into)
    can_be_drawn = found[1].probabilities > 0
    assert torch.equal(found[0].tokens[can_be_drawn], found[1].tokens[can_be_drawn])
    assert torch.allclose(found[0].probabilities, found[1].probabilities, rtol=1e-5)
    if limits == "few" and noisy:
        assert found[0].probabilities.view(3, 2, 4)[[0, 2]].count_nonzero(-1).tolist() == [[3, 3], [1, 1]]


@pytest.mark.parametrize(("sequences", "width", "levels"), [(1, 1, 1), (3, 4, 5), (8, 16, 3)])
def test_nodes_stand_where_the_reference_has_them(sequences: int, width: int, levels: int) -> None:
    generator = torch.Generator().manual_seed(width)
    tables = torch.randperm(200, generator=generator).int().view(20, 10)[:sequences].to(DEVICE)
    lengths = torch.randint(0, 150, (sequences,), generator=generator).to(DEVICE)
    num_slots = (lengths + torch.randint(0, 30, (sequences,), generator=generator).to(DEVICE)).clamp(max=160)
    kinds = torch.int64, torch.int64, torch.int32, torch.int32
    found = [Places(*(torch.zeros((levels, sequences * width), dtype=k, device=DEVICE) for k in kinds)) for _ in "ab"]
    for ops, into in zip((CudaTreeOps(), TorchTreeOps()), found, strict=True):
        ops.place(tables, 16, lengths, num_slots, into)
    for name in ("positions", "slots", "offsets", "prefix_lens"):
        assert torch.equal(getattr(found[0], name), getattr(found[1], name)), name


def test_of_equal_logits_the_lowest_column_comes_first() -> None:
    logits = torch.zeros((1, 5000), device=DEVICE)
    logits[0, [2047, 2048, 4999, 77, 4098]] = 2.0
    found = candidates(1, 4)
    nothing = torch.zeros(1, dtype=torch.int64, device=DEVICE)
    CudaTreeOps().likely(logits, None, Noise(nothing, *[nothing.double()] * 3, nothing), found)
    assert found.tokens.tolist() == [[77, 2047, 2048, 4098]]


@pytest.mark.parametrize("is_static", [False, True])
@pytest.mark.parametrize("keeps_first", [False, True])
@pytest.mark.parametrize("width", [1, 3, 4])
def test_nodes_grow_as_in_the_reference(width: int, keeps_first: bool, is_static: bool) -> None:
    """Bit for bit, also where weights are equal."""
    generator, sequences, depth = torch.Generator().manual_seed(width), 3, 4
    shares = torch.tensor([0.5 / (rank + 1) for rank in range(width)], dtype=torch.float64, device=DEVICE)
    choice = Choice(shares if is_static else None, keeps_first)
    before: list[Nodes | None] = [None, None]
    for level in range(1, depth + 1):
        rows = sequences * (1 if level == 1 else width)
        found = Candidates(
            torch.randint(0, 999, (rows, width), generator=generator).to(DEVICE),
            (torch.randint(0, 6, (rows, width), generator=generator) / 7).sort(descending=True).values.to(DEVICE),
        )
        found.probabilities[0] = torch.nan  # as a sequence may have that only fills a program up
        offsets = torch.arange(sequences * width, dtype=torch.int32, device=DEVICE) + 50 * level
        grown = []
        for ops, above in zip((CudaTreeOps(), TorchTreeOps()), before, strict=True):
            into = Nodes(
                *(torch.zeros(sequences * width, dtype=torch.int64, device=DEVICE) for _ in range(3)),
                torch.zeros(sequences * width, dtype=torch.float64, device=DEVICE),
                torch.zeros((sequences * width, depth), dtype=torch.int32, device=DEVICE),
                offsets,
            )
            ops.grow(found, above, level, sequences, choice, into)
            grown.append(into)
        for name in ("token_ids", "parents", "places", "weights", "paths"):
            assert torch.equal(getattr(grown[0], name), getattr(grown[1], name)), name
        before = list(grown)
