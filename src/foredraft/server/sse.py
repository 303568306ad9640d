"""Server-sent events: an answer while it is written. Slow readers wait for themselves alone, and those who leave end
their request."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Any, Protocol

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from foredraft.server.errors import ApiError, failure, json_bytes
from foredraft.server.generation import ClientGone, Generation, Tokens
from foredraft.server.limits import Limits

KEEP_ALIVE = b": keep-alive\n\n"
_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


class Answer(Protocol):
    """How one API writes a generation: as a whole, or in events."""

    def body(self) -> dict[str, Any]:
        """The response to a request that does not stream, once the generation has finished."""

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

    def __init__(self, generation: Generation, answer: Answer, limits: Limits) -> None:
        super().__init__()
        self._generation = generation
        self._answer = answer
        self._limits = limits

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        generation, answer = self._generation, self._answer
        try:
            await send({"type": "http.response.start", "status": 200, "headers": _HEADERS})
            try:
                await self._write(send, answer.begin())
                while (tokens := await generation.next(self._limits.keep_alive_s)) or tokens is None:
                    await self._write(send, KEEP_ALIVE if tokens is None else answer.delta(tokens))
                last = b"" if generation.client_left else answer.end()
            except ApiError as error:
                last = answer.failure(error)
            except (ClientGone, TimeoutError):
                return  # nobody reads: the connection is closed
            except Exception:
                await self._write(send, answer.failure(failure()), more=False)
                raise
            with suppress(TimeoutError):
                await self._write(send, last, more=False)
        finally:
            await generation.close()

    async def _write(self, send: Send, chunk: bytes, more: bool = True) -> None:
        if chunk or not more:
            async with asyncio.timeout(self._limits.write_timeout_s):
                await send({"type": "http.response.body", "body": chunk, "more_body": more})


async def respond(generation: Generation, answer: Answer, limits: Limits, stream: bool | None) -> Response:
    """The answer as the client wants it: event by event, or whole."""
    if stream:
        return EventStream(generation, answer, limits)
    try:
        await generation.finish()
        return Response(json_bytes(answer.body()), media_type="application/json")
    finally:
        await generation.close()
