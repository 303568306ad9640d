"""An engine without a model. Scheduler, block pool, speculation, controller and the step itself are the real ones; what
runs take and what the target answers is told, and the clock is a number."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Items
from functools import partial
from math import inf

from foredraft.config import EngineConfig
from foredraft.control.costs import Calibration, Load
from foredraft.engine.blocks import BlockPool
from foredraft.engine.chunks import ChunkLimit
from foredraft.engine.scheduler import Scheduler
from foredraft.engine.speculation import Speculation
from foredraft.engine.step import Stepped, step
from foredraft.proposers.base import Proposer
from foredraft.proposers.registry import ProposerChoice, Spec
from foredraft.types import Sequence, Stop, Verdict, Work

KV_CACHE_TOKENS = 65536  # the default of an engine, see engine/loading.py


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class _Known:
    """A calibration that was made elsewhere."""

    def __init__(self, calibration: Calibration) -> None:
        self._calibration = calibration

    def cached(self) -> Calibration:
        return self._calibration

    def step(self, max_run_s: float = inf) -> Calibration:
        return self._calibration


class SimulatedEngine:
    """`right(sequence, position)` is the token that the target emits at a position of a sequence, and
    `takes(load, accepted)` the seconds of a run and of what the engine does around it."""

    runs_ahead = False

    def __init__(
        self,
        options: EngineConfig,
        calibration: Calibration,
        vocab_size: int,
        make_proposer: Callable[[ProposerChoice], Proposer],
        right: Callable[[Sequence, int], int],
        takes: Callable[[Load, int], float],
        clock: Clock,
    ) -> None:
        tokens = options.kv_cache_tokens or KV_CACHE_TOKENS
        pool = BlockPool(-(-tokens // options.block_size), options.block_size, prefix_caching=options.prefix_caching)
        self.clock = clock
        self.scheduler = Scheduler(pool, options.max_num_seqs, options.rows_per_step)
        self.speculation = Speculation(make_proposer, _Known(calibration), vocab_size, clock=clock)
        self.speculation.calibrate()
        self._chunk_limit = ChunkLimit(options.max_chunk_s)
        self._right = right
        self._takes = takes

    def add(self, sequence: Sequence, spec: Spec) -> None:
        sequence.num_lookahead_tokens = self.speculation.prepare(spec)
        self.speculation.register(sequence, spec)
        self.scheduler.add(sequence)

    def step(self) -> Stepped:
        """One step; sequences that it ends are released."""
        stepped = step(self.scheduler, self.speculation, self, self._chunk_limit, self.clock)
        ended = [commit.sequence.id for commit in stepped.commits if commit.finish_reason is not None]
        if ended:
            self.speculation.release(ended)
        return stepped

    def abort(self, sequence: Sequence) -> None:
        self.scheduler.abort(sequence)
        self.speculation.release([sequence.id])

    def start(self, works: list[Work]) -> Callable[[], tuple[list[Verdict], list[Stop]]]:
        """Nothing is computed before the verdicts are wanted (see step.Target)."""
        return partial(self._verdicts, works)

    def _verdicts(self, works: list[Work]) -> tuple[list[Verdict], list[Stop]]:
        """Let the run's time pass, and accept what is right."""
        verdicts = [self._verdict(work) for work in works]
        self.clock.now += self._takes(Load.of(works), sum(len(verdict.path) for verdict in verdicts))
        return verdicts, [_stop(work.sequence, verdict) for work, verdict in zip(works, verdicts, strict=True)]

    def keep(self, works: Items[Work], verdicts: Items[Verdict], stops: Items[Stop]) -> None:
        """There is no cache (see step.Target)."""

    def _verdict(self, work: Work) -> Verdict:
        if not work.reaches_end:
            return Verdict()
        sequence, position, node = work.sequence, work.sequence.num_tokens, -1
        path: list[int] = []
        tokens = [self._right(sequence, position)]
        while (node := work.draft.child(node, tokens[-1])) >= 0:
            path.append(node)
            position += 1
            tokens.append(self._right(sequence, position))
        return Verdict(tuple(path), tuple(tokens), (None,) * len(tokens))


def _stop(sequence: Sequence, verdict: Verdict) -> Stop:
    """An output ends when it has all its tokens."""
    left = sequence.max_tokens - sequence.num_output_tokens
    count = len(verdict.tokens)
    return Stop(count) if count < left else Stop(left, "length")
