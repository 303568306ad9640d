"""Weights in the precision that an engine asks for. Codes that have it already are never recoded.

To be recoded, a weight is made dense a few rows at a time, so that no matrix ever lies in memory in float32.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from foredraft.backends.weight import Weight, join
from foredraft.config import QUANT_GROUP
from foredraft.errors import InvalidModel

_FOUR_BITS = ("q4", "q4k", "mx4")
_EIGHT_BITS = ("q8", "q6", "q5", "q5k")  # the kinds of more than 4 bits, which count as 8
_PIECE_WEIGHTS = 1 << 20  # weights that are dense at once


def convert(weight: Weight, dtype: str, least_bits: int = 4) -> Weight:
    """`weight` as `dtype`, one of config.DTYPES. With `least_bits` 8, int4 leaves 8 bits to what has more than 4."""
    if dtype == "float32":
        return Weight("f32", weight.dense())
    if dtype == "bfloat16":
        return (
            weight if weight.kind == "bf16" else _by_rows(weight, lambda rows: Weight("bf16", rows.dense().bfloat16()))
        )
    if dtype == "int4":
        if weight.kind in _FOUR_BITS:
            return weight
        if least_bits == 4:
            return _by_rows(weight, _to_4_bits)
    return weight if weight.kind in _EIGHT_BITS else _by_rows(weight, _to_8_bits)


def _by_rows(weight: Weight, recode: Callable[[Weight], Weight]) -> Weight:
    size = max(1, _PIECE_WEIGHTS // weight.inputs)
    starts = range(0, weight.outputs, size)
    return join((recode(weight.rows(start, start + size)) for start in starts), weight.outputs)


def _to_8_bits(weight: Weight) -> Weight:
    """Symmetric: the largest magnitude of a group becomes 127."""
    groups = _groups(weight)
    scales = (groups.abs().amax(dim=2) / 127).half()
    codes = (groups / _nonzero(scales)).round().clamp(-127, 127)
    return Weight("q8", codes.to(torch.int8).view(weight.outputs, weight.inputs), scales)


def _to_4_bits(weight: Weight) -> Weight:
    """Asymmetric: the smallest weight of a group becomes code 0, the largest code 15."""
    groups = _groups(weight)
    minimums = groups.amin(dim=2).half()
    spread = groups - minimums.float()[:, :, None]
    scales = (spread.amax(dim=2) / 15).half()
    codes = (spread / _nonzero(scales)).round().clamp(0, 15)
    return Weight("q4", codes.to(torch.uint8).view(weight.outputs, weight.inputs), scales, minimums)


def _groups(weight: Weight) -> torch.Tensor:
    """Dense float32 [outputs, groups, 32]."""
    if weight.inputs % QUANT_GROUP:
        raise InvalidModel(
            f"A layer has {weight.inputs} inputs, which is not a multiple of {QUANT_GROUP}, so it cannot be quantised; "
            "use dtype float32 or bfloat16 for this model."
        )
    return weight.dense().view(weight.outputs, -1, QUANT_GROUP)


def _nonzero(scales: torch.Tensor) -> torch.Tensor:
    """What the weights of a group are divided by [outputs, groups, 1]. Groups without spread divide by 1, which gives
    code 0 for all of them."""
    return torch.where(scales == 0, 1.0, scales.float())[:, :, None]
