"""One machine, from event to event: the event mode. Between two events (a request arrives, a prompt is computed, an
output ends) all steps are alike, so they are taken together, with times and tokens from a `StepTable`.

It differs from the step mode in three ways: acceptance has its mean in every run, the controller decides by the number
of sequences alone, and prompts are computed strictly in order of arrival.
"""

from __future__ import annotations

from collections import deque
from heapq import heappop, heappush
from math import inf

from foredraft.config import EngineConfig
from foredraft.simulate.engine import KV_CACHE_TOKENS
from foredraft.simulate.table import StepTable
from foredraft.simulate.traffic import Record, Request

_ROUNDING = 1e-9


class EventReplica:
    """The interface of `StepReplica`. Every kind has a clock in tokens, which all its decoding sequences share, and a
    heap of the clock times at which they end."""

    def __init__(self, table: StepTable, options: EngineConfig, record: Record) -> None:
        self._table = table
        self._record = record
        self._most = options.max_num_seqs
        self._kv_tokens = self._kv_left = options.kv_cache_tokens or KV_CACHE_TOKENS
        self._place = {kind: place for place, kind in enumerate(table.kinds)}
        self.now = 0.0
        self.num_unfinished = 0
        self._waiting: deque[tuple[int, Request]] = deque()
        self._prompts: deque[tuple[int, Request]] = deque()  # admitted, not yet computed
        self._prompt_left = 0  # rows of the first of them
        self._decoding = 0
        self._clocks = [0.0] * len(table.kinds)
        self._ends: list[list[tuple[float, int, int]]] = [[] for _ in table.kinds]  # clock time, index, KV tokens

    def add(self, index: int, request: Request) -> bool:
        """Queue a request; False where it can never fit into the KV cache."""
        if request.prompt_tokens + request.output_tokens > self._kv_tokens:
            return False
        if not self.num_unfinished:
            self.now = max(self.now, request.arrival_s)
        self.num_unfinished += 1
        self._waiting.append((index, request))
        return True

    def advance(self, until: float) -> None:
        """Run all steps that begin before `until`."""
        table, clocks, ends = self._table, self._clocks, self._ends
        tokens_per_run = table.tokens_per_run
        kinds = range(len(clocks))
        while self.num_unfinished and self.now < until:
            if self._waiting:
                self._admit()
            sequences = self._decoding
            step_s = table.step_s[sequences]
            if sequences and len(kinds) > 1:
                mine = sum(len(ends[kind]) * table.kind_rows[kind][sequences] for kind in kinds)
                step_s += table.row_s[sequences] * (mine - table.rows[sequences])
                step_s = max(step_s, table.least_s[sequences])
            rows = 0
            if self._prompts:
                chunk = table.chunk_rows[sequences]
                whole = (self._prompt_left - 1) // chunk  # steps that compute nothing but a part of the first prompt
                rows = chunk if whole else min(chunk, self._rows_left(chunk))
                draft_rows = 0 if whole else table.draft_rows[sequences]  # the end of a prompt gets a draft
                step_s += table.chunk_s[sequences][rows + draft_rows]
                steps = whole or 1
            else:
                steps = 1 << 60
            if steps > 1:
                steps = self._steps_alike(steps, step_s, until)
            now = self.now = self.now + steps * step_s
            if sequences:
                for kind in kinds:
                    if heap := ends[kind]:
                        clock = clocks[kind] = clocks[kind] + steps * tokens_per_run[kind][sequences]
                        while heap and heap[0][0] <= clock:
                            _, index, kv_tokens = heappop(heap)
                            self._finish(index, kv_tokens, now)
            if rows:
                self._compute(rows * steps)

    def _steps_alike(self, steps: int, step_s: float, until: float) -> int:
        """How many steps pass, at most, before a sequence ends or a step begins at `until` or later."""
        sequences = self._decoding
        nearest = float(steps)
        for clock, heap, tokens in zip(self._clocks, self._ends, self._table.tokens_per_run):
            if heap:
                nearest = min(nearest, (heap[0][0] - clock) / tokens[sequences])
        if until < inf:
            nearest = min(nearest, (until - self.now) / step_s)
        whole = int(nearest)
        return whole + (nearest - whole > _ROUNDING) or 1

    def _admit(self) -> None:
        """First come, first served. A request waits until the KV cache can hold all of it: the event mode preempts
        nobody."""
        waiting, prompts = self._waiting, self._prompts
        while waiting and self._decoding + len(prompts) < self._most:
            request = waiting[0][1]
            needed = request.prompt_tokens + request.output_tokens
            if needed > self._kv_left:
                break
            self._kv_left -= needed
            if not prompts:
                self._prompt_left = request.prompt_tokens
            prompts.append(waiting.popleft())

    def _rows_left(self, most: int) -> int:
        """Rows of all admitted prompts, counted no further than `most`."""
        rows = self._prompt_left
        for place in range(1, len(self._prompts)):
            if rows >= most:
                break
            rows += self._prompts[place][1].prompt_tokens
        return rows

    def _compute(self, rows: int) -> None:
        """Compute rows of prompts; those that are complete get their first tokens and decode from now on."""
        prompts = self._prompts
        while prompts and rows >= self._prompt_left:
            rows -= self._prompt_left
            index, request = prompts.popleft()
            self._prompt_left = prompts[0][1].prompt_tokens if prompts else 0
            self._begin(index, request)
        self._prompt_left -= rows

    def _begin(self, index: int, request: Request) -> None:
        """The run that computes the end of a prompt emits tokens as every other run. An output ends in the run that is
        nearest to its mean number of runs."""
        self._record.first_s[index] = self.now
        kind = self._place[request.kind]
        kv_tokens = request.prompt_tokens + request.output_tokens
        self._decoding += 1
        table, sequences = self._table, self._decoding
        left = request.output_tokens + table.excess[kind][sequences] - 1.5 * table.tokens_per_run[kind][sequences]
        if left <= 0:
            self._finish(index, kv_tokens, self.now)
        else:
            heappush(self._ends[kind], (self._clocks[kind] + left, index, kv_tokens))

    def _finish(self, index: int, kv_tokens: int, now: float) -> None:
        self._record.done_s[index] = now
        self._decoding -= 1
        self._kv_left += kv_tokens
        self.num_unfinished -= 1
