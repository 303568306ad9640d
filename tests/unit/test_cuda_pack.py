"""Where codes and factors lie in a GPU's memory."""

from __future__ import annotations

import pytest
import torch

from foredraft.backends.cuda.pack import FORMS, pack
from foredraft.errors import InvalidModel
from tests.native.weights import fitting, random_weight

CPU = torch.device("cpu")
BITS = {"q4": 5, "q5": 6, "q6": 7, "q8": 8.5, "mx4": 4.5}  # of a weight, with its part of the factors
KINDS = {"q4": "q4", "q4k": "q4", "q5": "q5", "q5k": "q5", "q6": "q6", "q8": "q8", "mx4": "mx4"}


@pytest.mark.parametrize("kind", KINDS)
def test_every_code_lies_where_the_lane_of_its_output_looks(kind: str) -> None:
    outputs, inputs = 40, fitting(kind, 96)
    weight = random_weight(kind, outputs, inputs)
    packed = pack(weight, CPU)
    form = FORMS[packed.kind]
    assert packed.kind == KINDS[kind] and packed.factors is not None
    dense = torch.zeros(outputs, inputs)
    for output in range(outputs):
        for k in range(inputs):
            block, group, step, half, t, side = k // 64, k // 32 % 2, k // 16 % 2, k // 8 % 2, k // 2 % 4, k % 2
            g, row_half = output % 8, output // 8 % 2
            place = (output // 16, block, 4 * g + t, 2 * group + row_half)
            pair = 2 * step + half
            low = int(packed.low[place])
            high = 0 if packed.high is None else int(packed.high[place])
            if packed.kind == "q8":
                code = (high if step else low) >> (8 * (2 * half + side)) & 255
            else:
                bits = form.high_bits
                above = high >> (bits * (4 * side + pair)) & ((1 << bits) - 1)
                code = (low >> (16 * side + 4 * pair) & 15) | above << 4
            assert code - form.offset == int(weight.values[output, k]), (output, k)
            factors = packed.factors[output // 16, block, g, 2 * group + row_half].reshape(1).view(torch.float16)
            scale = float(factors[step if packed.kind == "q6" else 0])
            if packed.kind == "mx4":  # as many exponents below what it stands for as its scale is above
                bits = torch.tensor((code & 8) << 12 | (code & 7) << 9, dtype=torch.int32).to(torch.int16)
                dense[output, k] = scale * float(bits.view(torch.float16))
                continue
            dense[output, k] = scale * (code - form.offset) + (float(factors[1]) if packed.kind in ("q4", "q5") else 0)
    assert (dense - weight.dense()).norm() < 4e-4 * weight.dense().norm()


@pytest.mark.parametrize("kind", BITS)
def test_a_weight_takes_the_bits_of_its_codes_and_factors(kind: str) -> None:
    outputs, inputs = 64, 512
    assert pack(random_weight(kind, outputs, inputs), CPU).nbytes == outputs * inputs * BITS[kind] / 8


def test_what_a_stripe_and_a_block_lack_weighs_nothing() -> None:
    packed = pack(random_weight("q4", 17, 96), CPU)
    assert packed.factors is not None and packed.padded == 128
    of_rows = packed.factors.view(2, 2, 8, 2, 2)  # stripe, block, g, group, row half
    assert not of_rows[1, :, 1:].any() and not of_rows[1, :, :, :, 1].any()
    assert not of_rows[:, 1, :, 1].any()


def test_scales_of_mxfp4_that_float16_does_not_hold_are_refused() -> None:
    weight = random_weight("mx4", 8, 64)
    assert weight.scales is not None
    weight.scales[3, 1] = 129
    with pytest.raises(InvalidModel, match=r"MXFP4 has weights above 12.*use dtype='bfloat16'\.$"):
        pack(weight, CPU)


def test_tells_which_inputs_fit() -> None:
    with pytest.raises(ValueError, match=r"\[8, 40\] cannot be packed: inputs come in groups of 32"):
        weight = random_weight("q4", 8, 64)
        pack(type(weight)("q4", weight.values[:, :40], weight.scales, weight.minimums), CPU)
