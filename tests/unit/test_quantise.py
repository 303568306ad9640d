"""Weights in the precision that an engine asks for."""

from __future__ import annotations

import pytest
import torch

from foredraft.backends.weight import MX4_VALUES, Weight
from foredraft.errors import InvalidModel
from foredraft.models import quantise
from foredraft.models.quantise import convert


def random(outputs: int = 6, inputs: int = 96) -> torch.Tensor:
    return torch.randn(outputs, inputs, generator=torch.Generator().manual_seed(0))


DENSE = Weight("f32", random())
HALF = Weight("bf16", random().bfloat16())
Q8 = Weight("q8", torch.randint(-127, 128, (6, 96), dtype=torch.int8), random(6, 3).abs().half())
Q4 = Weight("q4", torch.randint(0, 16, (6, 96), dtype=torch.uint8), random(6, 3).abs().half(), random(6, 3).half())

Q6 = Weight(
    "q6",
    torch.randint(-32, 32, (6, 256), dtype=torch.int8),
    torch.randint(-128, 128, (6, 16), dtype=torch.int8),
    block_scales=random(6, 1).half(),
)
Q4K = Weight(
    "q4k",
    torch.randint(0, 16, (6, 256), dtype=torch.uint8),
    torch.randint(0, 64, (6, 8), dtype=torch.int8),
    torch.randint(0, 64, (6, 8), dtype=torch.int8),
    random(6, 1).half(),
    random(6, 1).half(),
)
Q5 = Weight("q5", torch.randint(0, 32, (6, 96), dtype=torch.uint8), random(6, 3).abs().half(), random(6, 3).half())

# weight, dtype, least bits -> kind
KINDS = [
    (DENSE, "float32", 4, "f32"),
    (Q4, "float32", 4, "f32"),
    (DENSE, "bfloat16", 4, "bf16"),
    (Q8, "bfloat16", 8, "bf16"),
    (DENSE, "int8", 4, "q8"),
    (Q4, "int8", 4, "q8"),
    (Q6, "bfloat16", 4, "bf16"),
    (Q6, "int8", 4, "q6"),
    (Q5, "int8", 8, "q5"),
    (Q6, "int4", 4, "q4"),
    (Q6, "int4", 8, "q6"),
    (Q5, "int4", 8, "q5"),
    (HALF, "int4", 4, "q4"),
    (Q8, "int4", 4, "q4"),
    (HALF, "int4", 8, "q8"),
    (Q4K, "int8", 4, "q8"),
    (Q4K, "int4", 4, "q4k"),
    (Q4, "int4", 8, "q4"),  # what the file has in 4 bits stays so
]


@pytest.mark.parametrize(("weight", "dtype", "least_bits", "kind"), KINDS)
def test_kind(weight: Weight, dtype: str, least_bits: int, kind: str) -> None:
    converted = convert(weight, dtype, least_bits)
    assert converted.kind == kind
    assert converted.dense().shape == (converted.outputs, converted.inputs) == weight.values.shape


@pytest.mark.parametrize(
    ("weight", "dtype"), [(HALF, "bfloat16"), (Q8, "int8"), (Q6, "int8"), (Q5, "int8"), (Q4, "int4"), (Q4K, "int4")]
)
def test_what_is_there_already_is_kept(weight: Weight, dtype: str) -> None:
    assert convert(weight, dtype) is weight


def test_8_bits_that_are_to_be_kept_are_kept() -> None:
    assert convert(Q8, "int4", least_bits=8) is Q8


@pytest.mark.parametrize("dtype", ["bfloat16", "int8", "int4"])
def test_a_few_rows_at_a_time_are_all_rows(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = convert(DENSE, dtype)
    monkeypatch.setattr(quantise, "_PIECE_WEIGHTS", 4 * 96)
    pieces = convert(DENSE, dtype)
    assert pieces.kind == whole.kind
    assert torch.equal(pieces.dense(), whole.dense())


def test_8_bits_round_to_the_nearest_code() -> None:
    converted = convert(DENSE, "int8")
    assert converted.values.dtype == torch.int8 and converted.scales is not None
    groups = DENSE.values.view(6, 3, 32)
    assert torch.equal(converted.scales, (groups.abs().amax(2) / 127).half())
    error = (converted.dense() - DENSE.values).view(6, 3, 32).abs()
    assert (error <= converted.scales[:, :, None].float() * 0.55).all()  # the scale is rounded as well
    assert converted.values.view(6, 3, 32).abs().amax(2).eq(127).all()


def test_4_bits_span_minimum_to_maximum() -> None:
    converted = convert(DENSE, "int4")
    assert converted.values.dtype == torch.uint8 and converted.scales is not None and converted.minimums is not None
    groups, codes = DENSE.values.view(6, 3, 32), converted.values.view(6, 3, 32)
    assert torch.equal(converted.minimums, groups.amin(2).half())
    assert codes.amin(2).eq(0).all() and codes.amax(2).eq(15).all()
    error = (converted.dense() - DENSE.values).view(6, 3, 32).abs()
    assert (error <= converted.scales[:, :, None].float() * 0.55).all()  # the scale is rounded as well


@pytest.mark.parametrize("dtype", ["int8", "int4"])
def test_groups_without_spread(dtype: str) -> None:
    zeros = Weight("f32", torch.zeros(2, 32))
    assert torch.equal(convert(zeros, dtype).dense(), zeros.values)
    constant = Weight("f32", torch.full((2, 32), 0.75))
    assert torch.allclose(convert(constant, dtype).dense(), constant.values, rtol=2**-11)


@pytest.mark.parametrize("dtype", ["int8", "int4"])
def test_inputs_that_are_no_multiple_of_32(dtype: str) -> None:
    with pytest.raises(InvalidModel, match=r"48 inputs, which is not a multiple of 32.*use dtype float32 or bfloat16"):
        convert(Weight("f32", random(4, 48)), dtype)


def test_every_code_of_mxfp4_means_its_value_at_every_scale() -> None:
    codes = torch.arange(16, dtype=torch.uint8).repeat(256, 16)  # every code in both places of a pair
    codes[:, 32:] = codes[:, 32:].flip(1)
    exponents = torch.arange(256, dtype=torch.uint8)[:, None].expand(256, 8).contiguous()
    expected = torch.tensor(MX4_VALUES, dtype=torch.float64)[codes.int()] * 2.0 ** (exponents[:, :1].double() - 128)
    found = Weight("mx4", codes, exponents).dense()
    assert torch.equal(found.view(torch.int32), expected.float().view(torch.int32))
