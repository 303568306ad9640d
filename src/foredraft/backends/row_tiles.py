"""In how many rows at a time linear layers may run so that each row gets the same bits.

Torch's kernels add in an order that depends on the number of rows, so its backend runs them in tiles of proved sizes.
The other backends' rows are independent by construction: they need no tiles, and the same trial shows that it is so.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from copy import copy

import torch
from torch import Tensor

from foredraft.backends.base import Backend
from foredraft.backends.layers import Linear
from foredraft.backends.torch import TorchBackend
from foredraft.errors import InvalidParameter


def set_tiles(backend: Backend, tiles: tuple[int, ...] | None) -> None:
    """Kernels whose rows are independent by construction need no tiles; torch's do."""
    if isinstance(backend, TorchBackend):
        backend.row_tiles = tiles


def set_tiles_beside(target: Backend, backend: Backend, linears: Iterable[Linear]) -> None:
    """Give the backend of a model that drafts the tiles that its own layers need, if the target runs in tiles."""
    if isinstance(target, TorchBackend) and target.row_tiles is not None:
        set_tiles(backend, agreeing_row_counts(backend, linears))


@torch.inference_mode()
def agreeing_row_counts(backend: Backend, linears: Iterable[Linear]) -> tuple[int, ...]:
    """The largest set of row counts for which all these layers give each row the same bits, wherever it stands. Raises
    InvalidParameter where there is none."""
    backend = copy(backend)
    set_tiles(backend, None)  # the same kernels, in runs of as many rows as they are given
    distinct = {(linear.outputs, linear.inputs, linear.kinds): linear for linear in linears}
    agreeing: set[frozenset[int]] = set()
    generator = torch.Generator().manual_seed(1)
    for linear in distinct.values():
        rows = torch.randn(2 * backend.row_counts[-1], linear.inputs, generator=generator).to(
            backend.device, backend.activation_dtype
        )
        results = {count: _in_runs(backend, rows, linear, count, shift=0) for count in backend.row_counts}
        steady = [c for c in backend.row_counts if results[c] == _in_runs(backend, rows, linear, c, shift=1)]
        classes = {frozenset(c for c in steady if results[c] == results[d]) for d in steady}
        agreeing = {a & c for a in agreeing for c in classes} if agreeing else classes
    best = max(agreeing, key=lambda counts: (len(counts), -min(counts, default=0), sorted(counts)), default=frozenset())
    if not best:
        raise InvalidParameter(refusal(backend))
    return tuple(sorted(best))


def _in_runs(backend: Backend, rows: Tensor, linear: Linear, count: int, shift: int) -> bytes:
    """The bits of the first rows after a layer, which they pass `count` at a time, each at another place of its run per
    `shift`."""
    total, moved, digest = backend.row_counts[-1], rows.roll(shift, 0), hashlib.sha256()
    for start in range(0, shift + total, count):
        wanted = slice(max(0, shift - start), shift + total - start)
        digest.update(bits(backend.linear(moved[start : start + count], linear)[wanted]))
    return digest.digest()


def bits(values: Tensor) -> memoryview:
    """Of a tensor on any device, for a digest."""
    return values.cpu().contiguous().view(torch.uint8).numpy().data


def refusal(backend: Backend) -> str:
    return (
        f"exact=True cannot be kept with backend {backend.name!r} on {backend.device}: the bits of a row depend on its "
        "neighbours; use exact=False, which gives up that a text is the same alone and in a batch."
    )
