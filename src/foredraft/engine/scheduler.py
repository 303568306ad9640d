"""Who runs in the next step, and with how many tokens. Plain Python: no torch, no clock, no model.

There is no prefill and no decode phase: every sequence wants `num_tokens - num_computed_tokens` rows, a new prompt many
and a running sequence one. First come, first served: running and then waiting are always in order of arrival.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence as Items

from foredraft.engine.blocks import BlockPool
from foredraft.types import TARGET, Commit, FinishReason, Sequence, Stop, Verdict, Work


class Scheduler:
    """Shares the rows of a step and the blocks of the pool among sequences.

    Every running sequence gets at least one row per step. When blocks run out, drafts give way first; then the
    youngest running sequence does, and is computed again later.
    """

    def __init__(self, pool: BlockPool, max_num_seqs: int, max_num_batched_tokens: int) -> None:
        assert max_num_batched_tokens >= max_num_seqs
        self.pool = pool
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running)

    @property
    def num_decoding(self) -> int:
        """Running sequences of which only the last token is still to be computed."""
        return sum(map(_is_decoding, self.running))

    def can_ever_fit(self, num_tokens: int) -> bool:
        """Whether a sequence of this final length fits into the pool when it is alone."""
        return self.pool.blocks_for(num_tokens) <= self.pool.num_blocks

    def add(self, sequence: Sequence) -> None:
        self.waiting.append(sequence)

    def schedule(self, chunk_rows: int | None = None) -> list[Work]:
        """The works of the next step, oldest first, with slots reserved for their tokens and lookahead.

        While a sequence decodes, the chunks of all prompts together have at most `chunk_rows` rows, beside the one row
        that every running sequence is owed.
        """
        works: list[Work] = []
        running = self.running
        budget = self.max_num_batched_tokens
        chunk = budget if chunk_rows is None or not self.num_decoding else chunk_rows
        preempted = False
        while (index := len(works)) < len(running):
            sequence = running[index]
            rows = budget - (len(running) - index - 1)  # the younger ones are owed a row each
            work = self._reserve(sequence, min(rows, max(1, chunk)))
            if work is None:
                preempted = True
                self._preempt(running.pop())
            else:
                works.append(work)
                budget -= work.num_new_tokens
                chunk -= 0 if _is_decoding(sequence) else work.num_new_tokens

        while self.waiting and min(budget, chunk) > 0 and len(self.running) < self.max_num_seqs and not preempted:
            sequence = self.waiting[0]
            sequence.num_computed_tokens = self.pool.match_prefix(sequence)
            work = self._reserve(sequence, min(budget, chunk))
            if work is None:
                self._take_blocks(sequence)
                break
            if not sequence.counters.preemptions:  # after one it finds mostly what it computed itself
                sequence.counters.cached_tokens = sequence.num_computed_tokens
            self.running.append(self.waiting.popleft())
            works.append(work)
            budget -= work.num_new_tokens
            chunk -= work.num_new_tokens

        for index, work in enumerate(works):  # drafts get what tokens have left over: rows and blocks
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
        self.pool.free(sequence)
        sequence.finish_reason = reason

    def check_integrity(self) -> None:
        """Raise AssertionError unless order and blocks are as they should be."""
        order = [sequence.id for sequence in (*self.running, *self.waiting)]
        assert order == sorted(order), "first come, first served is violated"
        assert all(not sequence.block_table for sequence in self.waiting), "a waiting sequence holds blocks"
        self.pool.check_integrity(self.running)

    def _reserve(self, sequence: Sequence, rows: int) -> Work | None:
        """Slots for at most `rows` of the tokens that are still to be computed."""
        computed = sequence.num_computed_tokens
        num_new_tokens = min(len(sequence.token_ids) - computed, rows)
        fits = self.pool.reserve(sequence, computed + num_new_tokens)
        return Work(sequence, num_new_tokens) if fits else None

    def _look_ahead(self, work: Work, rows: int) -> Work:
        """Slots for a draft of at most `rows` nodes, as many as are wanted, useful and free."""
        sequence = work.sequence
        useful = sequence.max_tokens - sequence.num_output_tokens - 1  # the target adds a token of its own
        free = self.pool.num_free_blocks * self.pool.block_size
        free += len(sequence.block_table) * self.pool.block_size - sequence.num_tokens
        lookahead = max(0, min(sequence.num_lookahead_tokens, rows, useful, free))
        reserved = self.pool.reserve(sequence, sequence.num_tokens + lookahead)
        assert reserved
        return Work(sequence, work.num_new_tokens, lookahead)

    def _preempt(self, sequence: Sequence) -> None:
        self._take_blocks(sequence)
        sequence.counters.preemptions += 1
        self.waiting.appendleft(sequence)

    def _take_blocks(self, sequence: Sequence) -> None:
        """Back to a sequence that has computed nothing. What it computed may still be found by its prefix."""
        self.pool.free(sequence)
        sequence.num_computed_tokens = 0
        sequence.prompt_logprobs.clear()

    def _commit(self, work: Work, verdict: Verdict, stop: Stop) -> Commit:
        sequence, draft = work.sequence, work.draft
        tokens = verdict.tokens[: stop.num_kept]
        accepted = verdict.path[: stop.num_kept]  # the nodes whose tokens are kept
        sequence.prompt_logprobs += verdict.prompt_logprobs
        sequence.token_ids += tokens
        if sequence.constraint is not None:
            sequence.constraint.accept(tokens)
        sequence.num_computed_tokens += work.num_new_tokens + len(accepted)
        origins = (TARGET,) * (len(tokens) - len(accepted))
        if accepted:
            origins = (*[draft.origin[node] for node in accepted], *origins)
        sequence.counters.count(draft, accepted, emitted=bool(verdict.tokens))

        failed = verdict.error is not None
        sequence.finish_reason = "error" if failed else stop.finish_reason
        if work.num_lookahead_tokens:
            self.pool.truncate(sequence, sequence.num_computed_tokens)
        if not failed:
            self.pool.register(sequence)
        if sequence.finish_reason is not None:
            self.running.remove(sequence)
            self.pool.free(sequence, forget=failed)
        return Commit(
            sequence,
            tokens,
            origins,
            verdict.logprobs[: len(tokens)],
            sequence.finish_reason,
            stop.stop_reason,
            verdict.error,
            draft,
            verdict.target_argmax,
        )


def _is_decoding(sequence: Sequence) -> bool:
    """Whether only its last token is still to be computed, so that every step gives it new ones."""
    return sequence.num_computed_tokens == len(sequence.token_ids) - 1
