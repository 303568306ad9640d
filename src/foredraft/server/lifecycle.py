"""Ready, draining, stopped: what SIGTERM does to a server that people use."""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
from collections.abc import Callable
from types import FrameType

import uvicorn

from foredraft.server.errors import ApiError

log = logging.getLogger(__name__)

_LOOK_AGAIN_S = 0.05


class Lifecycle:
    """Counts the requests that are being answered, and lets none begin once the server drains."""

    def __init__(self) -> None:
        self.is_draining = False
        self.num_answering = 0

    def check_accepting(self) -> None:
        if self.is_draining:
            raise ApiError(503, "The server is about to stop; send the request to another one.", retry_after_s=5)

    async def drained(self, timeout_s: float) -> bool:
        """Whether all requests that run have ended within this time."""
        try:
            async with asyncio.timeout(timeout_s):
                while self.num_answering:
                    await asyncio.sleep(_LOOK_AGAIN_S)
        except TimeoutError:
            return False
        return True


class DrainingServer(uvicorn.Server):
    """On the first signal readiness becomes 503 and what runs is finished; on the second everything ends at once."""

    def __init__(self, config: uvicorn.Config, lifecycle: Lifecycle, drain_timeout_s: float) -> None:
        super().__init__(config)
        self._lifecycle = lifecycle
        self._drain_timeout_s = drain_timeout_s
        self._draining: asyncio.Task[None] | None = None
        self.on_ready: Callable[[], None] = lambda: None  # called once requests are taken

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            self.on_ready()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self._lifecycle.is_draining or not self.started:
            self.should_exit = self.force_exit = True
            return
        self._lifecycle.is_draining = True
        log.info(
            "%s: finishing %d running requests; a second signal stops at once.",
            signal.Signals(sig).name,
            self._lifecycle.num_answering,
        )

    async def on_tick(self, counter: int) -> bool:
        if self._lifecycle.is_draining and self._draining is None:
            self._draining = asyncio.create_task(self._drain())
        return await super().on_tick(counter)

    async def _drain(self) -> None:
        if not await self._lifecycle.drained(self._drain_timeout_s):
            log.warning("%d requests did not end in time and are aborted.", self._lifecycle.num_answering)
            self.force_exit = True
        self.should_exit = True
