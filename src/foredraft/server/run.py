"""From a loaded model to a listening server, and to its end: what SIGTERM does to a server that people use."""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
from collections.abc import Callable, Iterable
from contextlib import suppress
from types import FrameType

import uvicorn

from foredraft.errors import InvalidParameter
from foredraft.server.app import make_app
from foredraft.server.protocol import bounded_protocol
from foredraft.server.service import Service
from foredraft.server.sites import LOCAL, Sites

log = logging.getLogger(__name__)

BACKLOG = 2048
_LAST_WORDS_S = 1.0  # for clients to be told that their answers end


class DrainingServer(uvicorn.Server):
    """On the first signal readiness becomes 503 and what runs is finished; on the second everything ends at once."""

    def __init__(self, config: uvicorn.Config, service: Service) -> None:
        super().__init__(config)
        self.on_ready: Callable[[], None] = lambda: None  # called once requests are taken
        self._service = service
        self._draining: asyncio.Task[None] | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            self.on_ready()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        if self.force_exit:  # then uvicorn leaves out the end of the app, which closes the engine
            await self._service.engine.close()
            with suppress(TimeoutError):
                async with asyncio.timeout(_LAST_WORDS_S):
                    while self._service.num_answering:
                        await asyncio.sleep(0.01)
        await super().shutdown(sockets)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self._service.is_draining or not self.started:
            self.should_exit = self.force_exit = True
            return
        self._service.is_draining = True
        log.info(
            "%s: finishing %d running requests; a second signal stops at once.",
            signal.Signals(sig).name,
            self._service.num_answering,
        )

    async def on_tick(self, counter: int) -> bool:
        if self._service.is_draining and self._draining is None:
            self._draining = asyncio.create_task(self._drain())
        return await super().on_tick(counter)

    async def _drain(self) -> None:
        try:
            async with asyncio.timeout(self._service.limits.drain_timeout_s):
                while self._service.num_answering:
                    await asyncio.sleep(0.05)
        except TimeoutError:
            log.warning("%d requests did not end in time and are aborted.", self._service.num_answering)
            self.force_exit = True
        self.should_exit = True


def listen(host: str, port: int) -> socket.socket:
    """Bound before the model is loaded, so that a port in use is told at once; raises InvalidParameter."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        is_ipv6 = family == socket.AF_INET6
        return socket.create_server(address, family=family, backlog=BACKLOG, dualstack_ipv6=is_ipv6)
    except (OSError, OverflowError, ValueError) as error:
        raise InvalidParameter(f"--host {host} --port {port} cannot be used: {error}.") from error


def make_server(
    service: Service, api_keys: Iterable[str] = (), log_prompts: bool = False, sites: Sites = LOCAL
) -> DrainingServer:
    limits = service.limits
    config = uvicorn.Config(
        make_app(service, api_keys, log_prompts, sites),
        http=bounded_protocol(limits),
        loop="asyncio",  # uvloop holds the GIL while it writes, and a step waits for it
        ws="none",
        lifespan="on",
        log_config=None,
        log_level="warning",
        access_log=False,
        server_header=False,
        proxy_headers=False,
        backlog=BACKLOG,
        limit_concurrency=limits.max_connections,
        timeout_keep_alive=5,
        timeout_graceful_shutdown=1,  # nothing but idle connections is left when the server has drained
    )
    return DrainingServer(config, service)
