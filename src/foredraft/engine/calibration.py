"""What runs of the target take on this machine, by their rows: measured in seconds, kept on disk."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence as Items
from pathlib import Path
from statistics import median

from foredraft.control.costs import Calibration
from foredraft.control.economics import VerifyCurve
from foredraft.engine import disk_cache
from foredraft.engine.batch import pack
from foredraft.engine.blocks import BlockPool
from foredraft.engine.runner import Runner
from foredraft.errors import InvalidParameter
from foredraft.params import SamplingParams
from foredraft.types import Draft, Sequence, Work

log = logging.getLogger(__name__)

ROWS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
ROUNDS = 9
CONTEXT = 256  # tokens before the rows that are timed
_FAR = 3  # times as many tokens before the rows from which the cost of a key is told
_ENOUGH_S = 6.0  # no further round is begun after this


def calibrated(runner: Runner, pool: BlockPool, max_model_len: int, dtype: str, file: Path) -> Calibration:
    """An earlier calibration of this model on this machine, or a new one."""
    key = disk_cache.machine_key(runner.backend, runner.decoder, dtype)
    match disk_cache.read(file, key):
        case {"rows": rows, "seconds": seconds, "context": int(context), "seconds_per_key": float(per_key)}:
            return Calibration(VerifyCurve(tuple(rows), tuple(seconds)), context, per_key)
    log.info("Measuring what runs of this model take on this machine; this is done once and takes seconds.")
    new = calibrate(runner, pool, max_model_len)
    result = {"rows": new.curve.rows, "seconds": new.curve.seconds}
    disk_cache.write(file, key, {**result, "context": new.context, "seconds_per_key": new.seconds_per_key})
    return new


def calibrate(runner: Runner, pool: BlockPool, max_model_len: int, rows: Items[int] = ROWS) -> Calibration:
    """Time the target on chains of rows after `CONTEXT` tokens, and once after more. The row counts take turns, so that
    a slow moment hits all of them; the first round does not count. The blocks it borrows are given back."""
    rows = [count for count in rows if count < max_model_len // 2]
    context = max(1, min(CONTEXT, (max_model_len - max(rows)) // _FAR))
    vocab = runner.decoder.config.vocab_size
    tokens = [1 + index % (vocab - 1) for index in range(_FAR * context + max(rows))]
    sequence = Sequence(-1, "", 0, tokens, len(tokens), SamplingParams().resolved({}), 0, 1)
    if not pool.reserve(sequence, len(tokens)):
        raise InvalidParameter(f"The KV cache has no room for {len(tokens)} tokens; raise kv_cache_tokens.")
    try:
        works = {count: _chain(sequence, context, tokens, count) for count in rows}
        probe = max(count for count in rows if count <= 8)
        far = _chain(sequence, _FAR * context, tokens, probe)
        _time(runner, pool, Work(sequence, _FAR * context))
        timings: dict[int, list[float]] = {count: [] for count in rows}
        far_timings: list[float] = []
        started = time.perf_counter()
        for turn in range(ROUNDS + 1):
            for count, work in works.items():
                timings[count].append(_time(runner, pool, work))
            far_timings.append(_time(runner, pool, far))
            if turn == 0:
                timings, far_timings = {count: [] for count in rows}, []
            elif time.perf_counter() - started > _ENOUGH_S and turn >= 3:
                break
    finally:
        pool.free(sequence, forget=True)
    seconds = [median(timings[count]) for count in rows]
    further_keys = probe * (_FAR - 1) * context
    per_key = max(0.0, (median(far_timings) - median(timings[probe])) / further_keys)
    return Calibration(VerifyCurve(tuple(rows), tuple(seconds)), context, per_key)


def _chain(text: Sequence, context: int, tokens: list[int], rows: int) -> Work:
    """One token after `context` others, and a draft of further ones behind it."""
    drafted = tuple(tokens[context + 1 : context + rows])
    known = Sequence(
        text.id, "", 0, tokens[: context + 1], context + 1, text.params, 0, 1, context, block_table=text.block_table
    )
    nodes = len(drafted)
    return Work(known, 1, nodes, Draft(drafted, tuple(range(-1, nodes - 1)), (1.0,) * nodes, ("",) * nodes))


def _time(runner: Runner, pool: BlockPool, work: Work) -> float:
    started = time.perf_counter()
    logits = runner.forward(pack([work], pool.block_size, runner.backend.device)).logits
    if len(logits):
        float(logits[-1, 0])  # a device may still be at work: reading a number waits for it
    return time.perf_counter() - started
