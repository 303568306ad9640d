"""Streams: an answer while it is written, as server-sent events or as lines of JSON. Slow readers wait for themselves
alone, and those who leave end their request."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass
from math import inf
from typing import Any, Protocol

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from foredraft.server.errors import ApiError, failure, json_bytes
from foredraft.server.generation import Generation, Tokens
from foredraft.server.limits import Limits

_PORTION = 64  # tokens, which may have 50 log probabilities each
_DEPTH = 5  # where the log probabilities of a token are, counted from the outside
DONE = b"data: [DONE]\n\n"  # the end of a stream for clients of OpenAI
_HEADERS = [(b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no")]


@dataclass(frozen=True)
class Wire:
    """How a stream is told apart, and what keeps it open while there is nothing to send."""

    content_type: bytes
    keep_alive: bytes


EVENTS = Wire(b"text/event-stream; charset=utf-8", b": keep-alive\n\n")
LINES = Wire(b"application/x-ndjson", b"")  # has no comments


class Answer(Protocol):
    """How one API writes a generation: as a whole, or in events."""

    def body(self) -> dict[str, Any]:
        """The response to a request that does not stream, once the generation has finished. It may hold an iterator in
        place of a list. Called from any thread."""

    def begin(self) -> bytes:
        """The events before the first token."""

    def delta(self, tokens: Tokens) -> bytes: ...

    def end(self) -> bytes: ...

    def failure(self, error: ApiError) -> bytes:
        """The events that end a stream which cannot be completed."""


def event(data: Any, name: str | None = None) -> bytes:
    head = b"" if name is None else b"event: " + name.encode() + b"\n"
    return head + b"data: " + json_bytes(data) + b"\n\n"


class EventStream(Response):
    """Writes an answer as it comes. The engine never waits for it: tokens that nobody takes lie in the stream's queue,
    which holds no more than one answer."""

    def __init__(self, generation: Generation, answer: Answer, limits: Limits, wire: Wire = EVENTS) -> None:
        super().__init__()
        self._wire = wire
        self._generation = generation
        self._answer = answer
        self._limits = limits
        self._loop = asyncio.get_running_loop()
        self._write_began_s = inf  # when the write began that is under way

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        # A task of its own: a token then does not pass through every layer of the application.
        writing = asyncio.create_task(self._write_all(send))
        try:
            while not writing.done():  # to look now and then costs less than a timeout for every write
                await asyncio.wait([writing], timeout=self._limits.tick_s)
                if self._loop.time() - self._write_began_s >= self._limits.write_timeout_s:
                    return
            writing.result()  # raises what went wrong
        finally:
            writing.cancel()
            await asyncio.wait([writing])
            await self._generation.close()

    async def _write_all(self, send: Send) -> None:
        headers = [(b"content-type", self._wire.content_type), *_HEADERS]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        try:
            last = await self._write_tokens(send)
        except ApiError as error:
            last = self._answer.failure(error)
        except Exception:
            await self._write(send, self._answer.failure(failure()), more=False)
            raise
        await self._write(send, last, more=False)

    async def _write_tokens(self, send: Send) -> bytes:
        """Returns the events that are left to write."""
        generation, answer = self._generation, self._answer
        await self._write(send, answer.begin())
        while (tokens := await generation.next(self._limits.keep_alive_s)) or tokens is None:
            if tokens is None:
                await self._write(send, self._wire.keep_alive)
                continue
            for portion in portions(tokens):
                await self._write(send, answer.delta(portion))
                if portion is not tokens:
                    await asyncio.sleep(0)  # others have waited long enough
        return b"" if generation.client_left else answer.end()

    async def _write(self, send: Send, chunk: bytes, more: bool = True) -> None:
        if chunk or not more:
            self._write_began_s = self._loop.time()
            await send({"type": "http.response.body", "body": chunk, "more_body": more})
            self._write_began_s = inf


def portions(tokens: Tokens) -> Iterator[Tokens]:
    """The same tokens, as many at a time as are quickly written: a client that reads slowly finds many."""
    if sum(map(len, tokens.values())) <= _PORTION:
        yield tokens
        return
    for index, its in tokens.items():
        for start in range(0, len(its), _PORTION):
            yield {index: its[start : start + _PORTION]}


def json_pieces(value: Any, depth: int = _DEPTH) -> Iterator[bytes]:
    """JSON in pieces, each quickly written: other threads can run in between. An iterator is written as a list."""
    if depth and isinstance(value, dict):
        for place, (key, item) in enumerate(value.items()):
            yield (b"," if place else b"{") + json_bytes(key) + b":"
            yield from json_pieces(item, depth - 1)
        yield b"}" if value else b"{}"
    elif depth and isinstance(value, list | Iterator):
        separator = b"["
        for item in value:
            yield separator
            yield from json_pieces(item, depth - 1)
            separator = b","
        yield b"]" if separator == b"," else b"[]"
    else:
        yield json_bytes(value)


async def respond(
    generation: Generation, answer: Answer, limits: Limits, stream: bool | None, wire: Wire = EVENTS
) -> Response:
    """The answer as the client wants it: event by event, or whole."""
    if stream:
        return EventStream(generation, answer, limits, wire)

    def written() -> bytes:
        return b"".join(json_pieces(answer.body()))

    try:
        await generation.finish()
        body = await asyncio.to_thread(written) if generation.is_large else written()
        return Response(body, media_type="application/json")
    finally:
        await generation.close()
