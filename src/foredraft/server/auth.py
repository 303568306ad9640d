"""Who may use the server: everybody, or whoever sends one of the keys; and which key a request has."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Callable, Iterable

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from foredraft.server.errors import ApiError, error_response

# Probes carry no key, and neither does a browser that opens the page. Paths are compared whole, as they are routed.
OPEN_PATHS = frozenset({"/", "/health", "/ready"})
OPEN_FOLDER = "/static/"
_KEY = "foredraft.key"


class Gate:
    """Middleware that lets an HTTP request through unless `check` raises an ApiError, which is then the answer."""

    def __init__(self, app: ASGIApp, check: Callable[[Scope], None]) -> None:
        self._app = app
        self._check = check

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        app = self._app
        if scope["type"] == "http":
            try:
                self._check(scope)
            except ApiError as error:
                app = error_response(scope["path"], error)
        await app(scope, receive, send)


class Auth:
    """Wants one of the keys as `Authorization: Bearer` or `x-api-key`, where there are keys."""

    def __init__(self, keys: Iterable[str]) -> None:
        self._digests = [_digest(key.encode("utf-8", "surrogateescape")) for key in keys]

    def check(self, scope: Scope) -> None:
        scope[_KEY] = self._place_of_key(Headers(scope=scope))
        path = scope["path"]
        is_open = not self._digests or path in OPEN_PATHS or path.startswith(OPEN_FOLDER)
        if scope[_KEY] is None and not is_open:
            raise ApiError(
                401,
                "The API key is missing or wrong; send it as 'Authorization: Bearer KEY' or 'x-api-key: KEY'.",
                code="invalid_api_key",
            )

    def _place_of_key(self, headers: Headers) -> int | None:
        scheme, _, bearer = headers.get("authorization", "").partition(" ")
        given = [bearer.strip()] if scheme.lower() == "bearer" else []
        given.append(headers.get("x-api-key", ""))
        # Headers are bytes that were read as Latin-1. There is no early end: the time tells neither which key nor which
        # character differs.
        digests = [_digest(key.encode("latin-1")) for key in given]
        matches = [[hmac.compare_digest(digest, known) for digest in digests] for known in self._digests]
        return next((place for place, found in enumerate(matches) if any(found)), None)


def key_of(scope: Scope) -> int | None:
    """The place of a request's key among the operator's; None where it needs none. It tells requests of different keys
    apart, and nothing about the keys."""
    key: int | None = scope[_KEY]
    return key


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
