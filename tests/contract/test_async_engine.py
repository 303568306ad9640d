"""What servers rely on: whatever one task does to its request, the others go on and nothing is left behind."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from foredraft.batch import ForwardBatch
from foredraft.engine.async_engine import AsyncEngine
from foredraft.errors import InvalidParameter, InvalidPrompt
from foredraft.llm import LLM
from foredraft.proposers.registry import Spec
from foredraft.runtime.runner import ForwardOutput, Runner
from foredraft.types import TokenEvent
from tests.contract.test_engine import GREEDY, PROMPT, is_idle, with_fields
from tests.tiny_models import random_model, save_model

LONG = with_fields(max_tokens=400)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(random_model("llama"), tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def llm(folder: Path) -> LLM:
    return LLM(str(folder), max_num_seqs=8, kv_cache_tokens=1024, spec="off")


class Gated(Runner):
    """A runner that waits in every step until it is let through, so that a test knows when one is under way."""

    def __init__(self, healthy: Runner) -> None:
        super().__init__(healthy.decoder, healthy.backend, healthy.kv)
        self.registered, self.let_through = threading.Event(), threading.Event()

    def forward(self, batch: ForwardBatch) -> ForwardOutput:
        self.registered.set()
        assert self.let_through.wait(30)
        return super().forward(batch)


@asynccontextmanager
async def in_a_step(llm: LLM) -> AsyncIterator[AsyncEngine]:
    """An engine whose thread is inside a step for the request "other", until the block ends; "other" must then be
    answered in full."""
    gate = llm.engine.runner = Gated(llm.engine.runner)
    engine = AsyncEngine(llm.engine)
    await engine.add("other", PROMPT, GREEDY, Spec())
    assert await asyncio.to_thread(gate.registered.wait, 30)
    try:
        yield engine
    finally:
        gate.let_through.set()
    async with asyncio.timeout(30):
        assert [event.finish_reason async for event in engine.stream("other")][-1] == "length"
        await engine.close()
    assert not engine._listeners
    assert not engine._streams
    assert is_idle(llm)


def test_a_task_cancelled_while_it_adds_harms_nobody(llm: LLM) -> None:
    async def main() -> None:
        async with in_a_step(llm) as engine:
            task = asyncio.create_task(engine.add("cancelled", PROMPT, LONG, Spec()))
            await asyncio.sleep(0.01)  # its command is queued behind the step
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

    asyncio.run(main())


def test_a_task_cancelled_when_its_request_has_just_been_added_aborts_it(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        loop, added = asyncio.get_running_loop(), llm.engine.add

        def add_and_cancel(*args: Any) -> None:
            added(*args)
            loop.call_soon_threadsafe(task.cancel)  # arrives ahead of the command's result

        engine = AsyncEngine(llm.engine)
        monkeypatch.setattr(llm.engine, "add", add_and_cancel)
        task = asyncio.create_task(engine.add("cancelled", PROMPT, LONG, Spec()))
        with pytest.raises(asyncio.CancelledError):
            await task
        await engine.abort("nobody")  # comes after whatever the cancelled task has asked for
        assert not llm.engine.is_live("cancelled")
        await engine.close()

    asyncio.run(main())
    assert is_idle(llm)


def test_a_cancelled_add_does_not_abort_another_request_of_its_name(llm: LLM) -> None:
    async def main() -> None:
        async with in_a_step(llm) as engine:
            task = asyncio.create_task(engine.add("other", PROMPT, LONG, Spec()))
            await asyncio.sleep(0.01)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

    asyncio.run(main())


def test_an_abort_happens_even_if_its_task_is_cancelled(llm: LLM) -> None:
    async def main() -> None:
        async def draft_budget(engine: AsyncEngine) -> list[str | None]:
            await engine.add("long", PROMPT, LONG, Spec())
            return [event.finish_reason async for event in engine.stream("long")]

        async with in_a_step(llm) as engine:
            querying = asyncio.create_task(draft_budget(engine))
            await asyncio.sleep(0.01)
            aborting = asyncio.create_task(engine.abort("long"))
            await asyncio.sleep(0.01)
            aborting.cancel()
        assert await querying == ["abort"]

    asyncio.run(main())


@pytest.mark.parametrize("leave", ["close", "drop", "abort"])
def test_a_stream_that_is_never_begun_frees_everything(llm: LLM, leave: str) -> None:
    async def main() -> None:
        engine = AsyncEngine(llm.engine)
        await engine.add("unread", PROMPT, LONG, Spec())
        if leave == "close":
            await engine.stream("unread").aclose()
        elif leave == "drop":
            engine.stream("unread")
        await engine.abort("unread" if leave == "abort" else "nobody")
        assert not llm.engine.is_live("unread")
        assert not engine._streams
        with pytest.raises(InvalidParameter, match="There is no stream of 'unread' to take"):
            engine.stream("unread")
        await engine.close()

    asyncio.run(main())
    assert is_idle(llm)


def test_whoever_queries_a_closed_or_closing_engine_is_told(llm: LLM) -> None:
    async def main() -> None:
        gate = llm.engine.runner = Gated(llm.engine.runner)
        engine = AsyncEngine(llm.engine)
        await engine.add("running", PROMPT, LONG, Spec())
        assert await asyncio.to_thread(gate.registered.wait, 30)
        before = asyncio.create_task(engine.add("before", PROMPT, LONG, Spec()))
        closing = [asyncio.create_task(engine.close()) for _ in range(2)]
        await asyncio.sleep(0.01)
        behind = asyncio.create_task(engine.add("behind", PROMPT, LONG, Spec()))
        await asyncio.sleep(0.01)
        gate.let_through.set()
        async with asyncio.timeout(30):
            await asyncio.gather(before, *closing)
            with pytest.raises(RuntimeError, match="The engine is closed"):
                await behind
            for name in ("running", "before"):
                assert [event.finish_reason async for event in engine.stream(name)][-1] == "abort"
            await engine.close()

    asyncio.run(main())
    assert is_idle(llm)


def test_an_event_loop_that_is_gone_takes_only_its_own_requests_along(llm: LLM) -> None:
    async def begin() -> tuple[AsyncEngine, Any]:
        engine = AsyncEngine(llm.engine)
        await engine.add("untaken", PROMPT, LONG, Spec())
        await engine.add("taken", PROMPT, LONG, Spec())
        return engine, engine.stream("taken")

    async def go_on(engine: AsyncEngine) -> None:
        await engine.add("other", PROMPT, GREEDY, Spec())
        async with asyncio.timeout(30):
            assert [event.finish_reason async for event in engine.stream("other")][-1] == "length"
        assert not llm.engine.is_live("taken")
        assert not llm.engine.is_live("untaken")
        await engine.close()

    engine, _stream = asyncio.run(begin())
    asyncio.run(go_on(engine))
    assert is_idle(llm)


def test_the_async_engine_serves_many_and_aborts_any(llm: LLM) -> None:
    expected = {i: llm.generate([[i + 1, 7]], GREEDY)[0].token_ids for i in range(6)}

    async def main() -> None:
        engine = AsyncEngine(llm.engine)

        async def draft_budget(index: int) -> list[int]:
            await engine.add(f"r{index}", [index + 1, 7], GREEDY, Spec())
            return [event.token_id async for event in engine.stream(f"r{index}") if event.token_id is not None]

        answers = await asyncio.gather(*(draft_budget(index) for index in range(6)))
        assert dict(enumerate(answers)) == expected

        with pytest.raises(InvalidPrompt):
            await engine.add("bad", [], GREEDY, Spec())

        await engine.add("long", PROMPT, with_fields(max_tokens=400), Spec())
        events: list[TokenEvent] = []
        async for event in engine.stream("long"):
            events.append(event)
            if len(events) == 3:
                await engine.abort("long")
        assert events[-1].finish_reason == "abort"
        assert 3 <= len(events) < 50

        await engine.add("left", PROMPT, with_fields(max_tokens=400, n=2), Spec())
        left = engine.stream("left")
        await anext(left)
        await left.aclose()  # type: ignore[attr-defined]
        await engine.close()

    asyncio.run(main())
    assert is_idle(llm)


def test_a_step_that_fails_ends_its_requests_and_not_the_async_engine(llm: LLM) -> None:
    class Fails(Runner):
        def forward(self, batch: ForwardBatch) -> ForwardOutput:
            raise RuntimeError("out of memory")

    async def main() -> None:
        good = llm.engine.runner
        llm.engine.runner = Fails(good.decoder, good.backend, good.kv)
        engine = AsyncEngine(llm.engine)
        await engine.add("first", PROMPT, GREEDY, Spec())
        (last,) = [event async for event in engine.stream("first")]
        assert last.finish_reason == "error"
        assert last.output is not None
        assert last.output.error == "The engine failed while this request ran: out of memory."
        llm.engine.runner = good
        await engine.add("second", PROMPT, GREEDY, Spec())
        assert [event.finish_reason async for event in engine.stream("second")][-1] == "length"
        await engine.close()

    asyncio.run(main())
