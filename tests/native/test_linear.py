"""Linear layers and embeddings against float64, and every row against itself in other company: equal bits."""

from __future__ import annotations

import time

import pytest
import torch

from foredraft.backends.layers import Linear
from foredraft.backends.native.backend import NativeBackend
from foredraft.backends.weight import Weight
from foredraft.kernels.build import Level
from tests.backends import needs_native
from tests.native.conftest import LEVELS, backend_of
from tests.native.weights import CASES, KINDS, as_met, bf16_rounded, error, fitting, linear_of, random_weight

pytestmark = needs_native
*COMPARED, PLAINEST = [level for level in LEVELS if level.name != "sse4"] or [None]  # sse4 rounds a multiply-add twice
ROW_COUNTS = (1, 2, 3, 4, 5, 6, 7, 8, 9, 16, 33, 65)


@pytest.mark.parametrize(("kind", "activations"), CASES)
@pytest.mark.parametrize(("outputs", "inputs"), [(1, 32), (17, 96), (40, 64), (100, 576), (333, 1568)])
def test_linear_is_exact_and_rows_do_not_know_each_other(
    level: Level, kind: str, activations: str, outputs: int, inputs: int
) -> None:
    backend, inputs = backend_of(level, activations=activations), fitting(kind, inputs)
    weight = random_weight(kind, outputs, inputs)
    layer = linear_of(backend, weight)
    x = bf16_rounded(max(ROW_COUNTS), inputs)
    together = backend.linear(x, layer)
    assert layer.bias is not None
    reference = as_met(x, kind, activations).double() @ weight.dense().double().T + layer.bias.double()
    assert error(together, reference) < 1e-5
    for rows in ROW_COUNTS:
        first = int(torch.randint(0, len(x) - rows + 1, ()))
        assert torch.equal(backend.linear(x[first : first + rows], layer), together[first : first + rows])


@pytest.mark.parametrize("kind", ["f32", "bf16"])
@pytest.mark.parametrize("inputs", [1, 2, 3, 5, 55, 769, 1538])
def test_linear_takes_any_number_of_inputs(backend: NativeBackend, kind: str, inputs: int) -> None:
    weight = random_weight(kind, 21, inputs)
    x = torch.randn(19, inputs)
    layer = linear_of(backend, weight, bias=False)
    assert error(backend.linear(x, layer), x.double() @ weight.dense().double().T) < 1e-5
    assert torch.equal(backend.linear(x[4:5], layer), backend.linear(x, layer)[4:5])


@pytest.mark.parametrize("level", COMPARED, ids=lambda level: level.name)
@pytest.mark.parametrize("inputs", [32, 96, 608])
@pytest.mark.parametrize(("kind", "activations"), CASES[2:])
def test_quantised_layers_have_the_same_bits_at_every_level(
    kind: str, activations: str, inputs: int, level: Level
) -> None:
    """Whatever serves a number of rows: packed codes, unpacked ones, or tiles."""
    inputs = fitting(kind, inputs)
    weight = random_weight(kind, 40, inputs)
    backends = [backend_of(one, activations=activations) for one in (level, PLAINEST)]
    layers = [linear_of(backend, weight, bias=False) for backend in backends]
    x = torch.randn(70, inputs) * torch.logspace(-9, 9, 70)[:, None]
    x[3, 5] = x[40, inputs - 1] = 65278.0  # a group whose largest number just fits two planes of int8
    expected = backends[1].linear(x, layers[1])
    for rows in range(1, 71):
        assert torch.equal(backends[0].linear(x[70 - rows :], layers[0]), expected[70 - rows :])


@pytest.mark.parametrize(("outputs", "inputs"), [(16, 32), (33, 31), (40, 65), (100, 130), (17, 700)])
def test_bf16_rows_do_not_know_how_many_there_are(backend: NativeBackend, outputs: int, inputs: int) -> None:
    weight = random_weight("bf16", outputs, inputs)
    layer = linear_of(backend, weight, bias=False)
    x = torch.randn(70, inputs) * torch.logspace(-9, 9, 70)[:, None]
    together = backend.linear(x, layer)
    reference = x.double() @ weight.dense().double().T
    assert max(error(row, right) for row, right in zip(together, reference, strict=True)) < 1e-5
    for rows in range(1, 70):
        assert torch.equal(backend.linear(x[70 - rows :], layer), together[70 - rows :])


