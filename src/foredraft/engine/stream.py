"""The events of one request, on their way from the engine thread to the task that reads them."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field

from foredraft.outputs import TokenEvent
from foredraft.params import SamplingParams


@dataclass(eq=False)
class Channel:
    """What the threads of an engine and a reader share. The threads read the request and the two flags, and they call
    `deliver` and `decide` through the event loop. Any thread may set the flags; everything else happens in the loop."""

    loop: asyncio.AbstractEventLoop
    request_id: str
    params: SamplingParams
    priority: int
    arrived: asyncio.Event  # something may have changed since the reader last looked
    unfinished: int  # samples whose last event has not been read
    events: deque[TokenEvent] = field(default_factory=deque)
    decided: asyncio.Event = field(default_factory=asyncio.Event)  # the engine has taken the request or refused it
    prompt_token_ids: list[int] = field(default_factory=list)  # once the prompt is encoded
    error: Exception | None = None  # why the request was refused
    is_left: bool = False  # nobody reads any more
    is_aborted: bool = False

    def deliver(self, event: TokenEvent) -> None:
        """Hand an event to the readers. A request that has one was taken."""
        if not self.is_left:
            self.events.append(event)
            self.wake()

    def decide(self, error: Exception | None = None) -> None:
        """Tell the readers that the request was taken, or why it was refused. The first decision stays."""
        if not self.decided.is_set():
            self.error = error
        self.wake()

    def wake(self) -> None:
        """Let every reader look again, and let nobody wait for a decision."""
        self.decided.set()
        self.arrived.set()

    def leave(self) -> None:
        self.is_left = True
        self.unfinished = 0
        self.events.clear()


class Stream(AsyncIterator[TokenEvent]):
    """The events of a request until its last sample has ended.

    A reader that is cancelled while it waits, by a timeout for instance, loses nothing and may go on reading. Closing
    the stream from any task ends the request and its readers; so does leaving `async with`, and dropping the stream.
    """

    def __init__(self, channel: Channel, abort: Callable[[Channel], None]) -> None:
        self._channel = channel
        self._abort = abort

    @property
    def request_id(self) -> str:
        return self._channel.request_id

    @property
    def prompt_token_ids(self) -> list[int]:
        """The prompt as the engine gets it; empty until it is encoded, which is before the request is admitted."""
        return self._channel.prompt_token_ids

    async def admitted(self) -> None:
        """Wait until the engine has taken the request; raises what is wrong with it. A server calls this before it
        answers, so that a bad request is not a broken stream."""
        await self._channel.decided.wait()
        if self._channel.error is not None:
            raise self._channel.error

    @property
    def has_ended(self) -> bool:
        """Whether the last event was read, or the stream was closed."""
        return not self._channel.unfinished

    async def __anext__(self) -> TokenEvent:
        while not self._channel.events:
            await self.wait()
            if not self._channel.events and self.has_ended:
                raise StopAsyncIteration
        event = self._channel.events.popleft()
        self._count(event)
        return event

    async def wait(self) -> None:
        """Wait until there is an event to read or no more will come; raises what is wrong with the request."""
        channel = self._channel
        if not channel.events and channel.unfinished and channel.error is None:
            channel.arrived.clear()
            await channel.arrived.wait()
        if not channel.events and channel.error is not None:
            raise channel.error

    def arrived(self) -> list[TokenEvent]:
        """All events that can be read without waiting."""
        events = list(self._channel.events)
        self._channel.events.clear()
        for event in events:
            self._count(event)
        return events

    def _count(self, read: TokenEvent) -> None:
        if read.finish_reason is not None:
            self._channel.unfinished -= 1
            if not self._channel.unfinished:
                self._channel.arrived.set()  # another reader has nothing to wait for

    async def aclose(self) -> None:
        self._leave()
        self._channel.wake()

    async def __aenter__(self) -> Stream:
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.aclose()

    def __del__(self) -> None:
        self._leave()

    def _leave(self) -> None:
        if self._channel.unfinished and self._channel.error is None:
            self._channel.leave()
            self._abort(self._channel)
