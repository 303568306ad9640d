"""Draws and floors on the device against their references on the host."""

from __future__ import annotations

import torch
from torch import Tensor

from foredraft.params import SamplingParams
from foredraft.sampling.draw import draw
from foredraft.sampling.noise import stream_key
from foredraft.sampling.pipeline import floor
from tests.gpu.kernel_device import DEVICE, INTERPRETED, needs_kernels, small

pytestmark = needs_kernels
if INTERPRETED or torch.cuda.is_available():
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

    def test_finds_the_reference_floors(self) -> None:
        rows, vocab = 48, 3000 if INTERPRETED else 49152
        logits = small(rows, vocab) * 3
        logits[10] = logits[10].round()  # many ties
        logits[11, 100:] = -torch.inf
        choices = [
            SamplingParams(temperature=t, top_k=k, top_p=p, min_p=m)
            for t, k, p, m in [
                *((0.0, 5, 0.9, 0.1), (1.0, 0, 1.0, 0.0), (1.0, 40, 1.0, 0.0), (0.8, 0, 0.95, 0.0)),
                *((0.8, 40, 0.9, 0.05), (1.5, 0, 0.5, 0.2), (0.7, 1, 0.9, 0.0), (1.0, 1000, 0.99, 0.0)),
            ]
        ] * 6

        def column(name: str, dtype: torch.dtype) -> Tensor:
            return torch.tensor([getattr(params, name) for params in choices], dtype=dtype, device=DEVICE)

        found, finite = cuda_sample.floors(
            *(logits, column("temperature", torch.float64), column("top_k", torch.int32)),
            *(column("top_p", torch.float64), column("min_p", torch.float64).log()),
        )
        assert finite.all()
        for row, params in enumerate(choices):
            expected = floor(logits[row].cpu(), params)
            assert found[row].item() == torch.tensor(expected, dtype=torch.float32).item(), (row, params)

    def test_tells_rows_that_are_not_finite(self) -> None:
        logits = small(5, 1000)
        logits[1, 500], logits[2, 3], logits[4, 7] = torch.nan, torch.inf, -torch.inf
        logits[3] = -torch.inf
        ones = torch.ones(5, dtype=torch.float64, device=DEVICE)
        none = torch.zeros(5, dtype=torch.int32, device=DEVICE)
        _, finite = cuda_sample.floors(logits, ones, none, ones, (ones * 0).log())
        assert finite.tolist() == [True, False, False, False, True]
