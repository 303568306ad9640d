"""The start-up self-test behind `exact=True`: proves on this device that a row's bits do not depend on its neighbours.

First every shape of linear layer is run with different numbers of rows; the largest set of row counts that agree
bit for bit becomes the backend's tiles, if it needs any. Then the first layers of the model are run token by token, all
at once, and among other sequences, and must give the same bits. Results are kept on disk per device, dtype and model
shape. Bits are compared by their digests: the logits of many rows would take more memory than a small model.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from foredraft.backends.base import Backend, LayerKV, Linear
from foredraft.backends.torch import TorchBackend
from foredraft.batch import pack
from foredraft.engine import disk_cache
from foredraft.errors import InvalidParameter
from foredraft.models.decoder import Decoder
from foredraft.models.rope import rope_table
from foredraft.params import SamplingParams
from foredraft.runtime.runner import Runner
from foredraft.types import Sequence, Work

_TOKENS, _LAYERS = 40, 8  # that must agree: a sum that differs shows only where rounding does not hide it


@dataclass(frozen=True)
class ExactReport:
    """What was proved: the row counts that agree with each other, and whether it was read from the cache."""

    row_counts: tuple[int, ...]
    from_cache: bool

    def __str__(self) -> str:
        counts = ", ".join(map(str, self.row_counts))
        return f"exact: rows give the same bits in runs of {counts}" + (" (proved earlier)" if self.from_cache else "")


def ensure_exact(backend: Backend, decoder: Decoder, dtype: str, cache_file: Path) -> ExactReport:
    """Prove row invariance, or read the proof, and set the tiles that it needs. Raises InvalidParameter if there is
    none."""
    key = disk_cache.machine_key(backend, decoder, dtype)
    known = disk_cache.read(cache_file, key, partial(_parse_row_counts, backend))
    if known is not None:
        _set_tiles(backend, known)
        return ExactReport(known, from_cache=True)
    counts = agreeing_row_counts(backend, decoder)
    _set_tiles(backend, counts)
    if not _enough(backend, counts):
        raise InvalidParameter(_refusal(backend))
    if not layers_agree(backend, decoder):
        raise InvalidParameter(_refusal(backend))
    disk_cache.write(cache_file, key, list(counts))
    return ExactReport(counts, from_cache=False)


def _parse_row_counts(backend: Backend, value: object) -> tuple[int, ...] | None:
    """Row counts that an earlier proof may have found."""
    if not isinstance(value, list) or not all(type(count) is int for count in value):
        return None
    counts = tuple(value)
    possible = counts == tuple(sorted(set(counts) & set(backend.row_counts))) and _enough(backend, counts)
    return counts if possible else None


def _enough(backend: Backend, counts: tuple[int, ...]) -> bool:
    """Torch's kernels are run in tiles of row counts that agree. With others, all must agree."""
    return bool(counts) if isinstance(backend, TorchBackend) else counts == backend.row_counts


@torch.inference_mode()
def agreeing_row_counts(backend: Backend, decoder: Decoder) -> tuple[int, ...]:
    """The largest set of row counts for which all linear layers give each row the same bits, wherever it stands."""
    agreeing: set[frozenset[int]] = set()
    generator = torch.Generator().manual_seed(1)
    for linear in _distinct_linears(decoder):
        rows = torch.randn(2 * backend.row_counts[-1], linear.inputs, generator=generator).to(
            backend.device, backend.activation_dtype
        )
        results = {count: _in_runs(backend, rows, linear, count, shift=0) for count in backend.row_counts}
        steady = [c for c in backend.row_counts if results[c] == _in_runs(backend, rows, linear, c, shift=1)]
        classes = {frozenset(c for c in steady if results[c] == results[d]) for d in steady}
        agreeing = {a & c for a in agreeing for c in classes} if agreeing else classes
    best = max(agreeing, key=lambda counts: (len(counts), -min(counts, default=0), sorted(counts)), default=frozenset())
    if not best:
        raise InvalidParameter(_refusal(backend))
    return tuple(sorted(best))


