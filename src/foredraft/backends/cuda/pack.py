"""How weights lie in a GPU's memory, and in which order the kernels add over their inputs.

Codes stay as many bits as the file gives them. A stripe is 16 outputs, a block 64 inputs; their codes lie as the matrix
instruction wants them in its registers, so that each of a warp's 32 lanes reads its own 16 bytes and no other lane's:

    kind       a lane's words of a block     factors of a lane's row and group of 32 inputs
    bf16, f32  none: [outputs, inputs]       none
    q4, q4k    4 x int32                     scale, minimum (float16)
    q5, q5k    4 x int32, 4 x uint8 (bit 4)  scale, minimum
    q6         4 x int32, 4 x int16 (2 bits) two scales, of 16 inputs each
    q8         4 x int32, 4 x int32          scale
    mx4        4 x int32                     scale: a power of two

Lane 4 * g + t has rows g and g + 8 of the stripe. Each of its words has one row and one group of the block: word
2 * group + row half. In it are the codes of the group's inputs 16 * step + 8 * half + 2 * t + side, where step, half
and side are 0 or 1: 4 bits of each at 16 * side + 8 * step + 4 * half, 1 or 2 bits above them at as many times
4 * side + 2 * step + half, or 8 bits at 8 * (2 * half + side), in one word for each step.

Factors of blocks of 256 inputs are multiplied into those of groups. The bits of a code of mx4, moved to the end of a
float16's exponent, are 2**-14 of what it stands for; its scale makes up for that. Inputs and outputs that do not fill a
block or a stripe are filled up with codes and factors of 0.

A sum over inputs has a fixed shape: the inputs are cut into segments, each is added up on its own, in order, and the
segments' sums are added in order. The cut is a function of the layer's shape and kinds alone, never of the rows.

The same layer of all experts is one Linear (`of_experts`): that of the first expert, and how far away the others lie.
"""

from __future__ import annotations

from collections.abc import Sequence as Items
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from foredraft.backends.layers import Linear
from foredraft.backends.weight import Weight
from foredraft.errors import InvalidModel

STRIPE = 16  # outputs
BLOCK = 64  # inputs
OUTPUT_TILE = 64  # outputs that a program has at least: what one instruction multiplies
_SPREAD = 128  # so many tiles of outputs keep the device busy
_PROGRAMS = 256  # so many programs are enough
_LONG, _SHORT = 512, 192  # the shortest segments of layers with many and with few outputs
_LONGEST_OF_CODES = 2048
_FEW_TILES = 32
_STRIPED = (0, 3, 2, 7, 4, 1, 5, 6, 8)  # stripe, row half, g, block, group, step, half, t, side -> as above


@dataclass(frozen=True)
class Form:
    """How the codes of a kind are packed."""

    # Of the words with the bits above the first 4, or with the second half of the codes.
    high: torch.dtype | None = None
    high_bits: int = 0
    offset: int = 0  # that is added to codes so that none is negative
    group: int = 32


FORMS = {
    "q4": Form(),
    "q5": Form(torch.uint8, 1),
    "q6": Form(torch.int16, 2, 32, 16),
    "q8": Form(torch.int32, 8, 128),
    "mx4": Form(),
}
_LARGEST_EXPONENT = 128  # of mx4: larger scales are none of float16
_BLOCKED = {"q4k": "q4", "q5k": "q5"}  # kinds whose blocks have factors too
KINDS = ("f32", "bf16", *FORMS, *_BLOCKED)


