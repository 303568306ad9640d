"""What servers rely on: whatever one task does to its request, the others go on and nothing is left behind."""

from __future__ import annotations

import asyncio
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from foredraft.batch import PackedBatch
from foredraft.engine import calibration
from foredraft.engine.async_engine import AsyncEngine
from foredraft.engine.stream import Stream
from foredraft.errors import InvalidParameter, Overloaded
from foredraft.llm import LLM
from foredraft.outputs import TokenEvent
from foredraft.proposers.registry import parse_spec
from foredraft.runtime.kv import KVCache
from foredraft.runtime.runner import ForwardOutput, Runner
from foredraft.types import Work
from tests.contract.async_engines import (
    LONG,
    Gated,
    SlowBuilds,
    are_in_the_background,
    has_requests,
    in_a_step,
    is_clean,
    last,
    no_other_task,
    read,
    until,
)
from tests.contract.test_engine import GREEDY, PROMPT, is_idle, with_fields
from tests.tiny_models import random_model, save_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(random_model("llama"), tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def llm(folder: Path) -> LLM:
    return LLM(str(folder), max_num_seqs=8, kv_cache_tokens=1024, spec="off")


def test_many_are_served_and_any_can_be_aborted(llm: LLM) -> None:
    expected = [llm.generate([[i + 1, 7]], GREEDY)[0].token_ids for i in range(6)]

    async def main() -> None:
        engine = AsyncEngine(llm.engine)
        answers = await asyncio.gather(*(read(engine.generate([i + 1, 7], GREEDY)) for i in range(6)))
        assert [[event.token_id for event in events] for events in answers] == expected

        events: list[TokenEvent] = []
        async for event in engine.generate(PROMPT, LONG, request_id="long"):
            events.append(event)
            if len(events) == 3:
                await engine.abort("long")
        assert events[-1].finish_reason == "abort"
        assert 3 <= len(events) < 50

        left = engine.generate(PROMPT, with_fields(max_tokens=400, n=2))
        await anext(left)
        await left.aclose()
        await until(engine)
        assert is_clean(engine, llm)
        await engine.close()

    asyncio.run(main())


def test_too_many_are_refused_before_their_prompts_are_looked_at(llm: LLM) -> None:
    encoded: list[Any] = []

    def encode(prompt: Any) -> list[int]:
        encoded.append(prompt)
        return list(prompt)

    async def main() -> None:
        gate = llm.engine.runner = Gated(llm.engine.runner)
        engine = AsyncEngine(llm.engine, encode, max_waiting=3)
        streams = [engine.generate(PROMPT, GREEDY) for _ in range(11)]
        for _ in range(2):
            with pytest.raises(Overloaded, match=r"11 sequences run or wait and this request has 1, but at most 8 run"):
                engine.generate("too much", GREEDY)
        assert await asyncio.to_thread(gate.entered.wait, 30)
        stats = engine.stats()
        assert stats.running + stats.waiting == 11
        gate.let_through.set()
        assert [await last(stream) for stream in streams] == ["length"] * 11
        assert await last(engine.generate(PROMPT, GREEDY)) == "length"
        await engine.close()

    asyncio.run(main())
    assert len(encoded) == 12 and "too much" not in encoded
    assert is_idle(llm)


def test_an_engine_shows_its_load(llm: LLM) -> None:
    async def main() -> None:
        engine = AsyncEngine(llm.engine, max_waiting=2)
        assert repr(engine) == f"<AsyncEngine: 0 of 8 sequences run, 0 of 2 wait, max_model_len={llm.max_model_len}>"
        await engine.close()
        assert repr(engine) == "<AsyncEngine, closed>"

    asyncio.run(main())


def test_every_sample_of_a_request_counts(llm: LLM) -> None:
    async def main() -> None:
        engine = AsyncEngine(llm.engine, max_waiting=2)
        streams = [engine.generate(PROMPT, with_fields(n=7))]
        with pytest.raises(Overloaded) as overloaded:
            engine.generate(PROMPT, with_fields(n=4))
        assert str(overloaded.value) == (
            "7 sequences run or wait and this request has 4, but at most 8 run (max_num_seqs) and 2 more wait "
            "(max_waiting); try again later."
        )
        with pytest.raises(InvalidParameter) as never:
            engine.generate(PROMPT, with_fields(n=11))
        assert str(never.value) == (
            "n asks for 11 sequences in all, but at most 8 run (max_num_seqs) and 2 more wait (max_waiting); lower n."
        )
        streams.append(engine.generate(PROMPT, with_fields(n=3)))
        assert [await last(stream) for stream in streams] == ["length"] * 2
        assert await last(engine.generate(PROMPT, with_fields(n=10))) == "length"
        await engine.close()

    asyncio.run(main())


@pytest.mark.parametrize("max_waiting", [-1, True, 1.0, "3"])
def test_a_bad_limit_is_refused(llm: LLM, max_waiting: Any) -> None:
    with pytest.raises(InvalidParameter) as caught:
        AsyncEngine(llm.engine, max_waiting=max_waiting)
    sentence = f"max_waiting={max_waiting!r} must be a whole number of at least 0, or None for no limit."
    assert str(caught.value) == sentence


def test_stats_tell_the_load_and_the_times(llm: LLM) -> None:
    async def main() -> None:
        async with in_a_step(llm) as engine:
            more = [engine.generate(PROMPT, with_fields(n=5)) for _ in range(2)]
            stats = engine.stats()
            assert (stats.running, stats.waiting) == (1, 10)
            assert stats.free_blocks == stats.num_blocks - 1
            llm.engine.runner.let_through.set()  # type: ignore[attr-defined]
            for stream in more:
                await read(stream)
        stats = engine.stats()
        assert (stats.running, stats.waiting, stats.free_blocks) == (0, 0, stats.num_blocks)
        assert stats.num_steps == len(stats.step_times_s) > 12
        assert all(seconds > 0 for seconds in stats.step_times_s)

    asyncio.run(main())


def test_whoever_generates_on_a_closed_or_closing_engine_is_told(llm: LLM) -> None:
    async def main() -> None:
        gate = llm.engine.runner = Gated(llm.engine.runner)
        engine = AsyncEngine(llm.engine)
        running = engine.generate(PROMPT, LONG)
        assert await asyncio.to_thread(gate.entered.wait, 30)
        before = engine.generate(PROMPT, LONG)
        while not before.prompt_token_ids:  # then the engine has it to look at after its step
            await asyncio.sleep(0.01)
        late = engine.generate(PROMPT, LONG)  # is still to be tokenised when the engine closes
        closing = [asyncio.create_task(engine.close()) for _ in range(2)]
        await asyncio.sleep(0)
        with pytest.raises(RuntimeError, match="The engine is closed"):
            engine.generate(PROMPT, LONG)
        gate.let_through.set()
        async with asyncio.timeout(30):
            await asyncio.gather(*closing)
        with pytest.raises(RuntimeError, match="The engine is closed"):
            await read(late)
        assert [await last(stream) for stream in (running, before)] == ["abort", "abort"]
        await engine.close()

    asyncio.run(main())
    assert is_idle(llm)


def test_an_event_loop_that_is_gone_takes_only_its_own_requests_along(llm: LLM) -> None:
    async def begin() -> tuple[AsyncEngine[list[int]], list[Stream]]:
        engine = AsyncEngine(llm.engine)
        streams = [engine.generate(PROMPT, LONG) for _ in range(3)]
        for stream in streams[:2]:
            await stream.admitted()
        return engine, streams  # the last one is still being admitted

    async def go_on(engine: AsyncEngine[list[int]]) -> None:
        assert await last(engine.generate(PROMPT, GREEDY)) == "length"
        await until(engine)
        assert is_clean(engine, llm)
        await engine.close()

    engine, _streams = asyncio.run(begin())
    asyncio.run(go_on(engine))


def test_a_step_that_fails_ends_its_requests_and_not_the_engine(llm: LLM) -> None:
    class Fails(Runner):
        def forward(self, batch: PackedBatch) -> ForwardOutput:
            raise RuntimeError("out of memory")

    async def main() -> None:
        good = llm.engine.runner
        llm.engine.runner = Fails(good.decoder, good.backend, good.kv)
        engine = AsyncEngine(llm.engine)
        (event,) = await read(engine.generate(PROMPT, GREEDY))
        assert event.finish_reason == "error"
        assert event.output is not None
        assert event.output.error == "The engine failed while this request ran: out of memory."
        llm.engine.runner = good
        assert await last(engine.generate(PROMPT, GREEDY)) == "length"
        await engine.close()

    asyncio.run(main())


def test_an_event_loop_is_woken_once_per_step(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        loop, engine = asyncio.get_running_loop(), AsyncEngine(llm.engine)
        wakers: list[str] = []
        call = loop.call_soon_threadsafe

        def counted(*arguments: Any, **options: Any) -> Any:
            wakers.append(threading.current_thread().name)
            return call(*arguments, **options)

        monkeypatch.setattr(loop, "call_soon_threadsafe", counted)
        streams = [engine.generate(PROMPT, with_fields(n=2)) for _ in range(4)]
        events = [await read(stream) for stream in streams]
        assert sum(map(len, events)) == 96
        assert wakers.count("foredraft-engine") <= engine.stats().num_steps + len(streams), "each was added once"
        await engine.close()

    asyncio.run(main())


def test_a_crowd_of_commands_does_not_stop_a_stream(llm: LLM) -> None:
    """Only so many commands run between two steps."""
    between: list[int] = []

    async def main() -> None:
        async with in_a_step(llm) as engine:
            commands = 0
            step, add = llm.engine.step, llm.engine.add

            def counted_step() -> list[TokenEvent]:
                nonlocal commands
                between.append(commands)
                commands = 0
                return step()

            def counted_add(*arguments: Any, **options: Any) -> Any:
                nonlocal commands
                commands += 1
                return add(*arguments, **options)

            llm.engine.step = counted_step  # type: ignore[method-assign]
            llm.engine.add = counted_add  # type: ignore[method-assign]
            streams = [engine.generate(PROMPT, with_fields(max_tokens=1)) for _ in range(100)]
            while not all(stream.prompt_token_ids for stream in streams):
                await asyncio.sleep(0.01)
            llm.engine.runner.let_through.set()  # type: ignore[attr-defined]
            assert [await last(stream) for stream in streams] == ["length"] * 100

    asyncio.run(main())
    assert sum(between) == 100 and max(between) <= 50


def test_a_proposer_is_built_while_others_stream_on(llm: LLM) -> None:
    assignments, builds = llm.engine.speculation.assignments, SlowBuilds(llm)

    async def main() -> None:
        engine = AsyncEngine(llm.engine)
        drafted = [engine.generate(PROMPT, GREEDY, parse_spec("ngram+quantised")) for _ in range(2)]
        assert await asyncio.to_thread(builds.entered.wait, 30)
        assert await last(engine.generate(PROMPT, GREEDY)) == "length", "nobody waits for what is built"
        builds.let_through.set()
        for stream in drafted:
            assert await last(stream) == "length"
        assert set(assignments.proposers) == {"ngram", "quantised"}
        assert are_in_the_background(builds.threads)
        await engine.close()
        for name in list(assignments.proposers):
            assignments.proposers.pop(name).close()
        assert set(llm.engine.kv.groups) == {"target"}, "what was built twice was closed once"

    asyncio.run(main())
    assert is_idle(llm)


def test_closing_does_not_wait_for_proposers_and_nobody_waits_for_the_closed_engine(llm: LLM) -> None:
    builds = SlowBuilds(llm)

    async def main() -> None:
        engine = AsyncEngine(llm.engine)
        streams = [engine.generate(PROMPT, LONG, parse_spec(spec)) for spec in ("ngram", "suffix", "ngram+lookahead")]
        assert await asyncio.to_thread(builds.entered.wait, 30)
        waiting = [asyncio.create_task(stream.admitted()) for stream in streams]
        async with asyncio.timeout(30):
            await engine.close()
            for stream, admitted in zip(streams, waiting, strict=True):
                with pytest.raises(RuntimeError, match=r"^The engine is closed\.$"):
                    await admitted
                with pytest.raises(RuntimeError, match=r"^The engine is closed\.$"):
                    await anext(stream)
            assert not has_requests(engine)
            builds.let_through.set()
            await no_other_task()
        assert len(builds.threads) == 1, "what was queued is not built any more"
        assert is_clean(engine, llm)
        assert set(llm.engine.kv.groups) == {"target"}

    asyncio.run(main())


def test_a_reader_does_not_wait_for_an_admission_that_was_cancelled(llm: LLM) -> None:
    builds = SlowBuilds(llm)

    async def main() -> None:
        engine = AsyncEngine(llm.engine)
        stream = engine.generate(PROMPT, LONG, parse_spec("ngram"))
        (admission,) = asyncio.all_tasks() - {asyncio.current_task()}
        assert await asyncio.to_thread(builds.entered.wait, 30)
        reader = asyncio.create_task(read(stream))
        await asyncio.sleep(0)
        admission.cancel()
        assert await reader == []
        builds.let_through.set()
        await until(engine)
        assert is_clean(engine, llm)
        await engine.close()

    asyncio.run(main())


def test_requests_that_come_together_begin_together(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("foredraft.engine.async_engine._GATHER_S", 20.0)
    schedule, sizes = llm.engine.scheduler.schedule, list[int]()

    def recorded(*arguments: Any) -> list[Work]:
        works = schedule(*arguments)
        sizes.append(len(works))
        return works

    def slowly(prompt: list[int]) -> list[int]:
        time.sleep(0.01 * prompt[-1])
        return prompt

    monkeypatch.setattr(llm.engine.scheduler, "schedule", recorded)

    async def main() -> None:
        engine = AsyncEngine(llm.engine, slowly)
        streams = [engine.generate([5, 6, number], GREEDY) for number in range(1, 5)]
        assert [await last(stream) for stream in streams] == ["length"] * 4
        assert set(sizes) == {4}, "the first waits for the last"
        started = time.monotonic()
        assert await last(engine.generate([5, 6, 7], GREEDY)) == "length"
        assert time.monotonic() < started + 10, "one that is alone waits for nobody"
        await engine.close()

    asyncio.run(main())


def test_the_machine_is_measured_when_nothing_runs(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("foredraft.engine.loading.cache_folder", lambda: tmp_path / "models")
    llm = LLM(str(folder), spec="off", max_num_seqs=8, kv_cache_tokens=1024, max_chunk_s=0.05)
    run_times_s: list[float] = []

    def two_ms_a_row(runner: Runner, kv: KVCache, works: list[Work]) -> float:
        assert not llm.engine.has_work
        run_times_s.append(0.002 * sum(work.num_rows for work in works))
        return run_times_s[-1]

    monkeypatch.setattr(calibration, "_time", two_ms_a_row)

    async def main() -> None:
        engine = AsyncEngine(llm.engine)
        events = await read(engine.generate(PROMPT, GREEDY, parse_spec("auto")))
        assert events[-1].output is not None
        assert events[-1].output.metrics.decisions.keys() == {"measuring"}
        async with asyncio.timeout(60):
            while llm.engine.wants_calibration:
                await asyncio.sleep(0.01)
        assert len(run_times_s) > 100
        assert max(run_times_s) <= 0.05, "what a request that comes meanwhile waits"
        events = await read(engine.generate(PROMPT, GREEDY, parse_spec("auto")))
        assert events[-1].output is not None
        assert set(events[-1].output.metrics.decisions) != {"measuring"}
        await engine.close()

    asyncio.run(main())
    assert is_idle(llm)