@torch.inference_mode()
def layers_agree(backend: Backend, decoder: Decoder) -> bool:
    """Whether a text's logits have the same bits token by token, at once, in pieces, and among other sequences."""
    config, block_size = decoder.config, 16
    rope = rope_table(config, _TOKENS).to(backend.device)  # the decoder's own may be shorter
    few = replace(decoder, layers=decoder.layers[:_LAYERS], rope=rope)
    generator = torch.Generator().manual_seed(2)
    text, other = (torch.randint(config.vocab_size, (_TOKENS,), generator=generator).tolist() for _ in range(2))
    slots = (10 * block_size, config.num_kv_heads, config.head_dim)

    def run(pieces: list[int], with_other: bool) -> bytes:
        kv = [
            LayerKV(*(torch.zeros(slots, dtype=backend.kv_dtype, device=backend.device) for _ in "kv"))
            for _ in few.layers
        ]
        runner = Runner(few, backend, kv)
        sequences = [_sequence(text, [2, 0, 5, 7, 9]), _sequence(other, [1, 3, 4, 6, 8])][: 1 + with_other]
        digest = hashlib.sha256()
        for piece in pieces:
            batch = pack([Work(sequence, piece) for sequence in sequences], block_size)
            _add_bits(digest, runner.forward(batch).logits[:piece])
            for sequence in sequences:
                sequence.num_computed_tokens += piece
        return digest.digest()

    reference = run([1] * _TOKENS, with_other=False)
    branches = (([_TOKENS], False), ([13, 7, _TOKENS - 20], True), ([_TOKENS], True))
    return all(reference == run(pieces, other) for pieces, other in branches)


def _in_runs(backend: Backend, rows: Tensor, linear: Linear, count: int, shift: int) -> bytes:
    """The bits of the first rows after a layer, which they pass `count` at a time, each at another place of its run per
    `shift`."""
    saved, total = _tiles(backend), backend.row_counts[-1]
    _set_tiles(backend, None)
    moved, digest = rows.roll(shift, 0), hashlib.sha256()
    for start in range(0, shift + total, count):
        wanted = slice(max(0, shift - start), shift + total - start)
        _add_bits(digest, backend.linear(moved[start : start + count], linear)[wanted])
    _set_tiles(backend, saved)
    return digest.digest()


def _add_bits(digest: hashlib._Hash, values: Tensor) -> None:
    digest.update(values.cpu().contiguous().view(torch.uint8).numpy().data)


def _distinct_linears(decoder: Decoder) -> list[Linear]:
    """One of each shape and kind of weights; layers of one model may differ in both."""
    linears = [linear for layer in decoder.layers for linear in (layer.qkv, layer.output, layer.gate_up, layer.down)]
    kinds = {(linear.outputs, linear.inputs, linear.kinds): linear for linear in (*linears, decoder.head)}
    return list(kinds.values())


def _sequence(tokens: list[int], block_table: list[int]) -> Sequence:
    params = SamplingParams(prompt_logprobs=0)  # so that the logits of all rows are wanted
    return Sequence(0, "", 0, list(tokens), len(tokens), params, 0, 1, block_table=block_table)


def _tiles(backend: Backend) -> tuple[int, ...] | None:
    return backend.row_tiles if isinstance(backend, TorchBackend) else None


def _set_tiles(backend: Backend, tiles: tuple[int, ...] | None) -> None:
    """Kernels whose rows are independent by construction need no tiles; torch's do."""
    if isinstance(backend, TorchBackend):
        backend.row_tiles = tiles


def _refusal(backend: Backend) -> str:
    return (
        f"exact=True cannot be kept with backend {backend.name!r} on {backend.device}: the bits of a row depend on its "
        "neighbours; use exact=False, which gives up that a text is the same alone and in a batch."
    )
