"""The engine for servers: one thread steps, any number of asyncio tasks add, stream and abort."""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future
from typing import Any

from foredraft.engine.engine import Engine
from foredraft.params import SamplingParams
from foredraft.proposers.registry import Spec
from foredraft.types import TokenEvent

log = logging.getLogger(__name__)

Deliver = Callable[[TokenEvent], None]


class AsyncEngine:
    """Owns an Engine and the only thread that touches it. Commands go in through a queue and run between steps."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._commands: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._listeners: dict[str, Deliver] = {}  # touched by the engine thread only
        self._streams: dict[str, tuple[asyncio.Queue[TokenEvent], int]] = {}  # events, samples still running
        self._closed = False
        self._thread = threading.Thread(target=self._loop, name="foredraft-engine", daemon=True)
        self._thread.start()

    async def add(self, request_id: str, prompt: list[int], params: SamplingParams, spec: Spec) -> None:
        """Queue a request; raises what Engine.add raises. Its events wait until `stream` takes them."""
        loop = asyncio.get_running_loop()
        events: asyncio.Queue[TokenEvent] = asyncio.Queue()

        def deliver(event: TokenEvent) -> None:
            loop.call_soon_threadsafe(events.put_nowait, event)

        def command() -> None:
            self._engine.add(request_id, prompt, params, spec)
            self._listeners[request_id] = deliver

        await self._call(command)
        self._streams[request_id] = (events, params.n)

    async def stream(self, request_id: str) -> AsyncIterator[TokenEvent]:
        """The events of a request until its last sample has ended. Leaving the loop early aborts the request."""
        events, running = self._streams.pop(request_id)
        try:
            while running:
                event = await events.get()
                running -= event.finish_reason is not None
                yield event
        finally:
            if running:
                self._commands.put(lambda: self._abort(request_id))

    async def abort(self, request_id: str) -> None:
        """End a request; its stream closes with finish_reason "abort". Unknown ids are ignored."""
        await self._call(lambda: self._abort(request_id))

    async def close(self) -> None:
        """Abort everything and stop the thread."""

        def command() -> None:
            self._deliver(self._engine.abort_all())
            self._closed = True

        await self._call(command)
        await asyncio.to_thread(self._thread.join)

    async def _call(self, command: Callable[[], None]) -> None:
        """Run a command in the engine thread and wait for it."""
        future: Future[Any] = Future()

        def run() -> None:
            try:
                command()
            except Exception as error:
                future.set_exception(error)
            else:
                future.set_result(None)

        if self._closed:
            raise RuntimeError("The engine is closed.")
        self._commands.put(run)
        await asyncio.wrap_future(future)

    def _loop(self) -> None:
        while True:
            while not self._engine.has_work or not self._commands.empty():
                self._commands.get()()
                if self._closed:
                    return
            try:
                events = self._engine.step()
            except Exception:
                # Nobody can be blamed for a step that failed as a whole, and nobody may hang: all of them end.
                log.exception("a step failed; all running requests are ended")
                events = self._engine.abort_all()
            self._deliver(events)

    def _abort(self, request_id: str) -> None:
        self._deliver(self._engine.abort(request_id))

    def _deliver(self, events: list[TokenEvent]) -> None:
        for event in events:
            self._listeners[event.request_id](event)
        for event in events:
            if not self._engine.is_live(event.request_id):
                self._listeners.pop(event.request_id, None)
