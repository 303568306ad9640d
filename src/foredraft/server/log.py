"""One line of JSON per request: what it was, how it ended and what it cost. No prompts and answers unless wanted."""

from __future__ import annotations

import json
import logging
import time
from typing import Any
from uuid import uuid4

from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

log = logging.getLogger(__name__)

_QUIET_PATHS = frozenset({"/health", "/ready", "/metrics", "/v1/stats"})  # fetched every few seconds
CLIENT_CLOSED = 499  # nobody was there to get a status


class RequestRecord:
    """What the line of one request will tell; whoever learns something adds it to `fields`."""

    def __init__(self, log_prompts: bool) -> None:
        self.id = uuid4().hex
        self.log_prompts = log_prompts
        self.fields: dict[str, Any] = {}
        self.headers: dict[str, str] = {}  # of the response, whoever writes it


def record_of(request: Request) -> RequestRecord:
    record = request.scope["foredraft.record"]
    assert isinstance(record, RequestRecord)
    return record


class RequestLog:
    """Gives every request an id, which is also a header of the response, and writes its line at the end."""

    def __init__(self, app: ASGIApp, log_prompts: bool = False) -> None:
        self._app = app
        self._log_prompts = log_prompts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        record = scope["foredraft.record"] = RequestRecord(self._log_prompts)
        started = time.perf_counter()
        status = CLIENT_CLOSED

        async def note(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                own = {"x-request-id": record.id, **record.headers}
                written = [(name.encode(), value.encode()) for name, value in own.items()]
                message["headers"] = [*message.get("headers", ()), *written]
            await send(message)

        try:
            await self._app(scope, receive, note)
        finally:
            if scope["path"] not in _QUIET_PATHS:
                client = scope.get("client")
                line = {
                    "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
                    "request": record.id,
                    "client": client[0] if client else None,
                    "method": scope["method"],
                    "path": scope["path"][:200],
                    "status": status,
                    "seconds": round(time.perf_counter() - started, 4),
                    **record.fields,
                }
                log.info("%s", json.dumps(line))
