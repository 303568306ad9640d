"""A state machine over scheduler and block pool: random traffic, and a model of what every KV slot must hold."""

from __future__ import annotations

import random
from collections import Counter
from typing import ClassVar

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from foredraft.engine.blocks import BlockPool
from foredraft.engine.scheduler import Scheduler
from foredraft.engine.window_blocks import NONE, WindowBlocks
from foredraft.types import NO_DRAFT, Commit, Sequence, Stop, Verdict, Work
from tests.unit.unit_helpers import make_sequence, path_to, random_tree

VOCAB = 3  # small, so that texts of different requests meet by chance too
STEMS = ([0] * 24, [0, 1, 2] * 8, [0] * 8 + [1, 2] * 8)  # two of them part only after eight tokens
History = tuple[int, ...]

SETTINGS = settings(
    max_examples=100,
    stateful_step_count=40,
    derandomize=True,
    database=None,
    deadline=None,
    print_blob=False,
    suppress_health_check=list(HealthCheck),
    report_multiple_bugs=False,
)


class Machine(RuleBasedStateMachine):
    """Plays engine for a scheduler. `seen` counts what happened, so that a test can tell that it did happen."""

    pool_class: type[BlockPool] = BlockPool
    windows_class: type[WindowBlocks] = WindowBlocks
    scheduler_class: type[Scheduler] = Scheduler
    seen: ClassVar[Counter[str]] = Counter()

    @initialize(
        block_size=st.sampled_from([1, 2, 3, 4, 8]),
        num_tokens=st.integers(16, 64),
        max_num_seqs=st.integers(1, 5),
        more_rows=st.integers(0, 24),
        prefix_caching=st.sampled_from([True, True, True, False]),
        refill=st.sampled_from([1, 1, 2, 3]),
        window=st.sampled_from([0, 1, 3, 4, 11]),
        more_blocks=st.integers(0, 40),
    )
    def begin(
        self,
        block_size: int,
        num_tokens: int,
        max_num_seqs: int,
        more_rows: int,
        prefix_caching: bool,
        refill: int,
        window: int,
        more_blocks: int,
    ) -> None:
        num_blocks, self.window, self.windows = -(-num_tokens // block_size), window, None
        # As few window blocks as one sequence needs, or a few more (capacity.py).
        num_window_blocks = -(-window // block_size) + 2 + -(-(max_num_seqs + more_rows) // block_size) + more_blocks
        if window and num_window_blocks < num_blocks:
            self.windows = self.windows_class(window, block_size, num_window_blocks, [NONE] * num_blocks)
        self.pool = self.pool_class(num_blocks, block_size, "", prefix_caching, self.windows)
        self.scheduler = self.scheduler_class(
            self.pool, max_num_seqs, max_num_seqs + more_rows, min(refill, max_num_seqs)
        )
        self.kv: dict[int, History | None] = {}  # None: written by a run that failed
        # The same of layers with a window, by slots of window blocks, with the block that it was of.
        self.kv_in_windows: dict[int, tuple[int, History | None]] = {}
        self.texts: dict[int, list[int]] = {}  # what every live sequence should hold
        self.live: list[Sequence] = []
        self.first_runs: list[int] = []
        self.next_id = 0
        self.failing = False

    @rule(
        stem=st.sampled_from(STEMS),
        stem_len=st.integers(0, 24),
        tail=st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=8),
        max_tokens=st.integers(1, 24),
        prompt_logprobs=st.sampled_from([None, None, None, 0]),
        remember=st.sampled_from([True, True, False]),
    )
    def add(
        self,
        stem: list[int],
        stem_len: int,
        tail: list[int],
        max_tokens: int,
        prompt_logprobs: int | None,
        remember: bool,
    ) -> None:
        prompt = [*stem[:stem_len], *tail]
        room = self.pool.num_blocks * self.pool.block_size
        prompt = prompt[: room - 1]
        max_tokens = min(max_tokens, room - len(prompt))
        assert self.scheduler.can_ever_fit(len(prompt) + max_tokens)
        fields = {"prompt_logprobs": prompt_logprobs, "remember": remember}
        sequence = make_sequence(prompt, id=self.next_id, max_tokens=max_tokens, **fields)
        self.next_id += 1
        self.live.append(sequence)
        self.texts[sequence.id] = prompt
        self.scheduler.add(sequence)

    @precondition(lambda self: self.live)
    @rule(which=st.integers(0, 100))
    def abort(self, which: int) -> None:
        sequence = self.live.pop(which % len(self.live))
        self.seen["abort running" if sequence.block_table else "abort waiting"] += 1
        self.scheduler.abort(sequence)
        assert sequence.finish_reason == "abort"
        assert not sequence.block_table
        self.scheduler.check_integrity()

    @precondition(lambda self: self.live)
    @rule(seed=st.integers(0, 2**32))
    def step(self, seed: int) -> None:
        self.failing = True  # until the end of this rule
        chance = random.Random(seed)
        for sequence in self.live:  # as a controller might decide anew in every step
            sequence.num_lookahead_tokens = chance.choice([0, 0, 2, 7])
        works = [self.drafted(work, chance) for work in self.scheduled(chance.choice([None, 1, 5, 16]))]
        self.run_model(works)
        verdicts = [self.verdict(work, chance) for work in works]
        stops = [self.stop(work, verdict, chance) for work, verdict in zip(works, verdicts)]
        self.keep(works, verdicts, stops)
        computed = [work.sequence.num_computed_tokens + work.num_new_tokens for work in works]
        commits = self.scheduler.update_from_output(works, verdicts, stops)
        for commit, verdict, stop, known in zip(commits, verdicts, stops, computed, strict=True):
            self.check_commit(commit, verdict, stop, known)
        assert [commit.sequence for commit in commits] == [work.sequence for work in works]
        self.check()
        self.failing = False

    def teardown(self) -> None:
        """Everybody finishes: the oldest computes at least one token per step and is never sent back."""
        if not hasattr(self, "pool") or self.failing:
            return
        steps_left = sum(sequence.num_prompt_tokens + sequence.max_tokens for sequence in self.live)
        while self.live:
            assert steps_left > 0, "somebody starves"
            steps_left -= 1
            self.step(steps_left)
        assert not self.scheduler.has_work
        assert self.pool.num_free_blocks == self.pool.num_blocks

    def scheduled(self, chunk_rows: int | None) -> list[Work]:
        """The works of a step, checked: budget, fairness, order, slots."""
        scheduler = self.scheduler
        preemptions = sum(sequence.counters.preemptions for sequence in self.live)
        decoding = {seq.id for seq in scheduler.running if seq.num_computed_tokens == seq.num_tokens - 1}
        works = scheduler.schedule(chunk_rows)
        self.seen["preempted"] += sum(sequence.counters.preemptions for sequence in self.live) - preemptions
        scheduler.check_integrity()
        assert works, "there is work, but nobody runs"
        assert [work.sequence for work in works] == scheduler.running, "a running sequence has no row"
        assert len(scheduler.running) <= scheduler.max_num_seqs
        assert (
            sum(work.num_new_tokens + work.num_lookahead_tokens for work in works) <= scheduler.max_num_batched_tokens
        )
        if chunk_rows is not None and decoding:
            chunks = [work.num_new_tokens for work in works if work.sequence.id not in decoding]
            assert sum(chunks) <= max(chunk_rows, 1) + max(0, len(chunks) - 1), "every one is owed a row, not more"
            self.seen["chunk cut for others"] += sum(chunks) == chunk_rows > 1
        assert [*scheduler.running, *scheduler.waiting] == self.live, "not in order of arrival"
        for work in works:
            sequence = work.sequence
            assert work.num_new_tokens >= 1
            assert 0 <= work.num_lookahead_tokens <= sequence.num_lookahead_tokens
            assert work.reaches_end or not work.num_lookahead_tokens, "a draft cannot follow half a prompt"
            end = sequence.num_computed_tokens + work.num_new_tokens
            assert end <= sequence.num_tokens
            assert len(sequence.block_table) == self.pool.blocks_for(end + work.num_lookahead_tokens)
            if sequence.id not in self.first_runs:
                assert sequence.id > max(self.first_runs, default=-1), "a younger request ran first"
                self.first_runs.append(sequence.id)
            self.seen["prefix hit"] += sequence.counters.cached_tokens > 0
            self.seen["chunked"] += not work.reaches_end
            self.seen["draft gave way"] += (
                work.reaches_end and work.num_lookahead_tokens < sequence.num_lookahead_tokens
            )
        tables = Counter(block for work in works for block in work.sequence.block_table)
        if self.windows is not None:
            self.seen["windows"] += 1
            blocks_for, num_held = self.pool.blocks_for, self.windows.num_window_blocks - self.windows.num_available
            of_sequences = scheduler.max_num_seqs * (blocks_for(self.window) + 2)  # as in capacity.py
            assert num_held <= of_sequences + blocks_for(scheduler.max_num_batched_tokens), "more than is planned for"
            self.seen["a block lost its window block"] += any(
                self.windows.of_block[block] == NONE for work in works for block in work.sequence.block_table
            )
        self.seen["shared block"] += any(holders > 1 for holders in tables.values())
        return works

    def drafted(self, work: Work, chance: random.Random) -> Work:
        size = chance.randint(0, work.num_lookahead_tokens)
        return work.with_draft(random_tree(chance, size, VOCAB) if size else NO_DRAFT)

    def run_model(self, works: list[Work]) -> None:
        """Every row writes its slot, then reads: the order within one layer of a model."""
        written: dict[int, int] = {}
        for work in works:
            sequence, start = work.sequence, work.sequence.num_computed_tokens
            others = {block for other in works if other is not work for block in other.sequence.block_table}
            for offset in range(start, start + work.num_rows):
                slot = self.slot(sequence, offset)
                assert slot not in written, f"{sequence.id} and {written[slot]} write the same slot"
                assert slot // self.pool.block_size not in others, "a shared block is written to"
                written[slot] = sequence.id
                self.write(slot, self.history(work, offset))
        for work in works:
            end = work.sequence.num_computed_tokens + work.num_new_tokens
            for offset in range(end + len(work.draft)):
                held = self.kv.get(self.slot(work.sequence, offset))
                assert held == self.history(work, offset), f"{work.sequence.id} reads what is not its own at {offset}"
            if self.windows is not None:
                for row in range(work.num_rows):
                    self.look_through_window(work, work.sequence.num_computed_tokens + row)

    def write(self, slot: int, history: History | None) -> None:
        self.kv[slot] = history
        if self.windows is not None:
            self.kv_in_windows[self.window_slot(slot)] = slot // self.pool.block_size, history

    def look_through_window(self, work: Work, row: int) -> None:
        """A row sees the last keys of its own path, and nothing that layers with a window have lost."""
        end = work.sequence.num_computed_tokens + work.num_new_tokens
        keys = list(range(min(row + 1, end)))
        if row >= end:
            keys += [end + node for node in path_to(work.draft, row - end)]
        for offset in keys[-self.window :]:
            slot = self.slot(work.sequence, offset)
            held = self.kv_in_windows.get(self.window_slot(slot))
            assert held == (slot // self.pool.block_size, self.history(work, offset)), (
                f"{work.sequence.id} reads what is not its own through the window of {row}, at {offset}"
            )

    def history(self, work: Work, offset: int) -> History:
        """The text that the key at this offset of a sequence's own KV must stand for."""
        text = self.texts[work.sequence.id]
        end = work.sequence.num_computed_tokens + work.num_new_tokens
        if offset < end:
            return tuple(text[: offset + 1])
        return (*text[:end], *(work.draft.tokens[node] for node in path_to(work.draft, offset - end)))

    def verdict(self, work: Work, chance: random.Random) -> Verdict:
        if chance.random() < 0.04:
            return Verdict(error="not finite")
        if not work.reaches_end:
            return Verdict()
        path: list[int] = []
        node = -1
        while (children := work.draft.children(node)) and chance.random() < 0.8:
            node = chance.choice(children)
            path.append(node)
        tokens = (*(work.draft.tokens[node] for node in path), chance.randrange(VOCAB))
        self.seen["tree accepted"] += path != list(range(len(path)))
        self.seen["chain accepted"] += bool(path) and path == list(range(len(path)))
        return Verdict(tuple(path), tokens, (None,) * len(tokens))

    def stop(self, work: Work, verdict: Verdict, chance: random.Random) -> Stop:
        """Like stops.find_stop: at most max_tokens, and now and then an end somewhere within the tokens."""
        room = work.sequence.max_tokens - work.sequence.num_output_tokens
        if verdict.tokens and chance.random() < 0.05:
            kept = chance.randint(1, min(room, len(verdict.tokens)))
            self.seen["stopped within a path"] += kept <= len(verdict.path)
            return Stop(kept, "stop", "END")
        if len(verdict.tokens) >= room:
            self.seen["cut by max_tokens"] += room <= len(verdict.path)
            return Stop(room, "length")
        return Stop(len(verdict.tokens))

    def keep(self, works: list[Work], verdicts: list[Verdict], stops: list[Stop]) -> None:
        """What KVCache.keep does to the slots; and a failed run leaves nothing worth reading in what it alone holds."""
        holders = Counter(block for sequence in self.scheduler.running for block in sequence.block_table)
        for work, verdict, stop in zip(works, verdicts, stops, strict=True):
            sequence, end = work.sequence, work.sequence.num_tokens
            moved = [self.kv[self.slot(sequence, end + node)] for node in verdict.path[: stop.num_kept]]
            for depth, history in enumerate(moved):
                self.write(self.slot(sequence, end + depth), history)
            if verdict.error is not None:
                self.seen["failed"] += 1
                alone = (block for block in sequence.block_table if holders[block] == 1)
                size = self.pool.block_size
                for slot in (block * size + place for block in alone for place in range(size)):
                    self.kv[slot] = None
                    if self.windows is not None and self.windows.keeps(slot // size):
                        self.write(slot, None)

    def check_commit(self, commit: Commit, verdict: Verdict, stop: Stop, known: int) -> None:
        """The text grew by what was kept; `known` tokens and the kept nodes are computed, and no others."""
        sequence, text = commit.sequence, self.texts[commit.sequence.id]
        assert commit.tokens == verdict.tokens[: stop.num_kept]
        assert len(commit.origins) == len(commit.logprobs) == len(commit.tokens)
        accepted = min(len(verdict.path), stop.num_kept)
        assert commit.origins == ("guess",) * accepted + ("target",) * (len(commit.tokens) - accepted)
        text += commit.tokens
        assert sequence.token_ids == text
        assert sequence.num_computed_tokens == known + accepted
        assert commit.finish_reason == ("error" if verdict.error else stop.finish_reason) == sequence.finish_reason
        if commit.finish_reason is None:
            assert not commit.tokens or sequence.num_computed_tokens == sequence.num_tokens - 1
        else:
            assert not sequence.block_table
            self.live.remove(sequence)

    def check(self) -> None:
        self.scheduler.check_integrity()
        assert [*self.scheduler.running, *self.scheduler.waiting] == self.live
        for sequence in self.scheduler.running:
            held, needed = len(sequence.block_table), self.pool.blocks_for(sequence.num_computed_tokens)
            assert held == needed, "slots of rejected tokens are kept, or slots of computed ones are not"

    def window_slot(self, slot: int) -> int:
        assert self.windows is not None
        block, place = divmod(slot, self.pool.block_size)
        assert self.windows.keeps(block), "a row needs a block that layers with a window have lost"
        return self.windows.of_block[block] * self.pool.block_size + place

    def slot(self, sequence: Sequence, offset: int) -> int:
        size = self.pool.block_size
        return sequence.block_table[offset // size] * size + offset % size
