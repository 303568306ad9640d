"""A request as it travels from a gateway to a replica, and the replica's answer on its way back."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

from starlette.types import ASGIApp, Message, Scope

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ForwardedRequest:
    """One HTTP request, complete. `prefixes` are the names of its prompt's prefixes, for whoever chooses a replica."""

    method: str
    path: str
    query: bytes
    headers: tuple[tuple[bytes, bytes], ...]
    client: tuple[str, int] | None
    body: bytes = field(repr=False)
    prefixes: tuple[bytes, ...] = field(default=(), repr=False)

    def scope(self) -> Scope:
        return {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": self.method,
            "scheme": "http",
            "path": self.path,
            "raw_path": self.path.encode(),
            "query_string": self.query,
            "root_path": "",
            "headers": list(self.headers),
            "client": self.client,
            "server": None,
        }


async def answer(app: ASGIApp, request: ForwardedRequest) -> AsyncIterator[list[Message]]:
    """What the application sends, as many messages at a time as there are. Closing the iterator is the client's leave:
    the application hears of it and ends the request."""
    sent: list[Message] = []
    is_complete = False
    arrived, left = asyncio.Event(), asyncio.Event()
    body: Message | None = {"type": "http.request", "body": request.body, "more_body": False}

    async def receive() -> Message:
        nonlocal body
        if body is not None:
            given, body = body, None
            return given
        await left.wait()
        return {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        nonlocal is_complete
        sent.append(message)
        is_complete = message["type"] == "http.response.body" and not message.get("more_body", False)
        arrived.set()

    running = asyncio.ensure_future(app(request.scope(), receive, send))
    running.add_done_callback(lambda _: arrived.set())
    try:
        while not running.done() or sent:
            await arrived.wait()
            arrived.clear()
            messages, sent = sent, []
            if messages:
                yield messages
    finally:
        left.set()
        done, _ = await asyncio.wait([running], timeout=10)  # seconds to end the request in
        if not done:
            running.cancel()
    error = running.exception()
    if error is not None and not is_complete:
        raise error
    if error is not None:  # the client has been told
        log.error("A request failed.", exc_info=error)
