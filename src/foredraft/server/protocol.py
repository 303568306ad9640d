"""HTTP/1.1 for uvicorn, with an end to clients that never finish their headers."""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol


def bounded_protocol(header_timeout_s: float) -> type[asyncio.Protocol]:
    """The protocol class for uvicorn. A connection is closed when a request's headers take longer than this."""

    class BoundedProtocol(H11Protocol):
        _header_timer: asyncio.TimerHandle | None = None

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            self._watch_headers()

        def data_received(self, data: bytes) -> None:
            if self._is_idle():
                self._watch_headers()
            super().data_received(data)
            if not self._is_idle():
                self._unwatch_headers()

        def connection_lost(self, exc: Exception | None) -> None:
            self._unwatch_headers()
            super().connection_lost(exc)

        def _is_idle(self) -> bool:
            """Whether no request is under way whose headers are complete."""
            return self.cycle is None or self.cycle.response_complete

        def _watch_headers(self) -> None:
            if self._header_timer is None:
                self._header_timer = self.loop.call_later(header_timeout_s, self._give_up)

        def _unwatch_headers(self) -> None:
            if self._header_timer is not None:
                self._header_timer.cancel()
                self._header_timer = None

        def _give_up(self) -> None:
            self._header_timer = None
            if self._is_idle() and not self.transport.is_closing():
                self.transport.close()

    return BoundedProtocol
