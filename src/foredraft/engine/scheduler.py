"""Who runs in the next step, and with how many tokens. Plain Python: no torch, no clock, no model.

There is no prefill and no decode phase: every sequence wants `num_tokens - num_computed_tokens` rows, a new prompt many
and a running sequence one. First come, first served: running and waiting are always in order of priority, and among
equals in order of arrival. Half of the rows for prompts go to the shortest ones, so that a long one blocks nobody.
"""

from __future__ import annotations

from bisect import insort
from collections import deque
from collections.abc import Sequence as Items
from itertools import islice

from foredraft.engine.blocks import BlockPool
from foredraft.types import TARGET, Commit, FinishReason, Sequence, Stop, Verdict, Work

_LOOK_AT = 16  # waiting sequences whose lengths always count; more do only where these leave rows unused


class Scheduler:
    """Shares the rows of a step and the blocks of the pool among sequences.

    Every running sequence gets at least one row per step. When blocks run out, drafts give way first; then the
    youngest running sequence does, and is computed again later.

    Waiting sequences are let in once `refill` places are free, and then until none is: on a GPU, steps without prompts
    take far less time, and letting sequences in together makes more of them.
    """

    def __init__(self, pool: BlockPool, max_num_seqs: int, max_num_batched_tokens: int, refill: int = 1) -> None:
        assert max_num_batched_tokens >= max_num_seqs >= refill
        self.pool = pool
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self._refill = refill
        self._is_refilling = False

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running)

    @property
    def num_decoding(self) -> int:
        """Running sequences of which only the last token is still to be computed, so that every step gives new ones."""
        return sum([each.num_computed_tokens == len(each.token_ids) - 1 for each in self.running])

    def can_ever_fit(self, num_tokens: int) -> bool:
        """Whether a sequence of this final length fits into the pool when it is alone."""
        return self.pool.blocks_for(num_tokens) <= self.pool.num_blocks

    def add(self, sequence: Sequence) -> None:
        insort(self.waiting, sequence, key=_order)

    def schedule(self, chunk_rows: int | None = None, looks_ahead: bool = True) -> list[Work]:
        """The works of the next step, oldest first, with slots reserved for their tokens and, unless it is known that
        there will be no drafts, for their lookahead.

        While a sequence decodes, the chunks of all prompts together have at most `chunk_rows` rows, beside the one row
        that every running sequence is owed.
        """
        works: list[Work] = []
        running = self.running
        budget = self.max_num_batched_tokens
        num_decoding = self.num_decoding
        chunk = budget if chunk_rows is None or not num_decoding else min(chunk_rows, budget - num_decoding)
        lets_in = self._lets_in()
        shares = self._prompt_shares(chunk, lets_in) if lets_in or num_decoding < len(running) else {}
        preempted = False
        while (index := len(works)) < len(running):
            sequence, rows = running[index], 1
            if shares:  # the younger ones are owed a row each
                rows = min(budget - (len(running) - index - 1), max(1, shares.get(sequence.id, 0)))
            work = self._reserve(sequence, rows)
            if work is None:
                preempted = True
                self._preempt(running.pop())
            else:
                works.append(work)
                budget -= work.num_new_tokens

        num_before = len(running)
        while lets_in and self.waiting and budget > 0 and len(running) < self.max_num_seqs and not preempted:
            sequence = self.waiting[0]
            if not shares.get(sequence.id):
                break
            sequence.num_computed_tokens = self.pool.match_prefix(sequence)
            work = self._reserve(sequence, min(budget, shares[sequence.id]))
            if work is None:
                self._take_blocks(sequence)
                break
            if not sequence.counters.preemptions:  # after one it finds mostly what it computed itself
                sequence.counters.cached_tokens = sequence.num_computed_tokens
            running.append(self.waiting.popleft())
            works.append(work)
            budget -= work.num_new_tokens
        if len(running) > num_before:
            running.sort(key=_order)
            works.sort(key=lambda work: _order(work.sequence))

        for index, work in enumerate(works):  # drafts get what tokens have left over: rows and blocks
            if not budget or not looks_ahead:
                break
            if work.sequence.num_lookahead_tokens and work.reaches_end:
                works[index] = self._look_ahead(work, budget)
                budget -= works[index].num_lookahead_tokens
        return works

    def update_from_output(self, works: Items[Work], verdicts: Items[Verdict], stops: Items[Stop]) -> list[Commit]:
        """Apply the verdicts: append tokens, give back unused slots, end finished sequences."""
        return [self._commit(*item) for item in zip(works, verdicts, stops, strict=True)]

    def abort(self, sequence: Sequence, reason: FinishReason = "abort") -> None:
        """Drop a sequence wherever it is, even nowhere any more; everything it held is free afterwards."""
        for line in (self.waiting, self.running):
            if sequence in line:
                line.remove(sequence)
        self.pool.free(sequence, forget=not sequence.params.remember)
        sequence.finish_reason = reason

    def check_integrity(self) -> None:
        """Raise AssertionError unless order and blocks are as they should be."""
        for line in (self.running, self.waiting):
            order = [_order(sequence) for sequence in line]
            assert order == sorted(order), "priority, then first come, first served is violated"
        assert all(not sequence.block_table for sequence in self.waiting), "a waiting sequence holds blocks"
        self.pool.check_integrity(self.running)

    def _lets_in(self) -> bool:
        """Whether sequences that wait may enter in this step."""
        free = self.max_num_seqs - len(self.running)
        self._is_refilling = bool(self.waiting) and (free >= self._refill or (self._is_refilling and free > 0))
        return self._is_refilling

    def _prompt_shares(self, rows: int, lets_in: bool) -> dict[int, int]:
        """How many of a step's rows each prompt gets, by sequence id. The shortest prompts share one half of the rows,
        and the first in order the rest. Of those that wait, one with a share brings in all before it."""
        waiting = self._first_waiting(rows) if lets_in else []
        prompts = [each for each in self.running if each.num_computed_tokens != len(each.token_ids) - 1] + waiting
        left = {each.id: each.num_tokens - each.num_computed_tokens for each in prompts}
        if len(prompts) > 1:
            left.update((each.id, each.num_tokens - self.pool.num_cached_tokens(each)) for each in waiting)
        shares = dict.fromkeys(left, 0)
        shortest_first = sorted(prompts, key=lambda sequence: left[sequence.id])
        for line, half in ((shortest_first, rows // 2), (prompts, rows - rows // 2)):
            for sequence in line:
                share = min(half, left[sequence.id] - shares[sequence.id])
                shares[sequence.id] += share
                half -= share
        last = max((place for place, each in enumerate(waiting) if shares[each.id]), default=-1)
        return shares | {each.id: max(1, shares[each.id]) for each in waiting[:last]}

    def _first_waiting(self, rows: int) -> list[Sequence]:
        """Those that may enter and fill so many rows, if nothing of them is cached: how much is, costs time to know."""
        first: list[Sequence] = []
        for sequence in islice(self.waiting, self.max_num_seqs - len(self.running)):
            if len(first) >= _LOOK_AT and rows <= 0:
                break
            first.append(sequence)
            rows -= sequence.num_tokens
        return first

    def _reserve(self, sequence: Sequence, rows: int) -> Work | None:
        """Slots for at most `rows` of the tokens that are still to be computed."""
        computed = sequence.num_computed_tokens
        num_new_tokens = len(sequence.token_ids) - computed
        if num_new_tokens > rows:
            num_new_tokens = rows
        return Work(sequence, num_new_tokens) if self.pool.reserve(sequence, computed + num_new_tokens) else None

    def _look_ahead(self, work: Work, rows: int) -> Work:
        """Slots for a draft of at most `rows` nodes, as many as are wanted, useful and free."""
        sequence, pool, known = work.sequence, self.pool, len(work.sequence.token_ids)
        useful = sequence.max_tokens + sequence.num_prompt_tokens - known - 1  # the target adds a token of its own
        lookahead = min(sequence.num_lookahead_tokens, rows, useful)
        held = len(sequence.block_table) * pool.block_size - known
        if lookahead > held:
            lookahead = min(lookahead, held + pool.num_available_blocks * pool.block_size)
            reserved = pool.reserve(sequence, known + lookahead)
            assert reserved
        return Work(sequence, work.num_new_tokens, lookahead) if lookahead > 0 else work

    def _preempt(self, sequence: Sequence) -> None:
        self._take_blocks(sequence)
        sequence.counters.preemptions += 1
        insort(self.waiting, sequence, key=_order)

    def _take_blocks(self, sequence: Sequence) -> None:
        """Back to a sequence that has computed nothing. What it computed may still be found by its prefix."""
        self.pool.free(sequence)
        sequence.num_computed_tokens = 0
        sequence.prompt_logprobs.clear()

    def _commit(self, work: Work, verdict: Verdict, stop: Stop) -> Commit:
        sequence, draft = work.sequence, work.draft
        tokens = verdict.tokens[: stop.num_kept]
        accepted = verdict.path[: stop.num_kept]  # the nodes whose tokens are kept
        if verdict.prompt_logprobs:
            sequence.prompt_logprobs += verdict.prompt_logprobs
        sequence.token_ids += tokens
        if sequence.constraint is not None:
            sequence.constraint.accept(tokens)
        sequence.num_computed_tokens += work.num_new_tokens + len(accepted)
        origins = (TARGET,) * (len(tokens) - len(accepted))
        if accepted:
            origins = (*[draft.origin[node] for node in accepted], *origins)
        failed = verdict.error is not None
        sequence.finish_reason = "error" if failed else stop.finish_reason
        if work.num_lookahead_tokens:
            self.pool.truncate(sequence, sequence.num_computed_tokens)
        if not failed:
            self.pool.register(sequence)
        if sequence.finish_reason is not None:
            self.running.remove(sequence)
            self.pool.free(sequence, forget=failed or not sequence.params.remember)  # what failed may be bad
        return Commit(
            sequence,
            tokens,
            origins,
            verdict.logprobs[: len(tokens)],
            sequence.finish_reason,
            stop.stop_reason,
            verdict.error,
            draft,
            accepted,
            verdict.target_argmax,
        )


def _order(sequence: Sequence) -> tuple[int, int]:
    return sequence.priority, sequence.id
