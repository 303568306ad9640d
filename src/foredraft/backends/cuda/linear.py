"""Linear layers on a GPU: how the products (products) are cut, tiled and launched, for rows and for experts.

A layer of experts (pack.of_experts) has one segment for any number of rows, and its codes are always widened in
registers: few rows of a prompt meet each of them.

What multiplies bfloat16 weights is rounded to bfloat16; what multiplies codes to float16, and to at most 65504.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import triton  # type: ignore[import-not-found,unused-ignore]
from torch import Tensor

from foredraft.backends.cuda.launch import LARGEST, options
from foredraft.backends.cuda.pack import STRIPE, Cut, Packed, cut
from foredraft.backends.cuda.products import DENSE, FROM_EXPERTS, TO_EXPERTS, codes_kernel, values_kernel
from foredraft.backends.cuda.widen import all_rows, words_of
from foredraft.backends.layers import Linear

SPLIT_ROWS = 256  # up to so many rows, every segment has a program of its own
_FEW_OUTPUTS = 32768  # up to so many have small tiles: of few large ones some processors would have one more


@dataclass(frozen=True)
class Routes:
    """Which rows have which experts. A choice is a row and the rank of one of its experts: row * chosen + rank."""

    tasks: Tensor  # [tasks, 3] int32: an expert, or -1 in those that only fill up; and some of its choices, from and to
    choices: Tensor  # [rows * chosen] int32, expert by expert
    shares: Tensor  # [rows, chosen] float32: what the results of a row's experts are multiplied by, best first
    together: int  # the most rows of a task

    @property
    def chosen(self) -> int:
        return self.shares.shape[1]


@dataclass(frozen=True)
class Tile:
    """The work of one program: outputs x rows, inputs at a time; its warps, and how many loads are under way."""

    outputs: int
    rows: int
    inputs: int
    warps: int
    stages: int


# Of layers in bfloat16, for up to so many rows: where a program has all inputs, and where it has a segment of them.
_TILES = (
    (16, Tile(64, 16, 128, 4, 4), Tile(64, 16, 128, 4, 4)),
    (32, Tile(64, 32, 128, 4, 4), Tile(64, 32, 128, 4, 4)),
    (64, Tile(64, 64, 64, 4, 3), Tile(64, 64, 128, 4, 3)),
    (128, Tile(128, 128, 64, 8, 3), Tile(64, 128, 64, 4, 4)),
    (256, Tile(128, 128, 64, 8, 3), Tile(128, 128, 64, 8, 3)),
)


def tile_for(rows: int, packed: Packed, order: Cut) -> Tile:
    """What is fast for so many rows. Any choice gives the same bits."""
    if packed.kind == "f32":  # without matrix instructions: every row costs, and larger tiles need too many registers
        if rows <= 4:
            return Tile(16, triton.next_power_of_2(max(1, rows)), 64, 1, 4)
        return Tile(16, 8 if rows <= 8 else 16, 32, 2, 4) if rows <= 16 else Tile(32, 64, 32, 4, 2)
    if rows > SPLIT_ROWS:
        return Tile(128, 256, 64, 8, 3)
    if packed.factors is not None:
        wide = 16 if rows <= 16 else 32 if rows <= 32 else 64
        short = order.length < 1024
        if rows <= 8 or (rows <= 16 and short):
            return Tile(32, 8 if rows <= 8 else 16, 256, 2, 3)
        if rows <= 16 and packed.kind == "q4":  # others would need too many registers
            return Tile(32, 16, 256, 1, 3)
        return Tile(64, wide, 128, 4, 3) if rows <= 16 or short else Tile(128, wide, 128, 8, 3)
    if rows <= 8 and order.length < 1024:
        return Tile(16, 8, 64, 1, 4 if order.length < 512 else 8)
    if rows <= 16 and order.count == 1 and packed.distances is None and packed.outputs <= _FEW_OUTPUTS:
        return Tile(16, 8 if rows <= 8 else 16, 128, 1, 4)
    if rows <= 8 and order.count == 1:
        return Tile(32, 8, 128, 2, 4)
    whole, segment = next(tiles for most, *tiles in _TILES if rows <= most)
    tile = whole if order.count == 1 else segment
    return tile if order.length % tile.inputs == 0 else replace(tile, inputs=64)


def operand_dtype(weight: Linear) -> torch.dtype:
    """What a layer's input is rounded to."""
    kinds = {part.dtype for part in weight.parts}
    return kinds.pop() if len(kinds) == 1 else torch.float16 if torch.float16 in kinds else torch.float32


def sums(x: Tensor, weight: Linear, tile: Tile | None = None) -> Tensor:
    """The segments' sums of a layer, still to be added in order: float32 [segments or 1, rows, outputs]."""
    segments = 1 if len(x) > SPLIT_ROWS else cut(weight).count
    out = torch.empty((segments, len(x), weight.outputs), dtype=torch.float32, device=x.device)
    return _parts(x, weight, out, len(x), tile)


