"""The scheduler and the block pool under everything at once, against a model of what the KV slots hold.

The machine below plays engine: it adds and aborts requests, drafts chains and trees, accepts random paths, stops and
fails at random. The model of the KV cache is a dict from slot to the text that was fed up to and including that slot.
Whatever a row would read must be its own history, which catches wrong sharing, wrong rollback and stale prefix hits.
"""

from __future__ import annotations

from collections.abc import Sequence as Items
from typing import Any

import pytest
from hypothesis import Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from foredraft.engine.blocks import BlockPool
from foredraft.engine.scheduler import Scheduler
from foredraft.engine.window_blocks import NONE, WindowBlocks
from foredraft.types import Commit, Sequence, Stop, Verdict, Work
from tests.unit.scheduler_machine import SETTINGS, Machine
from tests.unit.unit_helpers import make_sequence


def run(machine: type[Machine]) -> None:
    machine.seen.clear()
    run_state_machine_as_test(machine, settings=SETTINGS)


def test_everything_at_once() -> None:
    """Nothing breaks, and everything that might break it did happen."""
    run(Machine)
    happened = (
        "preempted",
        "prefix hit",
        "shared block",
        "chunked",
        "chunk cut for others",
        "draft gave way",
        "tree accepted",
        "chain accepted",
        "stopped within a path",
        "failed",
        "abort running",
        "abort waiting",
        "windows",
        "a block lost its window block",
    )
    assert {name: Machine.seen[name] for name in happened if not Machine.seen[name]} == {}


class CutsTooMuch(BlockPool):
    """Rolls back one block too many."""

    def truncate(self, sequence: Sequence, num_tokens: int) -> None:
        while sequence.block_table and len(sequence.block_table) > self.blocks_for(num_tokens) - 1:
            self._release_last(sequence)


class NeverCuts(BlockPool):
    """Keeps the slots of rejected tokens."""

    def truncate(self, sequence: Sequence, num_tokens: int) -> None:
        pass


class ForgetsToFree(BlockPool):
    """Clears the table, but the blocks stay held."""

    def free(self, sequence: Sequence, forget: bool = False) -> None:
        self._chains.pop(sequence.id, None)
        del sequence.block_table[:]


class IgnoresContent(BlockPool):
    """Names a block by its place alone: every text has the same prefix."""

    def _name(self, chain: list[bytes], sequence: Sequence, index: int) -> bytes:
        return index.to_bytes(16, "little")


class IgnoresWhatCameBefore(BlockPool):
    """Names a block by its own tokens alone, whatever the text before it."""

    def _name(self, chain: list[bytes], sequence: Sequence, index: int) -> bytes:
        return super()._name([b""] * (index + 1), sequence, index)


class NamesTheUncomputed(BlockPool):
    """Names blocks as soon as their tokens are known."""

    def register(self, sequence: Sequence) -> None:
        computed = sequence.num_computed_tokens
        sequence.num_computed_tokens = min(sequence.num_tokens, len(sequence.block_table) * self.block_size)
        super().register(sequence)
        sequence.num_computed_tokens = computed


class RemembersTheFailed(BlockPool):
    """Lets others find what a failed run has left."""

    def free(self, sequence: Sequence, forget: bool = False) -> None:
        super().free(sequence)


class GivesNamedBlocksAway(BlockPool):
    """Hands out a remembered block without forgetting its name."""

    def reserve(self, sequence: Sequence, num_tokens: int) -> bool:
        names = dict(self._name_of_block)
        done = super().reserve(sequence, num_tokens)
        self._name_of_block = names
        self._block_of_name = {name: block for block, name in names.items()}
        return done


@pytest.mark.parametrize(
    "broken",
    [
        CutsTooMuch,
        NeverCuts,
        ForgetsToFree,
        IgnoresContent,
        IgnoresWhatCameBefore,
        NamesTheUncomputed,
        RemembersTheFailed,
        GivesNamedBlocksAway,
    ],
)
def test_a_broken_pool_is_caught(broken: type[BlockPool]) -> None:
    expect_failure(pool_class=broken)


class SlidesTooEarly(WindowBlocks):
    """Lets go of one block that the next row still sees."""

    def _first_seen(self, num_computed_tokens: int) -> int:
        return super()._first_seen(num_computed_tokens + self._block_size)


class SlidesATokenEarly(WindowBlocks):
    """Counts a window that does not have the row itself."""

    def _first_seen(self, num_computed_tokens: int) -> int:
        return super()._first_seen(num_computed_tokens + 1)


class NeverSlides(WindowBlocks):
    """Keeps all that a sequence ever had."""

    def slide(self, sequence_id: int, table: Items[int], num_computed_tokens: int) -> list[int]:
        return []


class FindsWhatIsLost(WindowBlocks):
    """Serves a prefix that layers with a window have lost."""

    def num_found(self, blocks: Items[int]) -> int:
        return len(blocks)


