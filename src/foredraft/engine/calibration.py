"""What runs of the target take on this machine, by their rows: measured in seconds, kept on disk."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from math import inf
from pathlib import Path
from statistics import median

import torch

from foredraft.backends.base import Backend
from foredraft.backends.torch import TorchBackend
from foredraft.batch import pack
from foredraft.control.costs import Calibration
from foredraft.control.economics import VerifyCurve
from foredraft.engine import disk_cache
from foredraft.engine.blocks import BlockPool
from foredraft.params import SamplingParams
from foredraft.runtime.kv import TARGET_GROUP, KVCache
from foredraft.runtime.runner import Runner
from foredraft.sampling.verify import verify
from foredraft.types import Draft, Sequence, Work

log = logging.getLogger(__name__)

ROWS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
_ROWS_EACH = 16  # of each sequence, in runs of more rows than these
ROUNDS = 9
CONTEXT = 256  # tokens before the rows that are timed
_TORCH_ROWS, _TORCH_CONTEXT = (1, 2, 8, 16), 16  # fewer, because torch's kernels are slow
_FAR = 3  # a second, longer context is this many times CONTEXT; the difference gives the cost of a key
_ALWAYS = 16  # runs of up to this many rows are measured however long they take
_FIRST_PIECE = 8  # tokens of the context in the first run; later runs grow with the measured speed
_MOST_PIECE = 32
_ENOUGH_S = 6.0  # no further round begins after so long; the first three rounds may take twice as long
_MAX_SECONDS = 1e6  # no run takes so long


@dataclass(frozen=True)
class _Shapes:
    """What is timed: these rows, each after `context` tokens, and some of them once more after `far` tokens."""

    rows: tuple[int, ...]
    context: int
    far: int

    @classmethod
    def within(cls, max_model_len: int, backend: Backend) -> _Shapes:
        """As much of it as a text of this model may have."""
        counts, context = (_TORCH_ROWS, _TORCH_CONTEXT) if isinstance(backend, TorchBackend) else (ROWS, CONTEXT)
        rows = tuple(count for count in counts if count <= 2 or count < max_model_len // 2)
        far = max(0, min(_FAR * context, max_model_len - rows[-1]))
        # What only many sequences have, where so many rows still share a run: on a GPU.
        of_batches = [count for count in backend.row_counts if count > rows[-1] == ROWS[-1]]
        return cls((*rows, *of_batches), far // _FAR, far)


class Calibrator:
    """Measures what runs of the target cost on this machine, one run at a time, and keeps the result on disk."""

    def __init__(self, runner: Runner, pool: BlockPool, max_model_len: int, dtype: str, file: Path) -> None:
        self._runner = runner
        self._pool = pool
        self._shapes = _Shapes.within(max_model_len, runner.backend)
        self._dtype = dtype
        self._file = file
        self._runs: Iterator[Calibration | None] | None = None

    def cached(self) -> Calibration | None:
        """An earlier calibration of this model on this machine."""
        return disk_cache.read(self._file, self._key(), partial(_parse, self._shapes))

    def step(self, max_run_s: float = inf) -> Calibration | None:
        """Make one run; returns the calibration with the last. Row counts whose runs would take longer than `max_run_s`
        are left out; such a calibration is not kept."""
        if self._runs is None:
            log.info("Measuring what runs of this model take on this machine; this is done once.")
            self._runs = _runs(self._runner, self._pool, self._shapes, max_run_s)
        new = next(self._runs)
        if new is not None:
            self._runs = None  # which holds the memory that it ran in
        if new is not None and new.curve.rows == self._shapes.rows:
            curve = {"rows": new.curve.rows, "seconds": new.curve.seconds}
            result = {**curve, "context": new.context, "seconds_per_key": new.seconds_per_key}
            disk_cache.write(self._file, self._key(), result)
        return new

    def _key(self) -> str:
        return disk_cache.machine_key(self._runner.backend, self._runner.decoder, self._dtype, self._shapes)


def _parse(shapes: _Shapes, value: object) -> Calibration | None:
    """A calibration that was written earlier, if it is one of these shapes."""
    match value:
        case {"rows": list(rows), "seconds": list(seconds), "context": shapes.context, "seconds_per_key": per_key}:
            possible = all(type(x) in (int, float) and 0 <= x < _MAX_SECONDS for x in (*seconds, per_key))
            if possible and all(seconds) and tuple(rows) == shapes.rows and len(seconds) == len(rows):
                return Calibration(VerifyCurve(shapes.rows, tuple(seconds)), shapes.context, per_key)
    return None


def calibrate(runner: Runner, pool: BlockPool, max_model_len: int) -> Calibration:
    """A calibration from beginning to end."""
    runs = _runs(runner, pool, _Shapes.within(max_model_len, runner.backend), inf)
    return next(calibration for calibration in runs if calibration is not None)


def _runs(runner: Runner, pool: BlockPool, shapes: _Shapes, max_run_s: float) -> Iterator[Calibration | None]:
    """Time the target on chains of rows after some tokens, and once after more; gives None after every run, and the
    calibration in the end. The row counts take turns, so that a slow moment hits all of them. Two first runs of each do
    not count, in which a backend may compile; they find the row counts whose runs would take too long.

    It runs in blocks of its own, of the pool's size: sequences that run or that are cached lose nothing by it.
    """
    vocab = runner.decoder.config.vocab_size
    tokens = [1 + index % (vocab - 1) for index in range(shapes.far + min(shapes.rows[-1], ROWS[-1]))]
    kv = KVCache(pool.blocks_for(len(tokens)), pool.block_size)
    own = Runner(runner.decoder, runner.backend, kv.add_group(TARGET_GROUP, runner.decoder.config, runner.backend))
    params, blocks = SamplingParams(temperature=0).resolved({}), list(range(kv.num_blocks))
    sequence = Sequence(-1, "", 0, tokens, len(tokens), params, 0, 1, block_table=blocks)

    probe = max(count for count in shapes.rows if count <= 8)
    far = _works(sequence, shapes.far, tokens, probe)
    piece, most_piece = _FIRST_PIECE, min(_MOST_PIECE, shapes.rows[-1])  # no larger than the runs to be timed
    while left := shapes.far - sequence.num_computed_tokens:
        piece = min(piece, most_piece, left)
        seconds = _time(own, kv, [Work(sequence, piece)])
        sequence.num_computed_tokens += piece
        if 2 * seconds <= max_run_s:
            piece *= 2
        yield None
    works: dict[int, list[Work]] = {}
    expected_s = 0.0
    for count, following in zip(shapes.rows, (*shapes.rows[1:], 0), strict=True):
        if count > _ALWAYS and expected_s > max_run_s:
            break
        works[count] = _works(sequence, shapes.context, tokens, count)
        first_s = _time(own, kv, works[count])
        yield None
        expected_s = min(first_s, _time(own, kv, works[count])) * following / count
        yield None
    timings: dict[int, list[float]] = {count: [] for count in works}
    far_timings: list[float] = []
    spent_s = 0.0
    for turn in range(ROUNDS):
        for count, rows in reversed(works.items()):  # the largest first: smaller ones then find its memory free
            timings[count].append(_time(own, kv, rows))
            spent_s += timings[count][-1]
            yield None
        far_timings.append(_time(own, kv, far))
        yield None
        if spent_s > (_ENOUGH_S if turn >= 2 else 2 * _ENOUGH_S):
            break
    medians = tuple(median(times) for times in timings.values())
    further_keys = probe * (shapes.far - shapes.context)
    further_s = median(far_timings) - median(timings[probe])
    per_key = max(0.0, further_s / further_keys) if further_keys else 0.0
    yield Calibration(VerifyCurve(tuple(works), medians), shapes.context, per_key)


def _works(text: Sequence, context: int, tokens: list[int], rows: int) -> list[Work]:
    """One token after `context` others, and a draft of further ones behind it. What only many sequences have is drafts
    of as many; that they are the same ones, in the same memory, takes no other time."""
    if rows > ROWS[-1]:
        return _works(text, context, tokens, _ROWS_EACH) * (rows // _ROWS_EACH)
    drafted = tuple(tokens[context + 1 : context + rows])
    known = replace(text, token_ids=tokens[: context + 1], num_prompt_tokens=context + 1, num_computed_tokens=context)
    nodes = len(drafted)
    return [Work(known, 1, nodes, Draft.chain(drafted, 1.0, ""))]


def _time(runner: Runner, kv: KVCache, works: list[Work]) -> float:
    """Seconds of a run and of the draws behind it, as the engine times its own: a device that works by itself is waited
    for in the draws."""
    started = time.perf_counter()
    output = runner.forward(pack(works, kv.block_size))
    with torch.inference_mode():
        verify(output.logits, works, runner.sampler(output))
    return time.perf_counter() - started
