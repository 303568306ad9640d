"""Native draws beside their reference in torch: the same token always, and the same noise bit for bit."""

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
from foredraft.params import MIN_TEMPERATURE, SamplingParams
from foredraft.sampling import draw as reference
from foredraft.sampling.draw import NOT_FINITE, LazyDraws, NodeDraw, pick
from foredraft.sampling.noise import gumbel, stream_key, uniform
from foredraft.sampling.pipeline import floor
from foredraft.sampling.verify import verify
from foredraft.types import NO_DRAFT, Draft, Work
from tests.backends import needs_native
from tests.native.conftest import backend_of
from tests.unit.unit_helpers import make_sequence

SETTINGS = [
    {"temperature": 0.0},
    {"temperature": 0.02},
    {"temperature": 0.8},
    {"temperature": 50.0},
    {"temperature": MIN_TEMPERATURE, "top_p": math.nextafter(1, 0)},
    {"temperature": 100.0, "top_p": 0.3},
    {"temperature": 1.0, "top_k": 40},
    {"temperature": 0.9, "top_p": 0.9},
    {"temperature": 1.3, "min_p": 0.03},
    {"temperature": 0.7, "top_k": 20, "top_p": 0.8, "min_p": 0.001},
    {"temperature": 1.0, "top_k": 1000, "top_p": 0.999},
    {"temperature": 1.0, "top_p": 1e-6},
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


def drawn(backend: Backend, logits: Tensor, seed: int, position: int, **fields: float) -> int:
    """The token that a backend draws at a position of a sequence."""
    sequence = make_sequence([1] * position, seed=seed, **fields)
    return backend.sample(logits[None], [NodeDraw(0, sequence, NO_DRAFT, -1, 0)])[0]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("vocab", VOCABULARIES)
def test_draws_what_the_reference_draws(backend: NativeBackend, vocab: int, shape: str) -> None:
    logits = SHAPES[shape](some_logits(vocab))
    for seed in range(6 if vocab > 10_000 else 40):
        for place, fields in enumerate(SETTINGS):
            params = SamplingParams(**fields).resolved({})
            assert drawn(backend, logits, seed, place, **fields) == pick(logits, params, seed, place)


@pytest.mark.parametrize("threads", [1, 3])
def test_many_rows_are_drawn_as_each_alone(level: Level, threads: int) -> None:
    """Each with settings of its own; one of them has a bad row, which costs the others nothing."""
    logits = torch.stack([some_logits(5000).roll(row) for row in range(40)])
    logits[7, 4999] = math.nan
    backend = backend_of(level, threads=threads)
    nodes = [
        NodeDraw(row, make_sequence([1] * row, seed=row, **SETTINGS[row % len(SETTINGS)]), NO_DRAFT, -1, 0)
        for row in range(len(logits))
    ]
    tokens = backend.sample(logits, nodes)
    expected = LazyDraws(logits, nodes)
    assert [tokens[row] for row in range(40)] == [expected[row] for row in range(40)]
    assert tokens[7] == NOT_FINITE


def test_the_noise_has_the_bits_of_the_reference(level: Level, tmp_path: Path) -> None:
    """Three million variates. The kernel's own source is compiled, with its own flags, behind a door for this test."""
    source, library = tmp_path / "door.c", tmp_path / "door.so"
    source.write_text(f'''#include "{SOURCES / "draw.c"}"
    void door(uint64_t key, int64_t count, double *out) {{
        for (int64_t id = 0; id < count; id++) out[id] = gumbel(hash(key, (uint64_t)id));
    }}''')
    if shutil.which("cc") is None:
        pytest.skip("there is no C compiler")
    sources = (source, SOURCES / "pool.c")
    subprocess.run(["cc", *FLAGS, *level.flags, f"-I{SOURCES}", "-o", library, *sources, "-lm"], check=True)
    variates = torch.empty(1_000_000, dtype=torch.float64)
    for key in (0, stream_key(42, 17), 2**64 - 1):
        out = ctypes.c_void_p(variates.data_ptr())
        ctypes.CDLL(str(library)).door(ctypes.c_uint64(key), ctypes.c_int64(len(variates)), out)
        assert torch.equal(variates, gumbel(uniform(key, torch.arange(len(variates)))))


def test_the_noise_alone_decides_among_equals(backend: NativeBackend) -> None:
    """The whole order of the best, to the last bit: each is taken away once it has won."""
    logits = torch.zeros(300_000)
    for winner in (
        gumbel(uniform(stream_key(42, 17), torch.arange(len(logits)))).argsort(descending=True)[:200].tolist()
    ):
        assert drawn(backend, logits, 42, 17, temperature=2.0**-19) == winner
        logits[winner] = -1.0


def test_a_logit_just_below_the_floor_is_out(backend: NativeBackend) -> None:
    """The floor is a double, and is compared as the reference compares: rounded to float32."""
    logits = torch.tensor([0.1, 0.2, 0.3])
    for lowest in (0.1, float(logits[1]), math.nextafter(float(logits[1]), 1), 0.2000001, 0.3):
        fields = {"temperature": 1.9, "min_p": math.exp((lowest - float(logits[2])) / 1.9)}
        params = SamplingParams(**fields).resolved({})
        assert [drawn(backend, logits, 0, place, **fields) for place in range(200)] == [
            pick(logits, params, 0, place) for place in range(200)
        ]


def test_logits_that_are_not_float32_rows_are_refused(backend: NativeBackend) -> None:
    with pytest.raises(ValueError, match=r"contiguous torch\.float32"):
        drawn(backend, torch.zeros(20, dtype=torch.float64), 0, 1)


@pytest.mark.parametrize("vocab", [1, 63, 64, 200])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_what_is_not_finite_is_told(backend: NativeBackend, temperature: float, vocab: int) -> None:
    for place in {0, vocab // 2, vocab - 1}:
        for value in (math.nan, math.inf):
            logits = some_logits(vocab)
            logits[place] = value
            assert drawn(backend, logits, 0, 1, temperature=temperature) == NOT_FINITE
    assert drawn(backend, torch.full((vocab,), -math.inf), 0, 1, temperature=temperature) == NOT_FINITE


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
