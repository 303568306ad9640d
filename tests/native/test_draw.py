"""The native draw beside its reference in torch: the same token always, and the same noise bit for bit."""

from __future__ import annotations

import ctypes
import math
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from torch import Tensor

from foredraft.backends.base import Backend
from foredraft.backends.native.backend import NativeBackend
from foredraft.backends.torch import TorchBackend
from foredraft.kernels.build import FLAGS, SOURCES, Level
from foredraft.params import SamplingParams
from foredraft.sampling import draw as reference
from foredraft.sampling.draw import NOT_FINITE, NodeDraw, pick
from foredraft.sampling.noise import gumbel, stream_key, uniform
from foredraft.sampling.pipeline import floor
from foredraft.sampling.verify import verify
from foredraft.types import Draft, Work
from tests.backends import needs_native
from tests.unit.unit_helpers import make_sequence

SETTINGS = [
    {"temperature": 0.0},
    {"temperature": 0.02},
    {"temperature": 0.8},
    {"temperature": 50.0},
    {"temperature": 1.0, "top_k": 40},
    {"temperature": 0.9, "top_p": 0.9},
    {"temperature": 1.3, "min_p": 0.03},
    {"temperature": 0.7, "top_k": 20, "top_p": 0.8, "min_p": 0.001},
]
VOCABULARIES = (1, 15, 16, 17, 100, 1025, 49_152)
SHAPES = {
    "spread": lambda x: 4 * x,
    "flat": torch.zeros_like,
    "rising": lambda x: (20 * x).sort().values,
    "falling": lambda x: (20 * x).sort(descending=True).values,
    "ties": lambda x: (2 * x).round(),
    "far below zero": lambda x: x - 1e6,
    "mostly forbidden": lambda x: torch.where(x > 1, x, -math.inf).index_fill(0, torch.tensor([len(x) - 1]), 0.5),
}

pytestmark = needs_native


def some_logits(vocab: int) -> Tensor:
    return torch.randn(vocab, generator=torch.Generator().manual_seed(vocab))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("vocab", VOCABULARIES)
def test_draws_what_the_reference_draws(backend: NativeBackend, vocab: int, shape: str) -> None:
    logits = SHAPES[shape](some_logits(vocab))
    for seed in range(6 if vocab > 10_000 else 40):
        for place, fields in enumerate(SETTINGS):
            params = SamplingParams(**fields).resolved({})
            assert pick(logits, params, seed, place, backend.draw) == pick(logits, params, seed, place)


def test_the_noise_has_the_bits_of_the_reference(level: Level, tmp_path: Path) -> None:
    """Three million variates. The kernel's own source is compiled, with its own flags, behind a door for this test."""
    source, library = tmp_path / "door.c", tmp_path / "door.so"
    source.write_text(f'''#include "{SOURCES / "draw.c"}"
    void door(uint64_t key, int64_t count, double *out) {{
        for (int64_t id = 0; id < count; id++) out[id] = gumbel(hash(key, (uint64_t)id));
    }}''')
    if shutil.which("cc") is None:
        pytest.skip("there is no C compiler")
    subprocess.run(["cc", *FLAGS, *level.flags, f"-I{SOURCES}", "-o", library, source, "-lm"], check=True)
    variates = torch.empty(1_000_000, dtype=torch.float64)
    for key in (0, stream_key(42, 17), 2**64 - 1):
        out = ctypes.c_void_p(variates.data_ptr())
        ctypes.CDLL(str(library)).door(ctypes.c_uint64(key), ctypes.c_int64(len(variates)), out)
        assert torch.equal(variates, gumbel(uniform(key, torch.arange(len(variates)))))


def test_the_noise_alone_decides_among_equals(backend: NativeBackend) -> None:
    """The whole order of the best, to the last bit: each is taken away once it has won."""
    key = stream_key(42, 17)
    logits = torch.zeros(300_000)
    for winner in gumbel(uniform(key, torch.arange(len(logits)))).argsort(descending=True)[:200].tolist():
        assert backend.draw(logits, 0.0, 2.0**-20, key) == winner
        logits[winner] = -1.0


def test_a_logit_just_below_the_floor_is_out(backend: NativeBackend) -> None:
    """The floor is a double, and is compared as the reference compares: rounded to float32."""
    logits = torch.tensor([0.1, 0.2, 0.3])
    for lowest in (0.1, float(logits[1]), math.nextafter(float(logits[1]), 1), 0.2000001, 0.3):
        drawn = {backend.draw(logits, lowest, 30.0, key) for key in range(200)}
        assert drawn == {reference.draw(logits, lowest, 30.0, key) for key in range(200)}


def test_nothing_to_draw_is_refused(backend: NativeBackend) -> None:
    with pytest.raises(ValueError, match=r"No logit reaches the floor 2\.0"):
        backend.draw(torch.zeros(20), 2.0, 1.0, 0)
    with pytest.raises(ValueError, match="No logit"):
        backend.draw(torch.full((20,), math.nan), -math.inf, 1.0, 0)
    with pytest.raises(ValueError, match=r"contiguous torch\.float32"):
        backend.draw(torch.zeros(20, dtype=torch.float64), -math.inf, 1.0, 0)


def test_nan_is_never_drawn(backend: NativeBackend) -> None:
    logits = some_logits(1000)
    logits[::3] = math.nan
    assert all(backend.draw(logits, -math.inf, 1.0, key) % 3 for key in range(300))


def test_verify_takes_the_tokens_it_is_given() -> None:
    sequence = make_sequence([1, 2, 3], temperature=1.0)
    sequence.num_computed_tokens = 2
    (verdict,) = verify(torch.zeros(1, 6), [Work(sequence, 1)], lambda logits, nodes: [5] * len(nodes))
    assert verdict.tokens == (5,)


@pytest.mark.parametrize("name", ["torch", pytest.param("native", marks=needs_native)])
def test_a_sample_is_the_reference_draw_of_every_node(name: str) -> None:
    backend: Backend = TorchBackend("float32", torch.device("cpu")) if name == "torch" else NativeBackend("float32", 1)
    logits = torch.stack([some_logits(3000), some_logits(3000).flip(0)])
    draft = Draft((7,), (-1,), (0.5,), ("",))
    plain, penalised = (make_sequence([1, 2, 3], temperature=0.8, logit_bias=bias) for bias in ({}, {11: 50.0}))
    for sequence in (plain, penalised):
        nodes = [NodeDraw(1 + node, sequence, draft, node, 1 + node) for node in (-1, 0)]
        rows = [node.adjusted(logits) for node in nodes]
        expected = [
            reference.draw(row, floor(row, sequence.params), 0.8, stream_key(sequence.seed, position))
            for position, row in enumerate(rows, sequence.num_tokens)
        ]
        drawn = backend.sample(logits, nodes)
        assert [drawn[place] for place in range(len(nodes))] == expected
    assert 11 in expected
    assert backend.sample(torch.full((2, 9), math.nan), nodes[:1])[0] == NOT_FINITE
