"""What the tests of AsyncEngine and of its streams share: readers, and an engine that is held inside a step."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager

from foredraft.batch import PackedBatch
from foredraft.engine.async_engine import AsyncEngine
from foredraft.engine.stream import Stream
from foredraft.llm import LLM
from foredraft.outputs import TokenEvent
from foredraft.proposers.base import Proposer
from foredraft.proposers.registry import ProposerChoice
from foredraft.runtime.runner import ForwardOutput, Runner
from tests.contract.test_engine import GREEDY, PROMPT, is_idle, with_fields

LONG = with_fields(max_tokens=400)


async def read(stream: Stream) -> list[TokenEvent]:
    async with asyncio.timeout(30):
        return [event async for event in stream]


async def last(stream: Stream) -> str | None:
    return (await read(stream))[-1].finish_reason


async def until(engine: AsyncEngine[list[int]]) -> None:
    """Until the engine thread has done what was asked of it before."""
    async with asyncio.timeout(30):
        await engine.abort("nobody")


async def no_other_task() -> None:
    """Until every admission is over: no task is left but the one that waits."""
    async with asyncio.timeout(30):
        while len(asyncio.all_tasks()) > 1:
            await asyncio.sleep(0.01)


def has_requests(engine: AsyncEngine[list[int]]) -> bool:
    stats = engine.stats()
    return bool(stats.running or stats.waiting)


def is_clean(engine: AsyncEngine[list[int]], llm: LLM) -> bool:
    return not has_requests(engine) and len(asyncio.all_tasks()) == 1 and is_idle(llm)


def are_in_the_background(threads: Iterable[str]) -> bool:
    """Whether neither the event loop nor the engine's steps had to wait for what these threads did."""
    return not {"MainThread", "foredraft-engine"} & set(threads)


class Gated(Runner):
    """A runner that waits in every step until it is let through, so that a test knows when one is under way."""

    def __init__(self, healthy: Runner) -> None:
        super().__init__(healthy.decoder, healthy.backend, healthy.kv)
        self.entered, self.let_through = threading.Event(), threading.Event()

    def forward(self, batch: PackedBatch) -> ForwardOutput:
        self.entered.set()
        assert self.let_through.wait(30)
        return super().forward(batch)


class SlowBuilds:
    """Proposers of this engine are built only when they are let through."""

    def __init__(self, llm: LLM) -> None:
        self._assignments = llm.engine.speculation.assignments
        self._make_proposer = self._assignments.make_proposer
        self._assignments.make_proposer = self._slowly
        self.entered, self.let_through = threading.Event(), threading.Event()
        self.threads: list[str] = []  # the names of those that built, one for every build

    def _slowly(self, choice: ProposerChoice) -> Proposer:
        self.threads.append(threading.current_thread().name)
        self.entered.set()
        assert self.let_through.wait(30)
        return self._make_proposer(choice)


@asynccontextmanager
async def in_a_step(llm: LLM) -> AsyncIterator[AsyncEngine[list[int]]]:
    """An engine whose thread is inside a step for the request "other", until the block ends; "other" must then be
    answered in full."""
    gate = llm.engine.runner = Gated(llm.engine.runner)
    engine = AsyncEngine(llm.engine)
    other = engine.generate(PROMPT, GREEDY, request_id="other")
    assert await asyncio.to_thread(gate.entered.wait, 30)
    try:
        yield engine
    finally:
        gate.let_through.set()
    assert await last(other) == "length"
    async with asyncio.timeout(30):
        await engine.close()
    assert is_clean(engine, llm)
