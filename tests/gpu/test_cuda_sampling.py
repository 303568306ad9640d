"""Draws and floors on the device against their references on the host."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from foredraft.params import SamplingParams
from foredraft.sampling.draw import draw
from foredraft.sampling.noise import stream_key
from foredraft.sampling.pipeline import floor
from tests.gpu.kernel_device import DEVICE, INTERPRETED, needs_kernels, small

pytestmark = needs_kernels
if INTERPRETED or torch.cuda.is_available():
    from foredraft.backends.cuda import floors as cuda_floors
    from foredraft.backends.cuda import sample as cuda_sample


class TestSampling:
    def test_draws_the_reference_tokens(self) -> None:
        rows, vocab = 40, 5000
        logits = small(rows, vocab) * 4
        logits[5, 10:20] = logits[5].max() + 1  # equal ones
        temperatures = torch.tensor([0.0, 0.3, 1.0, 1.7] * 10, dtype=torch.float64, device=DEVICE)
        floors = logits.topk(1 + rows, dim=1).values[torch.arange(rows), torch.arange(rows)]
        floors[7::8] = -torch.inf
        keys = [stream_key(seed, 3) for seed in range(rows)]
        signed = torch.tensor([key - (1 << 64) if key >> 63 else key for key in keys], device=DEVICE)
        finite = torch.ones(rows, dtype=torch.bool, device=DEVICE)
        drawn = cuda_sample.sample(logits, floors, finite, temperatures, signed).tolist()
        host = logits.cpu()
        assert drawn == [
            draw(host[row], float(floors[row]), float(temperatures[row]), keys[row]) for row in range(rows)
        ]

    @pytest.mark.parametrize(("longest", "near"), [(0, 8192), (0, 16), (1 << 18, 8192)])
    def test_finds_the_reference_floors(self, longest: int, near: int, monkeypatch: pytest.MonkeyPatch) -> None:
        """In long rows, also where more lies above the cut than is gathered, and in short ones."""
        monkeypatch.setattr(cuda_floors, "_LONG", longest)
        monkeypatch.setattr(cuda_floors, "_NEAR", near)
        rows, vocab = 66, 5000 if INTERPRETED else 151936
        logits = small(rows, vocab) * 3
        logits[10:20] = logits[10:20].round()  # many ties
        logits[20:30, 100:] = -torch.inf
        logits[30:40] *= 8  # a token has nearly all of the mass
        logits[40:50, -3:] += 10
        logits[50:60] = -math.log((vocab - 1) * (1 / 0.055 - 1))  # but one, all are just within a top-p of 0.95
        logits[50:60, 1] = 0
        choices = [
            SamplingParams(temperature=t, top_k=k, top_p=p, min_p=m)
            for t, k, p, m in [
                *((0.0, 5, 0.9, 0.1), (1.0, 0, 1.0, 0.0), (1.0, 40, 1.0, 0.0), (0.8, 0, 0.95, 0.0)),
                *((0.8, 40, 0.9, 0.05), (1.5, 0, 0.5, 0.2), (0.7, 1, 0.9, 0.0), (1.0, 1000, 0.99, 0.0)),
                *((0.7, 3, 0.8, 0.0), (1.9, 0, 0.999, 0.0), (1.0, vocab, 0.95, 0.0)),
            ]
        ] * 6

        def column(name: str, dtype: torch.dtype) -> Tensor:
            return torch.tensor([getattr(params, name) for params in choices], dtype=dtype, device=DEVICE)

        limits = (
            *(column("temperature", torch.float64), column("top_k", torch.int32)),
            *(column("top_p", torch.float64), column("min_p", torch.float64).log()),
        )
        found, finite = cuda_floors.floors(logits, *limits)
        assert finite.all()
        for row, params in enumerate(choices):
            expected = floor(logits[row].cpu(), params)
            assert found[row].item() == torch.tensor(expected, dtype=torch.float32).item(), (row, params)
        for _ in range(3):  # in whichever order programs end
            assert torch.equal(cuda_floors.floors(logits, *limits)[0], found)
        if_limited, is_known = cuda_floors.floors(logits, *limits, needed=False)
        drawn = torch.tensor([bool(p.temperature and (p.top_k or p.top_p != 1 or p.min_p)) for p in choices])
        assert torch.equal(is_known.cpu(), drawn)
        assert torch.equal(if_limited, torch.where(drawn.to(DEVICE), found, -torch.inf))

    @pytest.mark.parametrize("longest", [0, 1000])
    def test_tells_rows_that_are_not_finite(self, longest: int, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(cuda_floors, "_LONG", longest)
        logits = small(5, 1000)
        logits[1, 500], logits[2, 3], logits[4, 7] = torch.nan, torch.inf, -torch.inf
        logits[3] = -torch.inf
        ones = torch.ones(5, dtype=torch.float64, device=DEVICE)
        none = torch.zeros(5, dtype=torch.int32, device=DEVICE)
        _, finite = cuda_floors.floors(logits, ones, none, ones, (ones * 0).log())
        assert finite.tolist() == [True, False, False, False, True]
