"""What steps of the step mode bring and cost, by the number of sequences that decode: what the event mode runs on."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace

import numpy as np

from foredraft.config import EngineConfig
from foredraft.control.costs import Calibration
from foredraft.control.economics import VerifyCurve
from foredraft.engine.chunks import ChunkLimit
from foredraft.proposers.registry import Spec
from foredraft.simulate.machine import Machine
from foredraft.simulate.step_mode import StepReplica
from foredraft.simulate.traffic import Record, Request

_BATCHES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 512, 1024)  # sequences at once
_WARM_UP_STEPS = 48  # steps in which the controller learns what runs cost, before any counts
_RUNS = 2000  # runs of sequences that are measured for a batch size
_STEPS = 64  # the fewest steps that are measured for a batch size
_LONGER = 8  # outputs are this many times longer while steps are measured, so that few end
_CHUNK_STEPS = 8  # steps until the chunk limit is stable


@dataclass(frozen=True)
class StepTable:
    """Lists by the number of decoding sequences, from 0 to the most that may run."""

    kinds: tuple[str, ...]
    step_s: list[float]  # a step in which nothing but these sequences runs
    rows: list[float]  # rows of that step, drafts included
    tokens_per_run: list[list[float]]  # by kind, then by sequences
    kind_rows: list[list[float]]  # of the same shape: rows of a sequence, its draft included
    row_s: list[float]  # seconds of one row more than `rows`: kinds are not always mixed as they are on average
    least_s: list[float]  # a step without drafts: it takes no less, however they are mixed
    excess: list[list[float]]  # of the same shape: tokens that the last run of an output has beyond its end, on average
    chunk_rows: list[int]  # of prompts, in a step beside these sequences
    draft_rows: list[int]  # of one sequence in a run
    chunk_s: list[list[float]]  # what so many rows add: by sequences, then by rows up to chunk_rows and a draft's

    @classmethod
    def measured(
        cls, machine: Machine, options: EngineConfig, spec: Spec, requests: list[Request], seed: int = 0
    ) -> StepTable:
        """Run the step mode at constant numbers of sequences. `requests` are a sample of the traffic, from which kinds
        and lengths of outputs are taken; prompts are left out here, but every row pays for the keys of the mean
        context, so that the controller decides as it would in this traffic."""
        most = options.max_num_seqs
        batches = [batch for batch in _BATCHES if batch < most] + [most]
        kinds = tuple(dict.fromkeys(request.kind for request in requests))
        context = _mean_context(requests)
        flat = _at(machine, context)
        found = [_measure(flat, options, spec, requests, batch, seed) for batch in batches]
        every = np.arange(most + 1)
        rows = np.interp(every, batches, [each.rows for each in found])
        seconds = np.interp(every, batches, [each.seconds for each in found])
        rows[0] = seconds[0] = 0.0
        tokens = [np.interp(every, batches, [each.tokens_per_run[kind] for each in found]).tolist() for kind in kinds]
        kind_rows = [np.interp(every, batches, [each.kind_rows[kind] for each in found]).tolist() for kind in kinds]
        row_s = [flat.run_s(round(each) + 2, 0) - flat.run_s(round(each) + 1, 0) for each in rows]
        least_s = [0.0, *(flat.run_s(n, 0) for n in range(1, most + 1))]
        excess = [np.interp(every, batches, [each.excess[kind] for each in found]).tolist() for kind in kinds]
        chunks = [options.rows_per_step] + [_chunk(machine, options, rows[n], n) for n in range(1, most + 1)]
        drafts = [round(rows[max(1, n)] / max(1, n) - 1) for n in range(most + 1)]
        chunk_s = [_chunk_times(machine, rows[n], n, chunks[n] + drafts[n], context) for n in range(most + 1)]
        measured = (seconds.tolist(), rows.tolist(), tokens, kind_rows, row_s, least_s, excess)
        return cls(kinds, *measured, chunks, drafts, chunk_s)


@dataclass(frozen=True)
class _Found:
    seconds: float
    rows: float
    tokens_per_run: dict[str, float]
    kind_rows: dict[str, float]
    excess: dict[str, float]


def _measure(
    machine: Machine, options: EngineConfig, spec: Spec, requests: list[Request], batch: int, seed: int
) -> _Found:
    """Keep `batch` sequences decoding: when one ends, the next of the sample takes its place. Outputs are longer than
    in the sample, so that few runs are cut by their ends."""
    requests = [each._replace(output_tokens=_LONGER * each.output_tokens) for each in requests]
    roomy = replace(options, max_num_seqs=batch, max_num_batched_tokens=options.rows_per_step, prefix_caching=False)
    roomy = replace(roomy, kv_cache_tokens=batch * (2 + max(request.output_tokens for request in requests) + 64))
    steps = max(_STEPS, _RUNS // batch)
    most_requests = batch * (_WARM_UP_STEPS + steps)  # each needs a step at least
    replica = StepReplica(machine, roomy, spec, Record(most_requests), seed)
    added = 0
    seconds = rows = 0.0
    runs: Counter[str] = Counter()
    kind_rows: Counter[str] = Counter()
    tokens: Counter[str] = Counter()
    pairs: Counter[str] = Counter()  # ordered pairs of tokens in one run
    for step in range(_WARM_UP_STEPS + steps):
        while replica.num_unfinished < batch:
            request = requests[added % len(requests)]
            replica.add(added, request._replace(arrival_s=0.0, prompt_tokens=1))
            added += 1
        started = replica.clock.now
        works, commits = replica.step()
        if step < _WARM_UP_STEPS:
            continue
        seconds += replica.clock.now - started
        for work in works:
            rows += work.num_rows
            kind_rows[work.sequence.request_id] += work.num_rows
        for commit in commits:
            runs[commit.sequence.request_id] += 1
            tokens[commit.sequence.request_id] += len(commit.tokens)
            pairs[commit.sequence.request_id] += len(commit.tokens) * (len(commit.tokens) - 1)
    common = tokens.total() / runs.total()
    kinds = dict.fromkeys(request.kind for request in requests)
    per_run = {kind: tokens[kind] / runs[kind] if runs[kind] else common for kind in kinds}
    # In a renewal process with steps X, the last one goes E[X (X - 1)] / (2 E[X]) beyond a given point on average.
    excess = {kind: pairs[kind] / (2 * tokens[kind]) if tokens[kind] else 0.0 for kind in kinds}
    per_sequence = {kind: kind_rows[kind] / runs[kind] if runs[kind] else rows / steps / batch for kind in kinds}
    return _Found(seconds / steps, rows / steps, per_run, per_sequence, excess)


def _at(machine: Machine, context: float) -> Machine:
    """The machine if every row came after so many tokens."""
    measured = machine.calibration
    row_s = measured.seconds_per_key * (context - measured.context)
    curve = measured.curve
    seconds = tuple(max(s / 2, s + rows * row_s) for rows, s in zip(curve.rows, curve.seconds, strict=True))
    return replace(machine, calibration=Calibration(VerifyCurve(curve.rows, seconds), round(context), 0.0))


def _mean_context(requests: list[Request]) -> float:
    """Tokens before a row, over the time in which requests decode."""
    weighted = sum(each.output_tokens * (each.prompt_tokens + each.output_tokens / 2) for each in requests)
    return weighted / sum(each.output_tokens for each in requests)


def _chunk(machine: Machine, options: EngineConfig, rows: float, sequences: int) -> int:
    """The rows of prompts that the engine's chunk limit settles at beside so many sequences."""
    limit = ChunkLimit(options.max_chunk_s)
    for _ in range(_CHUNK_STEPS):
        total = round(rows) + limit.rows_beside(sequences)
        limit.observe(total, sequences, machine.run_s(total, 0) + machine.overhead_s(sequences + 1))
    return max(1, min(limit.rows_beside(sequences), options.rows_per_step - sequences))


def _chunk_times(machine: Machine, rows: float, sequences: int, most: int, context: float) -> list[float]:
    before = machine.run_s(max(1, round(rows)), round(max(1, rows) * context)) if sequences else 0.0
    overhead = machine.overhead_s(sequences + 1) - (machine.overhead_s(sequences) if sequences else 0.0)
    keys = context / 2  # of a row of a prompt, on average
    times = [
        overhead + machine.run_s(round(rows) + more, round(rows * context + more * keys)) - before
        for more in range(1, most + 1)
    ]
    return [0.0, *(max(0.0, seconds) for seconds in times)]
