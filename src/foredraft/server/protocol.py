"""HTTP/1.1 for uvicorn, with an end to clients whose headers, chunk extensions or trailers never end."""

from __future__ import annotations

import asyncio
from typing import Any, NoReturn

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from foredraft.server.errors import bad_request, error_object, json_bytes
from foredraft.server.limits import Limits


def bounded_protocol(limits: Limits) -> type[asyncio.Protocol]:
    """The protocol class for uvicorn. A request that has trailers or too large headers is answered with 400, and a
    connection is closed when headers take too long."""

    class BoundedProtocol(HttpToolsProtocol):
        _header_timer: asyncio.TimerHandle | None = None
        _num_bytes = 0  # bytes since the last headers or piece of a body; nothing else counts them
        _refusal = ""  # why a request is not taken
        _has_headers = False  # whether the headers of the present request are complete

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            self._watch_headers()

        def data_received(self, data: bytes) -> None:
            if self._is_idle():
                self._watch_headers()
            self._num_bytes += len(data)
            super().data_received(data)
            if not self._is_idle():
                self._unwatch_headers()
            if self._num_bytes > limits.max_header_bytes and not self.transport.is_closing():
                self.send_400_response("The headers or the parts between chunks are too large.")

        def connection_lost(self, exc: Exception | None) -> None:
            self._unwatch_headers()
            super().connection_lost(exc)

        def on_header(self, name: bytes, value: bytes) -> None:
            if self._has_headers:
                self._refuse("Trailers are not taken.")
            super().on_header(name, value)

        def on_headers_complete(self) -> None:
            self._has_headers, self._num_bytes = True, 0
            size = len(self.url) + sum(len(name) + len(value) for name, value in self.headers)
            if size > limits.max_header_bytes:
                self._refuse("The headers are too large.")
            super().on_headers_complete()

        def on_body(self, body: bytes) -> None:
            self._num_bytes = 0
            super().on_body(body)

        def on_message_complete(self) -> None:
            super().on_message_complete()
            self._has_headers, self._num_bytes = False, 0

        def send_400_response(self, msg: str) -> None:
            """In the shape of an API's error; which API, nobody can tell yet."""
            body = json_bytes(error_object("", bad_request(self._refusal or msg)))
            head = f"HTTP/1.1 400 Bad Request\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n"
            self.transport.write(f"{head}connection: close\r\n\r\n".encode() + body)
            self.transport.close()

        def _refuse(self, why: str) -> NoReturn:
            self._refusal = why
            raise ValueError(why)  # the parser makes a 400 of it

        def _is_idle(self) -> bool:
            """Whether no request is under way whose headers are complete."""
            return self.cycle is None or self.cycle.response_complete

        def _watch_headers(self) -> None:
            if self._header_timer is None:
                self._header_timer = self.loop.call_later(limits.header_timeout_s, self._give_up)

        def _unwatch_headers(self) -> None:
            if self._header_timer is not None:
                self._header_timer.cancel()
                self._header_timer = None

        def _give_up(self) -> None:
            self._header_timer = None
            if self._is_idle() and not self.transport.is_closing():
                self.transport.close()

    return BoundedProtocol
