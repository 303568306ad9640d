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
from foredraft.types import Draft, Sequence, Work

_TOKENS, _LAYERS = 136, 8  # that must agree: more keys than a block of attention, and layers enough to show rounding
_PIECE = 31  # the most rows of one sequence that a captured run has
_ALL_LOGITS = SamplingParams(prompt_logprobs=0)  # a prompt of a request that wants them has logits in every row
_TREE = 5  # depth of a draft tree in which every right node has a wrong sibling


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
    """Whether the logits of a sequence have the same bits token by token, in all pieces, among other sequences, after a
    prompt without logits, and as nodes of a draft tree."""
    reference = _bits_of_pieces(backend, decoder, [*[1] * 24, 96, *[1] * 16])
    most = backend.row_counts[-1] // _PIECE
    doubled = [2**power for power in range(5)]  # 1 to 16
    num_sequences = [1, *(most // 2**power for power in range(3) if most // 2**power > 1)]
    runs = [
        _bits_of_pieces(backend, decoder, [_TOKENS]),
        _bits_of_pieces(backend, decoder, [13, 7, _TOKENS - 20], others=1),
        _bits_of_pieces(backend, decoder, [*doubled, _TOKENS - sum(doubled)]),
        _bits_of_pieces(backend, decoder, [_TOKENS - 6, *[1] * 6], is_prompt=True),
        *(
            _bits_of_pieces(backend, decoder, [*[_PIECE] * 4, _TOKENS - 4 * _PIECE], count - 1)
            for count in num_sequences
        ),
        _bits_of_tree(backend, decoder),
    ]
    return all(bits and all(reference[place] == row for place, row in bits.items()) for bits in runs)


class _Scene:
    """A few layers of a model, a cache, and sequences of random tokens; the first sequence is always the same."""

    block_size = 16

    def __init__(self, backend: Backend, decoder: Decoder, others: int) -> None:
        config = decoder.config
        rope = rope_table(config, _TOKENS).to(backend.device)  # the decoder's own may be shorter
        few = replace(decoder, layers=decoder.layers[:_LAYERS], rope=rope)
        count, blocks = 1 + others, -(-(_TOKENS + 2 * _TREE) // self.block_size)
        slots = (count * blocks * self.block_size, config.num_kv_heads, config.head_dim)

        def side() -> Tensor:
            return torch.zeros(slots, dtype=backend.kv_dtype, device=backend.device)

        self.runner = Runner(few, backend, [LayerKV(side(), side()) for _ in few.layers])
        generator = torch.Generator().manual_seed(2)
        texts = [torch.randint(config.vocab_size, (_TOKENS,), generator=generator).tolist() for _ in range(count)]
        self.sequences = [
            _sequence(text, list(range(place, count * blocks, count))[::-1]) for place, text in enumerate(texts)
        ]

    def logits(self, works: list[Work]) -> Tensor:
        logits = self.runner.forward(pack(works, self.block_size)).logits
        for work in works:
            work.sequence.num_computed_tokens += work.num_new_tokens
        return logits


def _bits_of_pieces(
    backend: Backend, decoder: Decoder, pieces: list[int], others: int = 0, is_prompt: bool = False
) -> dict[int, bytes]:
    """The bits of the first sequence's logits by position. With `is_prompt` the first piece has no logits."""
    scene = _Scene(backend, decoder, others)
    bits: dict[int, bytes] = {}
    for index, piece in enumerate(pieces):
        wanted = SamplingParams() if is_prompt and index == 0 else _ALL_LOGITS
        for sequence in scene.sequences:
            sequence.params = wanted
        start = scene.sequences[0].num_computed_tokens
        logits = scene.logits([Work(sequence, piece) for sequence in scene.sequences])
        if wanted is _ALL_LOGITS:
            bits.update({start + row: _bits(logits[row]) for row in range(piece)})
    return bits


def _bits_of_tree(backend: Backend, decoder: Decoder) -> dict[int, bytes]:
    """The bits of the last positions, which are drafted: every right node has a wrong sibling before it."""
    scene = _Scene(backend, decoder, others=0)
    (sequence,) = scene.sequences
    right = sequence.token_ids[-_TREE:]
    del sequence.token_ids[-_TREE:]
    scene.logits([Work(sequence, sequence.num_tokens - 1)])
    tokens = [token for place in right for token in ((place + 1) % decoder.config.vocab_size, place)]
    parents = [2 * depth - 1 for depth in range(_TREE) for _ in range(2)]
    nodes = len(tokens)
    draft = Draft(tuple(tokens), tuple(parents), (1.0,) * nodes, ("",) * nodes)
    logits = scene.logits([Work(sequence, 1, nodes, draft)])
    return {sequence.num_tokens + depth: _bits(logits[2 + 2 * depth]) for depth in range(_TREE)}


def _bits(row: Tensor) -> bytes:
    digest = hashlib.sha256()
    _add_bits(digest, row)
    return digest.digest()


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
    return Sequence(0, "", 0, list(tokens), len(tokens), _ALL_LOGITS, 0, 1, block_table=block_table)


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
