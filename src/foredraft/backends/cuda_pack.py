"""How weights lie in a GPU's memory, and in which order the kernels add over their inputs.

Codes stay as many bits as the file gives them. They are packed in planes: one word holds the codes of inputs that stand
32 apart, so that a plane is one group of 32 neighbouring inputs, and a kernel has it by one shift and one mask:

    kind       block of inputs          words of a row and block               factors of a row and block
    bf16, f32  none                     the values                             none
    q8         128 = 4 planes of 8 bit  32 x int32                             4 x scale, float16
    q4         256 or 128               32 x int32, or 32 x int16              8 or 4 x (scale, minimum), float16
    q5         256 = 8 planes           32 x int32 (4 bits), 32 x uint8 (1)    as q4
    q4k        256                      32 x int32                             4 x int32: int8 (scale, minimum) twice
    q5k        256                      32 x int32, 32 x uint8                 as q4k
    q6         256                      32 x int32, 32 x int16 (2 bits)        4 x int32: int8 scale of 16 inputs, 4 x

Kinds with factors of blocks have one more word a block: scale and minimum (float16). Inputs that do not fill a block
are filled up with codes and factors of 0.

A sum over inputs has a fixed shape: the inputs are cut into segments, each is added up on its own, in order, and the
segments' sums are added in order. The cut is a function of the layer's shape and kinds alone, never of the rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from foredraft.backends.base import Linear, Weight

GROUP = 32  # inputs in a plane
OUTPUT_TILE = 64  # outputs that a program has at least: what one instruction multiplies
_SPREAD = 128  # so many tiles of outputs keep the device busy
_PROGRAMS = 256  # so many programs are enough
_LONG, _SHORT = 512, 192  # the shortest segments of layers with many and with few outputs
_LONGEST_OF_CODES = 2048
_FEW_TILES = 32


@dataclass(frozen=True)
class Form:
    """How the codes of a kind are packed."""

    planes: int
    bits: int  # of a code in `low`
    high_bits: int = 0
    offset: int = 0  # that is added to codes so that none is negative
    group: int = GROUP
    minimums: bool = False
    blocks: bool = False  # blocks of inputs have factors too

    @property
    def block(self) -> int:
        return self.planes * GROUP

    @property
    def factors(self) -> int:
        """Of a block, in units of how they are stored."""
        return 4 if self.blocks else self.planes * (2 if self.minimums else 1)


FORMS = {
    "q8": Form(4, 8, offset=128),
    "q4": Form(8, 4, minimums=True),
    "q4k": Form(8, 4, minimums=True, blocks=True),
    "q5": Form(8, 4, 1, minimums=True),
    "q5k": Form(8, 4, 1, minimums=True, blocks=True),
    "q6": Form(8, 4, 2, offset=32, group=16, blocks=True),
}
_HALF_BLOCK = Form(4, 4, minimums=True)  # q4 of inputs that would leave much of a block empty
_WORDS = {8: torch.uint8, 16: torch.int16, 32: torch.int32}
KINDS = ("f32", "bf16", *FORMS)


@dataclass(frozen=True, eq=False)
class Packed:
    """A weight as the kernels read it. `inputs` is what x has; `padded` is how many the codes stand for."""

    kind: str
    outputs: int
    inputs: int
    padded: int
    low: Tensor  # [outputs, padded / planes] words, or [outputs, inputs] values
    high: Tensor | None = None  # [outputs, padded / planes]
    factors: Tensor | None = None  # [outputs, blocks * form.factors] float16 or int32
    block_factors: Tensor | None = None  # [blocks, outputs] int32
    form: Form | None = None

    @property
    def block(self) -> int:
        """Segments are cut at multiples of this many inputs."""
        return OUTPUT_TILE if self.form is None else self.form.block

    @property
    def nbytes(self) -> int:
        parts = (self.low, self.high, self.factors, self.block_factors)
        return sum(part.numel() * part.element_size() for part in parts if part is not None)


@dataclass(frozen=True)
class Cut:
    """The order over inputs: `count` segments of `length` inputs; the last may be shorter."""

    length: int
    count: int


def cut(weight: Linear) -> Cut:
    """Few outputs need several segments to keep the device busy with few rows; they must not be too short either."""
    granule = max(part.block for part in weight.parts)
    blocks = -(-max(part.padded for part in weight.parts) // granule)
    tiles = -(-weight.outputs // OUTPUT_TILE)
    if tiles >= _SPREAD:
        return Cut(blocks * granule, 1)
    shortest = _SHORT if tiles < _FEW_TILES else _LONG
    wanted = -(-_PROGRAMS // tiles)
    if any(part.form is not None for part in weight.parts):  # codes take longer to widen than to read
        wanted = max(wanted, -(-blocks * granule // _LONGEST_OF_CODES))
    count = max(1, min(1 << (wanted - 1).bit_length(), blocks * granule // shortest, 8))
    length = -(-blocks // count)
    return Cut(length * granule, -(-blocks // length))


def pack(weight: Weight, device: torch.device) -> Packed:
    """Lay a weight out on the device."""
    outputs, inputs = weight.outputs, weight.inputs
    if weight.kind in ("f32", "bf16"):
        return Packed(weight.kind, outputs, inputs, inputs, weight.values.to(device).contiguous())
    if weight.kind not in FORMS:
        raise ValueError(f"A weight of kind {weight.kind!r} is not known; the kinds are {', '.join(KINDS)}.")
    form = FORMS[weight.kind]
    if inputs % GROUP:
        raise ValueError(f"A {weight.kind} weight [{outputs}, {inputs}] cannot be packed: inputs come in groups of 32.")
    if weight.kind == "q4" and -inputs % form.block:
        form = _HALF_BLOCK
    padded = -(-inputs // form.block) * form.block
    codes = _padded(weight.values.to(device).to(torch.int32) + form.offset, padded)
    low = _planes(codes & ((1 << form.bits) - 1), form, form.bits)
    high = _planes(codes >> form.bits, form, form.high_bits) if form.high_bits else None
    factors, block_factors = _factors(weight, form, padded, device)
    return Packed(weight.kind, outputs, inputs, padded, low, high, factors, block_factors, form)


def _padded(values: Tensor, width: int) -> Tensor:
    return torch.nn.functional.pad(values, (0, width - values.shape[1]))


def _planes(codes: Tensor, form: Form, bits: int) -> Tensor:
    """[outputs, inputs] codes -> [outputs, inputs / planes] words: word i of a block holds inputs i, i + 32, …"""
    planes = codes.view(len(codes), -1, form.planes, GROUP)
    words = torch.zeros_like(planes[:, :, 0])
    for plane in range(form.planes):
        words |= planes[:, :, plane] << (plane * bits)
    return words.flatten(1).to(_WORDS[form.planes * bits]).contiguous()


def _factors(weight: Weight, form: Form, padded: int, device: torch.device) -> tuple[Tensor, Tensor | None]:
    def of(factors: Tensor | None, inputs: int) -> Tensor | None:
        return None if factors is None else _padded(factors.to(device), padded // inputs)

    scales, minimums = of(weight.scales, form.group), of(weight.minimums, form.group)
    assert scales is not None
    both = scales if minimums is None else torch.stack([scales, minimums], 2).flatten(1)
    if not form.blocks:
        return both.contiguous(), None
    block_scales, block_minimums = of(weight.block_scales, form.block), of(weight.block_minimums, form.block)
    assert block_scales is not None
    of_blocks = torch.stack([block_scales, block_scales if block_minimums is None else block_minimums], 2)
    return both.contiguous().view(torch.int32), of_blocks.view(torch.int32)[:, :, 0].t().contiguous()