class ForgetsOtherHolders(WindowBlocks):
    """Lets go for all sequences when one of them does."""

    def _let_go(self, block: int) -> bool:
        self._holders[block] = min(1, self._holders[block])
        return super()._let_go(block)


class GivesTwice(WindowBlocks):
    """Does not tell the block that had a window block before."""

    def add(self, block: int) -> None:
        oldest = next(iter(self._unheld), None)
        old = NONE if oldest is None else self.of_block[oldest]
        super().add(block)
        if oldest is not None and oldest not in self._unheld and oldest != block:
            self.of_block[oldest] = old


@pytest.mark.parametrize(
    "broken",
    [SlidesTooEarly, SlidesATokenEarly, NeverSlides, FindsWhatIsLost, ForgetsOtherHolders, GivesTwice],
)
def test_broken_windows_are_caught(broken: type[WindowBlocks]) -> None:
    expect_failure(windows_class=broken)


class LastInLine(Scheduler):
    """Sends a preempted sequence to the end of the queue."""

    def _preempt(self, sequence: Sequence) -> None:
        super()._preempt(sequence)
        self.waiting.rotate(-1)


class OverBudget(Scheduler):
    """Gives every sequence as many rows as if it were alone."""

    def _reserve(self, sequence: Sequence, rows: int) -> Work | None:
        return super()._reserve(sequence, self.max_num_batched_tokens)


class Forgetful(Scheduler):
    """Drops a sequence that is preempted."""

    def _preempt(self, sequence: Sequence) -> None:
        super()._preempt(sequence)
        self.waiting.popleft()


class IgnoresStops(Scheduler):
    """Counts accepted nodes beyond a stop as computed."""

    def _commit(self, work: Work, verdict: Verdict, stop: Stop) -> Commit:
        beyond = max(0, len(verdict.path) - stop.num_kept)
        work.sequence.num_computed_tokens += beyond
        return super()._commit(work, verdict, stop)


class ForgetsThePath(Scheduler):
    """Counts only the known tokens as computed: accepted nodes are computed again, which is slow but never wrong."""

    def _commit(self, work: Work, verdict: Verdict, stop: Stop) -> Commit:
        work.sequence.num_computed_tokens -= min(len(verdict.path), stop.num_kept)
        return super()._commit(work, verdict, stop)


@pytest.mark.parametrize("broken", [LastInLine, OverBudget, Forgetful, IgnoresStops, ForgetsThePath])
def test_a_broken_scheduler_is_caught(broken: type[Scheduler]) -> None:
    expect_failure(scheduler_class=broken)


def expect_failure(**parts: Any) -> None:
    machine = type("BrokenMachine", (Machine,), parts)
    # Many: the first failure ends it.
    quick = settings(SETTINGS, max_examples=3000, phases=[Phase.generate])
    with pytest.raises((AssertionError, IndexError, KeyError)):
        run_state_machine_as_test(machine, settings=quick)


def one_step(scheduler: Scheduler) -> list[Work]:
    """A step without drafts in which the model always says 7."""
    works = scheduler.schedule()
    verdicts = [Verdict((), (7,), (None,)) if work.reaches_end else Verdict() for work in works]
    scheduler.update_from_output(works, verdicts, [Stop(len(verdict.tokens)) for verdict in verdicts])
    return works


def test_drafts_give_path_before_a_sequence_is_sent_back() -> None:
    """Slots for the draft of an older sequence are not worth computing a younger one again."""
    scheduler = Scheduler(BlockPool(4, 2, prefix_caching=False), max_num_seqs=8, max_num_batched_tokens=64)
    for id in range(2):
        scheduler.add(make_sequence([id, id], id=id))
    one_step(scheduler)
    scheduler.running[0].num_lookahead_tokens = 3  # fits into the two free blocks, of which the other needs one
    assert [work.sequence.id for work in scheduler.schedule()] == [0, 1]


def test_drafts_do_not_starve_prompts() -> None:
    """A waiting prompt gets in even when the running sequences' drafts would fill every step."""
    scheduler = Scheduler(BlockPool(64, 2), max_num_seqs=8, max_num_batched_tokens=8)
    scheduler.add(make_sequence([1], id=0))
    scheduler.waiting[0].num_lookahead_tokens = 7
    one_step(scheduler)
    scheduler.add(make_sequence([2], id=1))
    assert 1 in {work.sequence.id for _ in range(20) for work in one_step(scheduler)}


def test_drafts_do_not_reach_beyond_the_last_token() -> None:
    """Of a draft at most max_tokens - 1 nodes can be kept; deeper ones have positions that the model does not know."""
    scheduler = Scheduler(BlockPool(64, 2), max_num_seqs=8, max_num_batched_tokens=64)
    scheduler.add(make_sequence([1], max_tokens=3))
    scheduler.waiting[0].num_lookahead_tokens = 7
    assert [work.num_lookahead_tokens for _ in range(2) for work in one_step(scheduler)] == [2, 1]


