"""From a loaded model to a listening server."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterable

import uvicorn

from foredraft.errors import InvalidParameter
from foredraft.server.app import make_app
from foredraft.server.lifecycle import DrainingServer
from foredraft.server.protocol import bounded_protocol
from foredraft.server.service import Service
from foredraft.server.sites import LOCAL, Sites

BACKLOG = 2048


def listen(host: str, port: int) -> socket.socket:
    """Bound before the model is loaded, so that a port in use is told at once; raises InvalidParameter."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
            listener.listen(BACKLOG)
        except OSError:
            listener.close()
            raise
    except (OSError, OverflowError) as error:
        raise InvalidParameter(f"--host {host} --port {port} cannot be used: {error}.") from error
    return listener


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
    return DrainingServer(config, service.lifecycle, limits.drain_timeout_s)


def serve(server: DrainingServer, listener: socket.socket, on_ready: Callable[[], None]) -> None:
    """Until a signal comes."""
    server.on_ready = on_ready
    server.run(sockets=[listener])
