"""Rounding to 4 bits with known inputs changes outputs less than rounding every weight alone."""

from __future__ import annotations

import torch

from foredraft.backends.weight import Weight
from foredraft.heads.draft_model.rounding import rounded
from foredraft.models.quantise import convert


def test_outputs_change_less_than_with_plain_rounding() -> None:
    torch.manual_seed(0)
    weight = torch.randn(48, 96)
    rows = torch.randn(500, 24) @ torch.randn(24, 96) + 0.3 * torch.randn(500, 96)  # inputs that go together
    plain = convert(Weight("f32", weight), "int4")
    ours = rounded(weight, rows.T @ rows)
    assert ours.kind == "q4" and ours.values.dtype == torch.uint8 and int(ours.values.max()) <= 15

    def error(coded: Weight) -> float:
        return float(((coded.dense() - weight) @ rows.T).square().mean())

    assert error(ours) < 0.5 * error(plain)


def test_inputs_that_do_not_go_together_are_rounded_alone() -> None:
    torch.manual_seed(0)
    weight = torch.randn(8, 64)
    weight[3, 32:] = 0.25  # a group without spread
    plain = convert(Weight("f32", weight), "int4")
    ours = rounded(weight, torch.eye(64))
    assert torch.equal(ours.dense(), plain.dense())