def test_what_a_text_finds_of_its_own_after_it_was_sent_back_is_no_cached_prompt() -> None:
    scheduler = Scheduler(BlockPool(6, 2), max_num_seqs=2, max_num_batched_tokens=8)
    for id in range(2):
        scheduler.add(make_sequence([id, 5, 6], id=id, max_tokens=8))
    _, younger = scheduler.waiting
    while not younger.counters.preemptions:
        one_step(scheduler)
    scheduler.abort(scheduler.running[0])
    one_step(scheduler)
    assert younger.num_computed_tokens > 3
    assert younger.counters.cached_tokens == 0


def test_who_is_sent_back_waits_for_the_next_step() -> None:
    """Letting it in again at once, with a first chunk that happens to fit, would send it back again and again."""
    scheduler = Scheduler(BlockPool(4, 2, prefix_caching=False), max_num_seqs=2, max_num_batched_tokens=2)
    for id in range(2):
        scheduler.add(make_sequence([id], id=id))
    steps = [[work.sequence.id for work in one_step(scheduler)] for _ in range(6)]
    assert steps == [[0, 1], [0, 1], [0, 1], [0, 1], [0], [0, 1]]


def test_a_long_prompt_does_not_block_a_short_one() -> None:
    """The short one comes while the long one is computed, and has its first token one step later."""
    scheduler = Scheduler(BlockPool(256, 2), max_num_seqs=4, max_num_batched_tokens=16)
    scheduler.add(make_sequence([1] * 200, id=0))
    assert [work.num_new_tokens for work in one_step(scheduler)] == [16]
    scheduler.add(make_sequence([2] * 5, id=1))
    assert [work.num_new_tokens for work in one_step(scheduler)] == [11, 5]


def test_a_short_prompt_gets_in_behind_a_long_one_that_waits() -> None:
    scheduler = Scheduler(BlockPool(256, 2), max_num_seqs=4, max_num_batched_tokens=16)
    for id, length in enumerate((200, 100, 5)):
        scheduler.add(make_sequence([id] * length, id=id))
    assert [work.num_new_tokens for work in one_step(scheduler)] == [8, 3, 5]


def test_what_is_cached_of_a_prompt_does_not_make_it_long() -> None:
    scheduler = Scheduler(BlockPool(256, 2), max_num_seqs=4, max_num_batched_tokens=16)
    scheduler.add(make_sequence([3] * 100, id=0))
    while not one_step(scheduler)[0].reaches_end:
        pass
    scheduler.abort(scheduler.running[0])
    scheduler.add(make_sequence([1] * 80, id=1))
    one_step(scheduler)
    scheduler.add(make_sequence([3] * 104, id=2))
    assert [work.num_new_tokens for work in one_step(scheduler)] == [12, 4]


def test_equal_prompts_are_computed_one_after_the_other() -> None:
    scheduler = Scheduler(BlockPool(256, 2), max_num_seqs=4, max_num_batched_tokens=16)
    for id in range(3):
        scheduler.add(make_sequence([id] * 24, id=id))
    assert [[work.num_new_tokens for work in one_step(scheduler)] for _ in range(3)] == [[16], [8, 8], [1, 15]]


def test_sequences_are_let_in_together() -> None:
    scheduler = Scheduler(BlockPool(64, 2), max_num_seqs=4, max_num_batched_tokens=8, refill=2)
    sequences = [make_sequence([number] * 4, id=number) for number in range(7)]
    for sequence in sequences:
        scheduler.add(sequence)
    while len(scheduler.running) < 4:  # one place that is left is filled too
        assert any(work.num_new_tokens > 1 for work in one_step(scheduler))
    one_step(scheduler)
    scheduler.abort(sequences[0])
    assert len(one_step(scheduler)) == 3 and len(scheduler.waiting) == 3
    scheduler.abort(sequences[1])
    one_step(scheduler)
    assert len(scheduler.running) == 4 and len(scheduler.waiting) == 1


def test_a_lower_priority_runs_first_and_is_sent_back_last() -> None:
    scheduler = Scheduler(BlockPool(4, 2, prefix_caching=False), max_num_seqs=2, max_num_batched_tokens=8)
    for id, priority in enumerate((0, 5, -1)):
        scheduler.add(make_sequence([id], id=id, priority=priority))
    assert [work.sequence.id for work in one_step(scheduler)] == [2, 0]
    scheduler.check_integrity()
    while not scheduler.waiting[0].counters.preemptions:
        one_step(scheduler)
    assert [sequence.id for sequence in scheduler.running] == [2]
    assert [sequence.id for sequence in scheduler.waiting] == [0, 1]


def test_short_prompts_enter_until_the_rows_of_a_step_are_used() -> None:
    scheduler = Scheduler(BlockPool(256, 4), max_num_seqs=64, max_num_batched_tokens=96)
    for number in range(60):
        scheduler.add(make_sequence([number, 1], id=number))
    assert sum(work.num_new_tokens for work in scheduler.schedule()) == 96
