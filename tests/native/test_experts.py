"""Mixtures of experts in the native kernels: the right sums, experts of a row that are its own, and nothing read of an
expert that no row chose."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from foredraft.backends.layers import Experts, Linear, Mlp
from foredraft.backends.native.backend import NativeBackend
from foredraft.kernels.build import Level
from tests.backends import needs_native
from tests.native.conftest import backend_of
from tests.native.weights import error, fitting, random_weight

pytestmark = needs_native
COUNT, CHOSEN, WIDTH, ROWS = 9, 3, 256, 40


def packed(backend: NativeBackend, kind: str, outputs: int, inputs: int) -> tuple[Linear, Tensor]:
    weight = random_weight(kind, outputs, inputs)
    bias = torch.randn(outputs)
    return Linear((backend.pack(weight),), outputs, inputs, bias), weight.dense().double() / inputs


def scene(backend: NativeBackend, kind: str, normalised: bool = True) -> tuple[Experts, Tensor]:
    inner = fitting(kind, 96)

    def mlp() -> Mlp:
        return Mlp(packed(backend, kind, 2 * inner, WIDTH)[0], packed(backend, kind, WIDTH, inner)[0])

    router = packed(backend, "f32", COUNT, WIDTH)[0]
    return Experts(router, tuple(mlp() for _ in range(COUNT)), CHOSEN, normalised), torch.randn(ROWS, WIDTH)


def one_row(backend: NativeBackend, experts: Experts, x: Tensor, activation: str) -> Tensor:
    """By the other verbs, and in float64 where they end."""
    scores = backend.linear(x[None], experts.router)[0].double()
    best, chosen = scores.topk(experts.num_chosen)
    shares = best.softmax(0) if experts.normalised else scores.softmax(0)[chosen]
    updates = [
        backend.linear(backend.gated(backend.linear(x[None], mlp.gate_up), activation), mlp.down)[0].double()
        for mlp in (experts.each[expert] for expert in chosen.tolist())
    ]
    return sum((share * update for share, update in zip(shares, updates, strict=True)), torch.zeros(()))


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
@pytest.mark.parametrize("normalised", [True, False])
@pytest.mark.parametrize("kind", ["f32", "bf16", "q8", "q6", "q4", "q4k"])
def test_a_row_gets_what_its_experts_give(backend: NativeBackend, kind: str, normalised: bool, activation: str) -> None:
    experts, x = scene(backend, kind, normalised)
    mixed = backend.mix_experts(x, experts, activation)
    expected = torch.stack([one_row(backend, experts, row, activation) for row in x])
    assert error(mixed, expected) < 1e-5
    for rows in ([0], [7, 8], [39, 3, 3, 20, 11]):
        assert torch.equal(backend.mix_experts(x[rows], experts, activation), mixed[rows]), rows
    assert backend.mix_experts(x[:0], experts, activation).shape == (0, WIDTH)


def test_threads_do_not_change_the_bits(level: Level) -> None:
    backend = backend_of(level, threads=2)
    experts, x = scene(backend, "q4k")
    two = backend.mix_experts(x, experts, "silu")
    assert torch.equal(backend_of(level, threads=1).mix_experts(x, experts, "silu"), two)


def test_layers_of_several_kinds(backend: NativeBackend) -> None:
    """Gates and ups of two kinds: parts of one layer."""
    experts, x = scene(backend, "q4k")

    def of_two(down: Linear) -> Mlp:
        halves = [packed(backend, kind, down.inputs, WIDTH)[0] for kind in ("q4k", "q6")]
        parts = tuple(part for half in halves for part in half.parts)
        return Mlp(Linear(parts, 2 * down.inputs, WIDTH, torch.randn(2 * down.inputs)), down)

    experts = replace(experts, each=tuple(of_two(mlp.down) for mlp in experts.each))
    mixed = backend.mix_experts(x, experts, "silu")
    assert error(mixed, torch.stack([one_row(backend, experts, row, "silu") for row in x])) < 1e-5


def test_experts_that_no_row_chose_are_not_read(backend: NativeBackend) -> None:
    """Whatever their weights hold. The bias of the router decides which they are."""
    experts, x = scene(backend, "f32")
    bias = torch.tensor([1e4] * CHOSEN + [-1e4] * (COUNT - CHOSEN))
    experts = replace(experts, router=replace(experts.router, bias=bias))
    mixed = backend.mix_experts(x, experts, "silu")
    broken = Mlp(*(Linear((), 0, 0) for _ in range(2)))
    assert torch.equal(
        backend.mix_experts(x, replace(experts, each=(*experts.each[:CHOSEN], *[broken] * (COUNT - CHOSEN))), "silu"),
        mixed,
    )
    with pytest.raises(ValueError, match="do not fit together"):
        backend.mix_experts(x, replace(experts, each=(experts.each[0], broken, *experts.each[2:])), "silu")


def test_of_equal_scores_the_first_experts_are_chosen(backend: NativeBackend) -> None:
    experts, _ = scene(backend, "f32")
    flat = replace(experts, router=replace(experts.router, bias=torch.zeros(COUNT)))
    nothing = torch.zeros(1, WIDTH)
    last = replace(flat, each=(*flat.each[:CHOSEN], *reversed(flat.each[CHOSEN:])))
    first = replace(flat, each=(*reversed(flat.each[:CHOSEN]), *flat.each[CHOSEN:]))
    assert torch.equal(backend.mix_experts(nothing, last, "silu"), backend.mix_experts(nothing, flat, "silu"))
    assert not torch.equal(backend.mix_experts(nothing, first, "silu"), backend.mix_experts(nothing, flat, "silu"))


def test_rows_that_are_no_numbers_harm_no_other(backend: NativeBackend) -> None:
    experts, x = scene(backend, "f32")
    expected = backend.mix_experts(x, experts, "silu")
    damaged = x.clone()
    damaged[5:20] = torch.nan
    damaged[20, 3] = torch.inf
    mixed = backend.mix_experts(damaged, experts, "silu")
    others = [*range(5), *range(21, ROWS)]
    assert torch.equal(mixed[others], expected[others])
    assert mixed[5:20].isnan().all()


def test_wrong_input_is_an_exception(backend: NativeBackend) -> None:
    experts, x = scene(backend, "f32")
    narrow = packed(backend, "f32", COUNT - 1, WIDTH)[0]
    for name, wrong in {
        "no expert": replace(experts, each=()),
        "more than there are": replace(experts, num_chosen=COUNT + 1),
        "none chosen": replace(experts, num_chosen=0),
        "a router for fewer": replace(experts, router=narrow),
    }.items():
        with pytest.raises(ValueError, match=r"\.$"):
            backend.mix_experts(x, wrong, "silu")
            pytest.fail(f"{name} was taken")
    with pytest.raises(ValueError, match="x must be a contiguous"):
        backend.mix_experts(x[:, :-1].contiguous(), experts, "silu")
