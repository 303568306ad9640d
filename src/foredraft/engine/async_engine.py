"""The engine for servers: one thread steps, any number of asyncio tasks add, stream and abort."""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future

from foredraft.engine.engine import Engine
from foredraft.errors import InvalidParameter
from foredraft.params import SamplingParams
from foredraft.proposers.registry import Spec
from foredraft.types import TokenEvent

log = logging.getLogger(__name__)

Action = Callable[[], None]
Deliver = Callable[[TokenEvent], None]


class Stream(AsyncIterator[TokenEvent]):
    """The events of a request until its last sample has ended. Whoever leaves early, or never begins, aborts it."""

    def __init__(self, events: asyncio.Queue[TokenEvent], num_samples: int, abort: Action) -> None:
        self._events = events
        self._running = num_samples
        self._abort = abort

    async def __anext__(self) -> TokenEvent:
        if not self._running:
            raise StopAsyncIteration
        try:
            event = await self._events.get()
        except asyncio.CancelledError:
            self._leave()
            raise
        self._running -= event.finish_reason is not None
        return event

    async def aclose(self) -> None:
        self._leave()

    def __del__(self) -> None:
        self._leave()

    def _leave(self) -> None:
        if self._running:
            self._running = 0
            self._abort()


class AsyncEngine:
    """Owns an Engine and the only thread that touches it. Commands go in through a queue and run between steps."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._commands: queue.SimpleQueue[tuple[Future[None], Action] | None] = queue.SimpleQueue()  # None: the last
        self._listeners: dict[str, Deliver] = {}  # touched by the engine thread only
        self._streams: dict[str, Stream] = {}  # those that nobody has taken yet
        self._closed = False
        self._gate = threading.RLock()  # nothing is queued behind the last command; a dropped stream may enter again
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

        def abort() -> None:
            if self._listeners.get(request_id) is deliver:  # else it has ended, and the id may be another's
                self._deliver(self._engine.abort(request_id))

        stream = Stream(events, params.n, abort=lambda: self._forget(abort))
        try:
            await self._call(command)
        except asyncio.CancelledError:
            await stream.aclose()  # the command may have run all the same
            raise
        self._streams[request_id] = stream

    def stream(self, request_id: str) -> Stream:
        """The events of a request, for one taker."""
        if request_id not in self._streams:
            raise InvalidParameter(
                f"There is no stream of {request_id!r} to take: it was not added, was aborted, or has a taker already."
            )
        return self._streams.pop(request_id)

    async def abort(self, request_id: str) -> None:
        """End a request; its stream closes with finish_reason "abort". Unknown ids are ignored."""
        self._streams.pop(request_id, None)
        await asyncio.shield(self._call(lambda: self._deliver(self._engine.abort(request_id))))

    async def close(self) -> None:
        """Abort everything and stop the thread."""
        with self._gate:
            if not self._closed:
                self._closed = True
                self._commands.put(None)
        await asyncio.to_thread(self._thread.join)

    def _call(self, action: Action) -> asyncio.Future[None]:
        """Have the engine thread do something; to cancel the future withdraws what has not begun."""
        future: Future[None] = Future()
        with self._gate:
            if self._closed:
                raise RuntimeError("The engine is closed.")
            self._commands.put((future, action))
        return asyncio.wrap_future(future)

    def _forget(self, abort: Action) -> None:
        """Abort a request that nobody listens to. Called from anywhere, even while memory is collected."""
        with self._gate:
            if not self._closed:
                self._commands.put((Future(), abort))

    def _loop(self) -> None:
        while True:
            while not self._engine.has_work or not self._commands.empty():
                command = self._commands.get()
                if command is None:
                    self._deliver(self._engine.abort_all())
                    return
                _answer(*command)
            try:
                events = self._engine.step()
            except BaseException as error:  # a library's panic too: without this thread everybody would wait for ever
                log.exception("a step failed; all running requests are ended")
                events = self._engine.abort_all(error)
            self._deliver(events)

    def _deliver(self, events: list[TokenEvent]) -> None:
        for event in events:
            if deliver := self._listeners.get(event.request_id):
                try:
                    deliver(event)
                except RuntimeError:  # the event loop of its taker is closed
                    self._engine.abort(event.request_id)
                    self._streams.pop(event.request_id, None)
        for event in events:
            if not self._engine.is_live(event.request_id):
                self._listeners.pop(event.request_id, None)


def _answer(future: Future[None], action: Action) -> None:
    """Do what was asked, unless nobody waits for it any more. Whatever goes wrong is the asker's."""
    if not future.set_running_or_notify_cancel():
        return
    try:
        action()
    except BaseException as error:
        future.set_exception(error)
    else:
        future.set_result(None)