@pytest.mark.parametrize("value", [float("inf"), float("-inf"), 3.4e38, -3.4e38])
@pytest.mark.parametrize("kind", ["f32", "bf16"])
def test_what_is_huge_or_infinite_stays_so(backend: NativeBackend, kind: str, value: float) -> None:
    weight = Weight(kind, (torch.randn(40, 67) * 2.0**-20).to(torch.float32 if kind == "f32" else torch.bfloat16))
    x = torch.randn(5, 67)
    x[2, 66] = value
    result = backend.linear(x, linear_of(backend, weight, bias=False))
    assert torch.allclose(result.double(), x.double() @ weight.dense().double().T, rtol=1e-5, atol=1e-9)


@pytest.mark.parametrize("kind", KINDS)
def test_threads_change_no_bit(kind: str) -> None:
    inputs = fitting(kind, 576)
    weight = random_weight(kind, 1000, inputs)
    results = []
    for threads in (1, 2, 3):
        backend = NativeBackend("float32", threads)
        layer = Linear((backend.pack(weight),), 1000, inputs)
        torch.manual_seed(7)
        results.append([backend.linear(torch.randn(rows, inputs), layer) for rows in (1, 9, 300)])
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


def test_threads_come_and_go() -> None:
    """Pieces of a job for more threads than cores, for fewer than before, and for some that sleep."""
    weight = random_weight("q4", 333, 576)
    x = torch.randn(5, 576)
    backend = NativeBackend("float32", 1)
    layer = Linear((backend.pack(weight),), 333, 576)
    expected = backend.linear(x, layer)
    for number, threads in enumerate([2, 7, 3, 1, 16, 2, 40, 5] * 8):
        other = NativeBackend("float32", threads)
        if number % 8 == 0:
            time.sleep(0.003)  # long enough for all workers to sleep
        for rows in (5, 1, 3):
            assert torch.equal(other.linear(x[:rows], layer), expected[:rows])


def test_parts_of_several_kinds_fill_one_output(backend: NativeBackend) -> None:
    weights = [random_weight(kind, outputs, 64) for kind, outputs in (("q4", 33), ("q8", 16), ("bf16", 5))]
    layer = linear_of(backend, *weights)
    x = bf16_rounded(6, 64)
    assert layer.bias is not None
    parts = [as_met(x, weight.kind, "int8").double() @ weight.dense().double().T for weight in weights]
    assert error(backend.linear(x, layer), torch.cat(parts, 1) + layer.bias.double()) < 1e-5


@pytest.mark.parametrize("magnitude", [0.0, 2.0**-140, 2.0**-100, 2.0**100])
@pytest.mark.parametrize(("kind", "activations"), CASES[2:])
def test_extreme_activations_are_not_lost(level: Level, kind: str, activations: str, magnitude: float) -> None:
    backend = backend_of(level, activations=activations)
    weight = random_weight(kind, 16, fitting(kind, 64))
    x = bf16_rounded(3, weight.inputs) * magnitude
    result = backend.linear(x, linear_of(backend, weight, bias=False))
    dense = weight.dense().double()
    size = float((x.double().abs() @ dense.abs().T).max())  # of what is added up: the sums themselves may cancel
    expected = as_met(x, kind, activations).double() @ dense.T
    assert torch.allclose(result.double(), expected, rtol=0, atol=1e-5 * size + 1e-25)


def test_a_broken_row_stays_alone(backend: NativeBackend) -> None:
    for kind in KINDS:
        layer = linear_of(backend, random_weight(kind, 40, fitting(kind, 64)))
        x = torch.randn(9, layer.inputs)
        clean = backend.linear(x, layer)
        x[4, 7] = float("nan")
        broken = backend.linear(x, layer)
        others = [row for row in range(9) if row != 4]
        assert torch.equal(broken[others], clean[others])
        assert broken[4].isnan().all()


@pytest.mark.parametrize("kind", KINDS)
def test_embedding_returns_the_dequantised_rows(backend: NativeBackend, kind: str) -> None:
    inputs = fitting(kind, 96)
    weights = [random_weight(kind, 50, inputs), random_weight("q8", 30, inputs)]
    ids = torch.randint(0, 80, (23,))
    expected = torch.cat([weight.dense() for weight in weights])[ids]
    assert torch.equal(backend.embed(ids, linear_of(backend, *weights)), expected)
