"""One machine, step by step: the step mode. Scheduler, block pool, chunk limit, speculation and controller are the
engine's own. Only the model is missing: runs and drafts take the time that was measured, and drafts are right as often
as was measured."""

from __future__ import annotations

from collections.abc import Sequence as Items
from math import inf
from random import Random

from foredraft.config import EngineConfig
from foredraft.control.costs import Calibration
from foredraft.control.worth import Load
from foredraft.engine.blocks import BlockPool
from foredraft.engine.chunks import ChunkLimit
from foredraft.engine.scheduler import Scheduler
from foredraft.engine.speculation import Speculation
from foredraft.params import SamplingParams
from foredraft.proposers.base import Proposer
from foredraft.proposers.registry import ProposerChoice, Spec
from foredraft.simulate.machine import Machine
from foredraft.simulate.proposer import RIGHT, VOCAB_SIZE, Clock, SimulatedProposer
from foredraft.simulate.record import Record
from foredraft.simulate.traffic import Request
from foredraft.types import Commit, Sequence, Stop, Verdict, Work

KV_CACHE_TOKENS = 65536  # as an engine has them that was told nothing, see engine/loading.py


class _Known:
    """A calibration that was made elsewhere."""

    def __init__(self, calibration: Calibration) -> None:
        self._calibration = calibration

    def cached(self) -> Calibration:
        return self._calibration

    def step(self, max_run_s: float = inf) -> Calibration:
        return self._calibration


class StepReplica:
    """An engine without a model. Requests are added in order of arrival, after `advance` to that moment: a request
    that arrives while a step runs is scheduled for the next."""

    def __init__(self, machine: Machine, options: EngineConfig, spec: Spec, record: Record, seed: int = 0) -> None:
        self._machine = machine
        self._spec = spec
        self._record = record
        self._random = Random(seed)
        self.clock = Clock()
        kv_tokens = options.kv_cache_tokens or KV_CACHE_TOKENS
        blocks = -(-kv_tokens // options.block_size)
        pool = BlockPool(blocks, options.block_size, prefix_caching=options.prefix_caching)
        self._scheduler = Scheduler(pool, options.max_num_seqs, options.rows_per_step)
        self._chunk_limit = ChunkLimit(options.max_chunk_s)
        self._speculation = Speculation(self._make_proposer, _Known(machine.calibration), VOCAB_SIZE, clock=self.clock)
        self._speculation.calibrate()
        self._params = SamplingParams().resolved({})
        self._sequences: dict[int, Sequence] = {}

    def _make_proposer(self, choice: ProposerChoice) -> Proposer:
        return SimulatedProposer(self._machine.proposers[str(choice)], self._machine, self.clock, self._random)

    @property
    def num_unfinished(self) -> int:
        return len(self._sequences)

    @property
    def num_waiting(self) -> int:
        return len(self._scheduler.waiting)

    def add(self, index: int, request: Request, spec: Spec | None = None, prompt: list[int] | None = None) -> bool:
        """Queue a request; False where it can never fit into the KV cache. Its prompt matters only for the prefix
        cache; without one, the request shares no prefix with others."""
        if not self._scheduler.can_ever_fit(request.prompt_tokens + request.output_tokens):
            return False
        self.clock.now = max(self.clock.now, request.arrival_s)
        spec = self._spec if spec is None else spec
        sequence = Sequence(
            id=index,
            request_id=request.kind,
            sample=0,
            token_ids=[index, *[RIGHT] * (request.prompt_tokens - 1)] if prompt is None else prompt,
            num_prompt_tokens=request.prompt_tokens,
            params=self._params,
            seed=0,
            max_tokens=request.output_tokens,
            num_lookahead_tokens=self._speculation.prepare(spec),
        )
        self._speculation.register(sequence, spec)
        self._sequences[index] = sequence
        self._scheduler.add(sequence)
        return True

    def abort(self, index: int) -> None:
        """Drop a request whose client has left; a finished one is ignored."""
        sequence = self._sequences.pop(index, None)
        if sequence is not None:
            self._scheduler.abort(sequence)
            self._speculation.release([index])

    def advance(self, until: float) -> None:
        """Run all steps that begin before `until`."""
        while self._sequences and self.clock.now < until:
            self.step()

    def step(self) -> tuple[list[Work], list[Commit]]:
        """One step of the engine, see `Engine.step`."""
        clock, started = self.clock, self.clock.now
        num_decoding = self._scheduler.num_decoding
        works = self._scheduler.schedule(
            self._chunk_limit.rows_beside(num_decoding), with_lookahead=not self._speculation.is_resting
        )
        works = self._speculation.propose(works)
        self._speculation.learn()
        load = Load.of(works)
        verdicts = [_verdict(work) for work in works]
        run_s = self._machine.run_s(load.rows, load.keys)
        overhead_s = self._machine.overhead_s(len(works), sum(len(verdict.path) for verdict in verdicts))
        stops = [_stop(work.sequence, verdict) for work, verdict in zip(works, verdicts, strict=True)]
        commits = self._scheduler.update_from_output(works, verdicts, stops)
        clock.now += run_s + overhead_s
        self._chunk_limit.observe(load.rows, num_decoding, clock.now - started)
        self._speculation.observe(works, commits, run_s + overhead_s)
        self._note(commits)
        return works, commits

    def _note(self, commits: Items[Commit]) -> None:
        now, record = self.clock.now, self._record
        for commit in commits:
            sequence = commit.sequence
            if commit.tokens and sequence.num_output_tokens == len(commit.tokens):
                record.first_s[sequence.id] = now
            if commit.finish_reason is not None:
                record.done_s[sequence.id] = now
                del self._sequences[sequence.id]
                self._speculation.release([sequence.id])


def _verdict(work: Work) -> Verdict:
    """The target emits RIGHT everywhere."""
    if not work.reaches_end:
        return Verdict()
    path: list[int] = []
    node = -1
    while (node := work.draft.child(node, RIGHT)) >= 0:
        path.append(node)
    count = len(path) + 1
    return Verdict(tuple(path), (RIGHT,) * count, (None,) * count)


def _stop(sequence: Sequence, verdict: Verdict) -> Stop:
    """An output ends when it has all its tokens."""
    left = sequence.max_tokens - sequence.num_output_tokens
    count = len(verdict.tokens)
    return Stop(count) if count < left else Stop(left, "length")
