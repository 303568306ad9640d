"""Prompt chunks beside running sequences: how many rows they may have, and that the scheduler keeps to it."""

from __future__ import annotations

import pytest

from foredraft.engine.blocks import BlockPool
from foredraft.engine.chunks import TILE, ChunkLimit
from foredraft.engine.scheduler import Scheduler
from foredraft.types import Stop, Verdict, Work
from tests.unit.unit_helpers import make_sequence


class TestLimit:
    def test_before_anything_was_measured_it_is_one_tile(self) -> None:
        assert ChunkLimit(0.125).rows_beside(1) == TILE - 1

    def test_it_is_what_fits_the_time_in_whole_tiles(self) -> None:
        limit = ChunkLimit(0.125)
        limit.observe(16, 1, 0.032)
        assert limit.rows_beside(1) == 48 - 1, "50 rows at 2 ms in four fifths of 0.125 s, rounded down"
        assert limit.rows_beside(5) == 48 - 5

    def test_the_slowest_of_the_last_few_steps_counts(self) -> None:
        limit = ChunkLimit(0.125)
        chunks = []
        for seconds in (0.048, 0.048, 0.096, 0.048, 0.048, 0.048):
            limit.observe(48, 1, seconds)
            chunks.append(limit.rows_beside(1))
        assert chunks == [95, 95, 47, 47, 47, 95]

    def test_single_rows_and_whole_prompts_tell_nothing(self) -> None:
        limit = ChunkLimit(0.125)
        limit.observe(1, 1, 1e-6)
        limit.observe(512, 0, 1e-6)
        assert limit.rows_beside(1) == TILE - 1

    @pytest.mark.parametrize("num_decoding", [1, 100, 248, 249, 300, 1000])
    def test_it_learns_however_many_decode(self, num_decoding: int) -> None:
        limit = ChunkLimit(1.25)
        drafted = 4 * num_decoding
        rows = num_decoding + drafted + limit.rows_beside(num_decoding)
        limit.observe(rows, num_decoding, 1e-4 * rows)
        assert limit.rows_beside(num_decoding) + num_decoding == 10_000

    def test_an_infinite_time_sets_no_limit(self) -> None:
        limit = ChunkLimit(float("inf"))
        assert limit.rows_beside(1) >= 100_000
        limit.observe(16, 1, 0.032)
        assert limit.rows_beside(1) >= 100_000

    @pytest.mark.parametrize("max_chunk_s", [1e300, 1.7e308])
    def test_any_time_can_be_allowed(self, max_chunk_s: float) -> None:
        limit = ChunkLimit(max_chunk_s)
        limit.observe(16, 1, 1e-9)
        assert limit.rows_beside(1) >= 100_000

    def test_a_prompt_always_goes_on(self) -> None:
        limit = ChunkLimit(0.125)
        limit.observe(64, 1, 100.0)
        for num_decoding in range(1, 100):
            chunk = limit.rows_beside(num_decoding)
            assert TILE // 2 <= chunk < 2 * TILE
            assert (chunk + num_decoding) % TILE == 0


def run(scheduler: Scheduler, works: list[Work]) -> None:
    verdicts = [Verdict(tokens=(7,), logprobs=(None,)) if work.reaches_end else Verdict() for work in works]
    scheduler.update_from_output(works, verdicts, [Stop(len(verdict.tokens)) for verdict in verdicts])


def scheduled(scheduler: Scheduler, chunk_rows: int | None) -> list[int]:
    works = scheduler.schedule(chunk_rows)
    run(scheduler, works)
    return [work.num_new_tokens for work in works]


class TestScheduler:
    def test_chunks_are_cut_only_beside_a_sequence_that_decodes(self) -> None:
        scheduler = Scheduler(BlockPool(64, 16), max_num_seqs=4, max_num_batched_tokens=64)
        scheduler.add(make_sequence(list(range(100)), id=0, max_tokens=50))
        assert [scheduled(scheduler, 10) for _ in range(3)] == [[64], [36], [1]], "alone it is as large as ever"
        scheduler.add(make_sequence(list(range(200, 300)), id=1, max_tokens=50))
        scheduler.add(make_sequence(list(range(300, 325)), id=2, max_tokens=50))
        assert [scheduled(scheduler, 30) for _ in range(2)] == [[1, 15, 15], [1, 20, 10]], "all prompts share the rows"
        assert [scheduled(scheduler, 30) for _ in range(4)] == [[1, 30, 1], [1, 30, 1], [1, 5, 1], [1, 1, 1]]

    def test_without_a_limit_they_are_not_cut(self) -> None:
        scheduler = Scheduler(BlockPool(64, 16), max_num_seqs=4, max_num_batched_tokens=64)
        scheduler.add(make_sequence([1, 2, 3], id=0, max_tokens=50))
        assert scheduled(scheduler, None) == [3]
        scheduler.add(make_sequence(list(range(100)), id=1, max_tokens=50))
        assert scheduled(scheduler, None) == [1, 63]

    def test_every_running_sequence_gets_its_row(self) -> None:
        scheduler = Scheduler(BlockPool(64, 16), max_num_seqs=4, max_num_batched_tokens=64)
        for id in (0, 1):
            scheduler.add(make_sequence([id, *range(100)], id=id, max_tokens=50))
        assert scheduled(scheduler, None) == [64]
        assert scheduled(scheduler, None) == [37, 27]
        assert scheduled(scheduler, 1) == [1, 1]
        assert scheduled(scheduler, 0) == [1, 1]
