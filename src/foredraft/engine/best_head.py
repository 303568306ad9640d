"""Which head of a model `auto` uses on this machine: a draft of each is timed once, and the times are kept on disk."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import NamedTuple

from foredraft.batch import pack
from foredraft.control.economics import VerifyCurve, best_length
from foredraft.control.records import UNKNOWN
from foredraft.engine import disk_cache
from foredraft.engine.blocks import BlockPool
from foredraft.heads.base import HeadConfig
from foredraft.heads.files import HeadFiles
from foredraft.params import SamplingParams
from foredraft.proposers.base import Proposer
from foredraft.proposers.registry import ProposerChoice, proposer_class
from foredraft.runtime.runner import Runner
from foredraft.types import Sequence, Work

log = logging.getLogger(__name__)

_CONTEXT = 32  # tokens before the drafts that are timed
_ROUNDS = 5  # of which the fastest counts: delays only make drafts longer
_MAX_SECONDS = 1e6  # no draft takes so long


class DraftTimes(NamedTuple):
    """Seconds of a chain of one token, and of one as deep as the head drafts by itself."""

    first: float
    whole: float
    depth: int

    def of(self, depth: int) -> float:
        return self.first + (self.whole - self.first) * (depth - 1) / max(1, self.depth - 1)


@dataclass(frozen=True)
class HeadTimer:
    """Times heads on the real model, in blocks that it takes from the pool and gives back."""

    make_proposer: Callable[[ProposerChoice], Proposer]
    runner: Runner
    pool: BlockPool
    max_model_len: int
    dtype: str
    file: Path

    def __call__(self, config: HeadConfig) -> DraftTimes | None:
        """What drafts of a head take, now or when it was first timed; None where there is no room to try one."""
        key = disk_cache.machine_key(self.runner.backend, self.runner.decoder, self.dtype, config)
        times = disk_cache.read(self.file, key, _parse)
        if times is None:
            log.info("Timing drafts of the %s head; this is done once.", config.kind)
            times = self._timed(config.kind)
            if times is not None:
                disk_cache.write(self.file, key, list(times))
        return times

    def _timed(self, kind: str) -> DraftTimes | None:
        has_trees = "tree" in {option.name for option in fields(proposer_class(kind).Options)}
        proposer = self.make_proposer(ProposerChoice(kind, {"tree": "chain"} if has_trees else {}))
        nodes = proposer.num_lookahead_tokens
        size = min(_CONTEXT, self.max_model_len - nodes)
        vocab = self.runner.decoder.config.vocab_size
        params = SamplingParams(temperature=0).resolved({})
        tokens = [1 + index % (vocab - 1) for index in range(max(0, size))]
        sequence = Sequence(-1, "", 0, tokens, size, params, 0, nodes)
        try:
            if size < 2 or not self.pool.reserve(sequence, size + nodes):
                return None
            self.runner.forward(pack([Work(sequence, size - 1)], self.pool.block_size))
            sequence.num_computed_tokens = size - 1  # as in a step: the last token is not computed yet

            def timed(budget: int) -> tuple[float, int]:
                started = time.perf_counter()
                (draft,) = proposer.propose([sequence], [budget], 0.0)
                return time.perf_counter() - started, draft.depth

            for budget in (nodes, 1, nodes, 1):  # the first calls catch up, and a backend may compile
                timed(budget)
            firsts, wholes = zip(*((timed(1), timed(nodes)) for _ in range(_ROUNDS)), strict=True)
            return DraftTimes(min(firsts)[0], *min(wholes))
        finally:
            proposer.release([sequence.id])
            proposer.close()
            self.pool.free(sequence, forget=True)


def _parse(value: object) -> DraftTimes | None:
    match value:
        case [float(first), float(whole), int(depth)]:
            if 0 < first < _MAX_SECONDS and 0 < whole < _MAX_SECONDS and depth >= 0:
                return DraftTimes(first, whole, depth)
    return None


def best_head(
    heads: Mapping[str, HeadFiles], times_of: Callable[[HeadConfig], DraftTimes | None], curve: VerifyCurve
) -> ProposerChoice | None:
    """The head that promises the highest speed for one sequence, by its measured acceptance, the time of its drafts and
    that of the target's runs by their rows; None where plain decoding is as fast. A head that would not be the best
    even if its drafts took no time is not loaded."""
    promises = {
        kind: partial(_speedup, files.config.acceptance or (UNKNOWN,) * files.config.block, curve)
        for kind, files in heads.items()
    }
    most = {kind: promised(DraftTimes(0.0, 0.0, 1)) for kind, promised in promises.items()}
    best, best_speed = None, 1.0
    for kind in sorted(most, key=most.__getitem__, reverse=True):
        times = times_of(heads[kind].config) if most[kind] > best_speed else None
        if times is not None and times.depth and promises[kind](times) > best_speed:
            best, best_speed = ProposerChoice(kind), promises[kind](times)
    return best


def _speedup(acceptance: tuple[float, ...], curve: VerifyCurve, times: DraftTimes) -> float:
    """With chains of the best length."""

    def cost(rows: int) -> float:
        """Of a chain and its verification, in plain steps."""
        return curve.relative(rows) + (times.of(rows - 1) / curve.seconds_at(1) if rows > 1 else 0.0)

    return best_length(acceptance, 0.0, cost).speedup
