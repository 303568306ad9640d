"""The gateway of a fleet: reads requests, hands each to a replica, and sends it to another one if that replica dies."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import AsyncIterator, Iterable
from functools import partial
from typing import Protocol

from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Mount, Route
from starlette.types import Message, Receive, Scope, Send

from foredraft.errors import Overloaded
from foredraft.integrations.ray_serve.forwarding import ForwardedRequest
from foredraft.integrations.ray_serve.options import FleetOptions
from foredraft.integrations.ray_serve.prefix_table import prefix_names
from foredraft.server.auth import Auth, Gate, key_of
from foredraft.server.body_limit import BodyLimit
from foredraft.server.errors import (
    ANTHROPIC_PATHS,
    ApiError,
    as_api_error,
    error_object,
    error_response,
    failure,
    json_response,
)
from foredraft.server.metrics import labelled
from foredraft.server.service import retry_after_s
from foredraft.server.sites import site_middleware
from foredraft.server.sse import DONE, event

log = logging.getLogger(__name__)

_ATTEMPTS = 3  # replicas that a request is handed to before its client is told
_LOST = "The replica that wrote this answer is gone; send the request again."


class ReplicaLost(Exception):
    """The replica died before its answer was complete."""


class Replicas(Protocol):
    """All replicas of a fleet, as a gateway sees them."""

    def forward(self, request: ForwardedRequest) -> AsyncIterator[list[Message]]:
        """The answer of the replica that suits best; raises ReplicaLost, and Overloaded when too many wait."""

    async def metrics(self) -> list[str]:
        """The page for Prometheus of every living replica."""

    async def num_ready(self) -> int:
        """Replicas that take requests."""


class Gateway:
    """The application between clients and replicas. It holds no model and no state that matters to an answer."""

    def __init__(self, replicas: Replicas, label: str, shares_answers: bool) -> None:
        self._replicas = replicas
        self._shares_answers = shares_answers
        self._recent_s: deque[float] = deque(maxlen=64)  # how long the last answers took
        self._registry = CollectorRegistry()
        own = partial(labelled, self._registry, {"gateway": label})
        self._num_replicas = own(Gauge, "foredraft:replicas", "Replicas that answered.")
        self._retried = own(Counter, "foredraft:requests_retried", "Requests handed to another replica.")
        self._lost = own(Counter, "foredraft:requests_lost", "Answers that a replica broke off.")
        self._refused = own(Counter, "foredraft:gateway_refused", "Requests that no replica had room for.")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The body is complete in the first message: BodyLimit sees to that."""
        body = (await receive()).get("body", b"")
        request = ForwardedRequest(
            method=scope["method"],
            path=scope["path"],
            query=scope.get("query_string", b""),
            headers=tuple((bytes(name), bytes(value)) for name, value in scope["headers"]),
            client=tuple(scope["client"]) if scope.get("client") else None,
            body=body,
            prefixes=prefix_names(body, key_of(scope), self._shares_answers) if scope["method"] == "POST" else (),
        )
        started = time.monotonic()
        try:
            await self._relay(request, send)
        except ApiError as error:
            await error_response(request.path, error)(scope, receive, send)
        else:
            self._recent_s.append(time.monotonic() - started)

    async def metrics(self, request: Request) -> Response:
        pages = await self._replicas.metrics()
        self._num_replicas.set(len(pages))
        page = merged([*pages, generate_latest(self._registry).decode()])
        return Response(page, media_type="text/plain; version=0.0.4; charset=utf-8")

    async def health(self, request: Request) -> Response:
        return json_response({"status": "ok"})

    async def ready(self, request: Request) -> Response:
        """200 while a replica takes requests."""
        count = await self._replicas.num_ready()
        return json_response({"status": "ready" if count else "no replica", "replicas": count}, 200 if count else 503)

    async def _relay(self, request: ForwardedRequest, send: Send) -> None:
        """Raises ApiError as long as nothing was sent. A client gets bytes of one replica only: what has begun is never
        begun again elsewhere."""
        for attempt in range(_ATTEMPTS):
            if attempt:
                self._retried.inc()
            start: Message | None = None
            try:
                async for messages in self._replicas.forward(request):
                    for message in messages:
                        start = start or message
                        await send(message)
                return
            except Overloaded as error:
                self._refused.inc()
                raise as_api_error(error, retry_after_s(self._recent_s)) from error
            except ReplicaLost:
                if start is not None:
                    self._lost.inc()
                    await _break_off(request.path, start, send)
                    return
        log.error("%d replicas died over a request to %s.", _ATTEMPTS, request.path)
        raise failure()


async def _break_off(path: str, start: Message, send: Send) -> None:
    """End a stream with an error event. Any other answer is cut: its length tells the client that it is incomplete."""
    if not dict(start["headers"]).get(b"content-type", b"").startswith(b"text/event-stream"):
        raise ReplicaLost(_LOST)
    error = error_object(path, ApiError(503, _LOST))
    if path.startswith(ANTHROPIC_PATHS):
        last = event(error, "error")
    elif path.startswith("/v1/responses"):
        last = event({**error["error"], "type": "error"}, "error")
    else:
        last = event(error) + DONE
    await send({"type": "http.response.body", "body": last, "more_body": False})


def merged(pages: Iterable[str]) -> str:
    """The metrics of all replicas as one page: the samples of all pages by family, as the text format wants it. Samples
    must differ in a label, such as `engine`, which names the replica."""
    families: dict[str, list[str]] = {}
    for page in pages:
        known, name = set(families), ""
        for line in page.splitlines():
            if line.startswith("# HELP "):
                name = line.split(" ", 3)[2]
            if not line.startswith("#") or name not in known:  # what a family is, is said once
                families.setdefault(name, []).append(line)
    return "".join(f"{line}\n" for lines in families.values() for line in lines)


def make_gateway(replicas: Replicas, options: FleetOptions, label: str) -> Starlette:
    """Hosts, origins, keys and bodies are checked here, so replicas get only what may pass."""
    gateway = Gateway(replicas, label, options.shares_answers)
    return Starlette(
        routes=[
            Route("/metrics", gateway.metrics),
            Route("/health", gateway.health),
            Route("/ready", gateway.ready),
            Mount("/", gateway),
        ],
        middleware=[
            *site_middleware(options.sites),
            Middleware(Gate, check=Auth(options.api_keys).check),
            Middleware(BodyLimit, limits=options.limits),
        ],
    )
