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

from foredraft.backends.base import Backend
from foredraft.backends.layers import Layer
from foredraft.backends.row_tiles import agreeing_row_counts, bits, refusal, set_tiles
from foredraft.backends.torch import TorchBackend
from foredraft.batch import pack
from foredraft.engine import disk_cache
from foredraft.errors import InvalidParameter
from foredraft.models.decoder import Decoder
from foredraft.params import SamplingParams
from foredraft.runtime.kv import TARGET_GROUP, KVCache
from foredraft.runtime.runner import Runner
from foredraft.types import Draft, Sequence, Work

_TOKENS, _LAYERS = 136, 8  # that must agree: more keys than a block of attention, and layers enough to show rounding
_WINDOW = 48  # the longest sliding window in the proof: in longer ones no token would be out of sight
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
        set_tiles(backend, known)
        return ExactReport(known, from_cache=True)
    counts = agreeing_row_counts(backend, decoder.linears)
    set_tiles(backend, counts)
    if not _enough(backend, counts) or not layers_agree(backend, decoder):
        raise InvalidParameter(refusal(backend))
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
        longer = decoder.with_positions(_TOKENS)  # the decoder's own rotations may be fewer
        few = replace(longer, layers=tuple(map(_with_short_window, decoder.layers[:_LAYERS])))
        count, blocks = 1 + others, -(-(_TOKENS + 2 * _TREE) // self.block_size)
        of_layers = replace(config, num_layers=len(few.layers))
        kv = KVCache(count * blocks, self.block_size).add_group(TARGET_GROUP, of_layers, backend)
        self.runner = Runner(few, backend, kv)
        generator = torch.Generator().manual_seed(2)
        texts = [torch.randint(config.vocab_size, (_TOKENS,), generator=generator).tolist() for _ in range(count)]
        tables = [list(range(place, count * blocks, count))[::-1] for place in range(count)]
        self.sequences = [
            Sequence(0, "", 0, text, len(text), _ALL_LOGITS, 0, 1, block_table=table)
            for text, table in zip(texts, tables, strict=True)
        ]

    def logits(self, works: list[Work]) -> Tensor:
        logits = self.runner.forward(pack(works, self.block_size)).logits
        for work in works:
            work.sequence.num_computed_tokens += work.num_new_tokens
        return logits


def _with_short_window(layer: Layer) -> Layer:
    return replace(layer, shape=replace(layer.shape, window=min(layer.shape.window, _WINDOW)))


def _bits_of_pieces(
    backend: Backend, decoder: Decoder, pieces: list[int], others: int = 0, is_prompt: bool = False
) -> dict[int, bytes]:
    """The bits of the first sequence's logits by position. With `is_prompt` the first piece has no logits."""
    scene = _Scene(backend, decoder, others)
    found: dict[int, bytes] = {}
    for index, piece in enumerate(pieces):
        wanted = SamplingParams() if is_prompt and index == 0 else _ALL_LOGITS
        for sequence in scene.sequences:
            sequence.params = wanted
        start = scene.sequences[0].num_computed_tokens
        logits = scene.logits([Work(sequence, piece) for sequence in scene.sequences])
        if wanted is _ALL_LOGITS:
            found.update({start + row: _digest(logits[row]) for row in range(piece)})
    return found


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
    return {sequence.num_tokens + depth: _digest(logits[2 + 2 * depth]) for depth in range(_TREE)}


def _digest(row: Tensor) -> bytes:
    return hashlib.sha256(bits(row)).digest()