@dataclass(frozen=True, eq=False)
class Packed:
    """A weight as the kernels read it. `padded` is how many inputs the codes stand for; `kind` is f32, bf16, f16 or one
    of FORMS."""

    kind: str
    outputs: int
    inputs: int
    padded: int
    low: Tensor  # [stripes, blocks, 32, 4] words, or [outputs, inputs] values
    high: Tensor | None = None  # [stripes, blocks, 32, 4] words
    factors: Tensor | None = None  # [stripes, blocks, 8, 4] pairs of float16 as int32, or single ones as int16
    # [experts, 3] int64: how far `low`, `high` and `factors` of each expert are from these, in elements.
    distances: Tensor | None = None

    @property
    def dtype(self) -> torch.dtype:
        """What x is rounded to."""
        return {"f32": torch.float32, "bf16": torch.bfloat16}.get(self.kind, torch.float16)

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        return self.low, self.high, self.factors

    @property
    def nbytes(self) -> int:
        return sum(part.numel() * part.element_size() for part in self.tensors if part is not None)


@dataclass(frozen=True)
class Cut:
    """The order over inputs: `count` segments of `length` inputs; the last may be shorter."""

    length: int
    count: int


def cut(weight: Linear) -> Cut:
    """Few outputs need several segments to keep the device busy with few rows; they must not be too short either.
    Experts are several at once, which is enough."""
    blocks = -(-weight.inputs // BLOCK)
    tiles = -(-weight.outputs // OUTPUT_TILE)
    if tiles >= _SPREAD or any(part.distances is not None for part in weight.parts):
        return Cut(blocks * BLOCK, 1)
    shortest = _SHORT if tiles < _FEW_TILES else _LONG
    wanted = -(-_PROGRAMS // tiles)
    if any(part.kind in FORMS for part in weight.parts):  # codes take longer to widen than to read
        wanted = max(wanted, -(-blocks * BLOCK // _LONGEST_OF_CODES))
    count = max(1, min(1 << (wanted - 1).bit_length(), blocks * BLOCK // shortest, 8))
    length = -(-blocks // count)
    return Cut(length * BLOCK, -(-blocks // length))


def pack(weight: Weight, device: torch.device) -> Packed:
    """Lay a weight out on the device."""
    outputs, inputs = weight.outputs, weight.inputs
    if weight.kind in ("f32", "bf16"):
        return Packed(weight.kind, outputs, inputs, inputs, weight.values.to(device).contiguous())
    kind = _BLOCKED.get(weight.kind, weight.kind)
    if kind not in FORMS:
        raise ValueError(f"A weight of kind {weight.kind!r} is not known; the kinds are {', '.join(KINDS)}.")
    if inputs % 32:
        raise ValueError(f"A {weight.kind} weight [{outputs}, {inputs}] cannot be packed: inputs come in groups of 32.")
    form = FORMS[kind]
    if kind == "mx4":
        weight = _with_float_scales(weight)
    codes = _striped(weight.values.to(device).to(torch.int32) + form.offset)
    low, high = _words(codes, form)
    return Packed(kind, outputs, inputs, -(-inputs // BLOCK) * BLOCK, low, high, _factors(weight, form, device))


def of_experts(linears: Items[Linear]) -> Linear:
    """The same layer of all experts as one. Whoever has it keeps the experts, too: it holds the first one's alone."""
    first = linears[0]
    if any(
        (linear.outputs, linear.inputs, linear.kinds) != (first.outputs, first.inputs, first.kinds)
        for linear in linears
    ):
        raise InvalidModel(
            "The experts of a layer have weights of different kinds or shapes, which no kernel takes together; use "
            "dtype='bfloat16'."
        )

    def joined(packed: Items[Packed]) -> Packed:
        origin = packed[0]
        away = [[_away(*pair) for pair in zip(one.tensors, origin.tensors, strict=True)] for one in packed]
        return replace(origin, distances=torch.tensor(away, device=origin.low.device))

    biases = [linear.bias for linear in linears if linear.bias is not None]
    assert len(biases) in (0, len(linears))
    bias = torch.stack(biases) if biases else None
    parts = tuple(joined(same) for same in zip(*(linear.parts for linear in linears), strict=True))
    return Linear(parts, first.outputs, first.inputs, bias, first.kinds)


def _away(tensor: Tensor | None, origin: Tensor | None) -> int:
    """How far one is from the other, in elements. The kernels read up to 16 of them at once."""
    if tensor is None or origin is None:
        return 0
    distance = (tensor.data_ptr() - origin.data_ptr()) // tensor.element_size()
    assert distance % 16 == 0 or not tensor.is_cuda, "allocations of a device begin at multiples of many bytes"
    return distance


def _with_float_scales(weight: Weight) -> Weight:
    """mx4 with scales in float16, for codes as the kernels read them."""
    assert weight.scales is not None
    if int(weight.scales.max()) > _LARGEST_EXPONENT:
        raise InvalidModel(
            f"A layer in MXFP4 has weights above {6 * 2 ** (_LARGEST_EXPONENT - 127)}, which the kernels of a GPU do "
            "not hold in 4 bits; use dtype='bfloat16'."
        )
    ones = torch.ones_like(weight.scales, dtype=torch.float32)
    return replace(weight, scales=torch.ldexp(ones, weight.scales.int() - 127 + 14).half())


def _filled(values: Tensor, inputs: int) -> Tensor:
    """With zeros for the outputs and inputs that a stripe and a block lack; `inputs` of the values make a block."""
    return torch.nn.functional.pad(values, (0, -values.shape[1] % inputs, 0, -values.shape[0] % STRIPE))


def _striped(codes: Tensor) -> Tensor:
    """[outputs, inputs] -> [stripes, blocks, 32 lanes, 4 words, step, half, side]"""
    codes = _filled(codes, BLOCK)
    places = codes.view(len(codes) // STRIPE, 2, 8, -1, 2, 2, 2, 4, 2).permute(_STRIPED)
    return places.reshape(*places.shape[:2], 32, 4, 2, 2, 2)


def _words(codes: Tensor, form: Form) -> tuple[Tensor, Tensor | None]:
    def word(parts: Tensor, shifts: list[int]) -> Tensor:
        """Codes [..., steps, 2, 2] that lie in one word, in this order."""
        total = torch.zeros(codes.shape[:4], dtype=torch.int32, device=codes.device)
        for part, shift in zip(parts.flatten(4).unbind(-1), shifts, strict=True):
            total |= part << shift
        return total

    if form.high_bits == 8:
        low, high = (word(codes[..., step, :, :], [0, 8, 16, 24]) for step in range(2))
        return low, high
    pairs = [(pair, side) for pair in range(4) for side in range(2)]
    low = word(codes & 15, [16 * side + 4 * pair for pair, side in pairs])
    if form.high is None:
        return low, None
    bits = form.high_bits
    return low, word(codes >> 4, [bits * (4 * side + pair) for pair, side in pairs]).to(form.high)


def _factors(weight: Weight, form: Form, device: torch.device) -> Tensor:
    """[stripes, blocks, g, word]; a word of codes has the same place."""

    def of(groups: Tensor, blocks: Tensor | None) -> Tensor:
        factors = groups.to(device)
        if blocks is not None:
            per_block = groups.shape[1] // blocks.shape[1]
            factors = (factors.float() * blocks.to(device).float().repeat_interleave(per_block, 1)).half()
        return factors

    assert weight.scales is not None
    scales = of(weight.scales, weight.block_scales)
    if form.group == 16:
        pairs = scales.unflatten(1, (-1, 2))
    elif weight.minimums is None:
        pairs = scales[:, :, None]
    else:
        pairs = torch.stack([scales, of(weight.minimums, weight.block_minimums)], 2)
    width = pairs.shape[2]
    pairs = _filled(pairs.flatten(1), 2 * width)
    places = pairs.view(len(pairs) // STRIPE, 2, 8, -1, 2, width).permute(0, 3, 2, 4, 1, 5).contiguous()
    return places.view(torch.int32 if width == 2 else torch.int16).view(*places.shape[:3], 4)