def to_experts(x: Tensor, weight: Linear, routes: Routes) -> Tensor:
    """Every row of x [rows, inputs] through a layer of its experts: float32 [1, choices, outputs]."""
    out = torch.empty((1, len(routes.choices), weight.outputs), dtype=torch.float32, device=x.device)
    return _parts(x, weight, out, len(x), None, (TO_EXPERTS.value, routes))


def from_experts(x: Tensor, weight: Linear, routes: Routes) -> Tensor:
    """What experts have made of rows, x [choices, inputs], through another layer of theirs and times their shares,
    still to be added in order: float32 [chosen, rows, outputs]."""
    rows = len(routes.shares)
    out = torch.empty((routes.chosen, rows, weight.outputs), dtype=torch.float32, device=x.device)
    return _parts(x, weight, out, rows, None, (FROM_EXPERTS.value, routes))


def can_gate(weight: Linear) -> bool:
    """Whether one program has a gate's whole sum beside its up's."""
    return len(weight.parts) == 1 and cut(weight).count == 1 and weight.outputs % (2 * STRIPE) == 0


def gated(
    x: Tensor, weight: Linear, dtype: torch.dtype, activation: str = "silu", routes: Routes | None = None
) -> Tensor:
    """activation(left half) * right half of the layer's outputs: [rows, outputs / 2]; of experts [choices, …]."""
    of_experts = None if routes is None else (TO_EXPERTS.value, routes)
    rows = len(x) if routes is None else len(routes.choices)
    out = torch.empty((rows, weight.outputs // 2), dtype=dtype, device=x.device)
    (part,) = weight.parts
    _launch(x, part, weight.bias, cut(weight), out, len(x), None, of_experts, activation)
    return out


def _parts(
    x: Tensor, weight: Linear, out: Tensor, rows: int, tile: Tile | None, route: tuple[int, Routes] | None = None
) -> Tensor:
    """Writes the sums of all parts of a layer."""
    order, column = cut(weight), 0
    for part in weight.parts:
        bias = None if weight.bias is None else weight.bias[..., column : column + part.outputs]
        _launch(x, part, bias, order, out[:, :, column:], rows, tile, route)
        column += part.outputs
    return out


def _launch(
    x: Tensor,
    part: Packed,
    bias: Tensor | None,
    order: Cut,
    out: Tensor,
    rows: int,
    tile: Tile | None,
    route: tuple[int, Routes] | None,
    gate: str | None = None,  # the activation, where there is one
) -> None:
    whole = route is None and rows > SPLIT_ROWS
    if whole and part.factors is not None:  # widened once, instead of by every tile of rows
        part = all_rows(part)
    if part.kind != "f32":
        x = rounded(x, part.dtype)
    if route is None:
        kind, chosen, routing = DENSE.value, 1, (x, x, x)
        tile = tile or tile_for(rows, part, order)
        row_tiles = triton.cdiv(rows, tile.rows)
    else:
        kind, routes = route
        tile, row_tiles, chosen = tile_for(routes.together, part, order), len(routes.tasks), routes.chosen
        routing = (routes.tasks, routes.choices, routes.shares)
    distances = x if part.distances is None else part.distances
    shared = {
        "ROUTE": kind,
        "HAS_BIAS": bias is not None,
        "GATED": gate is not None,
        "ACTIVATION": gate,
        "BO": tile.outputs,
        "BN": tile.rows,
        "BK": tile.inputs,
        "num_warps": tile.warps,
        "num_stages": tile.stages,
        **options(x.device),
    }
    grid = (row_tiles, triton.cdiv(part.outputs, tile.outputs), 1 if whole else order.count)
    given, columns = (x if bias is None else bias, out, *routing, distances, rows, part.inputs), out.stride(-2)
    even = part.inputs % tile.inputs == 0 and (order.length % tile.inputs == 0 or order.count == 1)
    if part.factors is not None:
        codes_kernel[grid](
            *(x, *words_of(part), *given, part.padded, part.outputs, columns, order.length, chosen),
            KIND=part.kind,
            HAS_HIGH=part.high is not None,
            EVEN=even,
            NATIVE=x.is_cuda,
            WARPS=tile.warps,
            **shared,
        )
    else:
        values_kernel[grid](
            *(x, part.low, *given, part.outputs, columns, order.length, order.count, chosen),
            WHOLE=whole,
            EVEN=even,
            **shared,
        )


def rounded(x: Tensor, dtype: torch.dtype) -> Tensor:
    if dtype is torch.float16 and x.dtype is not dtype:
        x = x.clamp(-LARGEST, LARGEST)
    return x.to(dtype)
