"""Bodies that are too large, compressed, too slow, or divided too finely are refused before anything reads them as
JSON."""

from __future__ import annotations

import asyncio

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from foredraft.server.errors import ApiError, error_response
from foredraft.server.limits import Limits

_NODES = (b"[", b"{", b":")
_NO_STRUCTURE = bytes(set(range(256)) - set(b'",:[{'))


class BodyLimit:
    """Counts the bytes and the values of a body, and the time until its end."""

    def __init__(self, app: ASGIApp, limits: Limits) -> None:
        self._app = app
        self._limits = limits

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        try:
            if headers.get("content-encoding", "identity") != "identity":
                raise ApiError(415, "Compressed bodies are not taken; send the JSON as it is.")
            declared = headers.get("content-length", "0")
            if not declared.isdecimal() or int(declared) > self._limits.max_body_bytes:
                raise self._too_large()
            body = await self._read(receive)
            if body is None:  # the client has gone
                return
            self._check_values(body)
        except ApiError as error:
            await error_response(scope["path"], error)(scope, receive, send)
            return
        replayed = False

        async def replay() -> Message:
            nonlocal replayed
            if replayed:
                return await receive()
            replayed = True
            return {"type": "http.request", "body": body, "more_body": False}

        await self._app(scope, replay, send)

    async def _read(self, receive: Receive) -> bytes | None:
        body = bytearray()
        try:
            async with asyncio.timeout(self._limits.body_timeout_s):
                while True:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        return None
                    body += message.get("body", b"")
                    if len(body) > self._limits.max_body_bytes:
                        raise self._too_large()
                    if not message.get("more_body", False):
                        return bytes(body)
        except TimeoutError:
            seconds = self._limits.body_timeout_s
            raise ApiError(408, f"The body did not arrive within {seconds:g} seconds; send it faster.") from None

    def _check_values(self, body: bytes) -> None:
        """Nothing else runs while JSON is read, and that takes as long as there are values, not bytes."""
        limits = self._limits

        def fits(text: bytes) -> bool:
            return text.count(b",") <= limits.max_values and sum(map(text.count, _NODES)) <= limits.max_nodes

        if fits(body):  # the texts in it too
            return
        # What divides JSON, and the same characters between quotes: those of texts that hold some.
        without_escapes = body.replace(rb"\\", b"").replace(rb"\"", b"")
        structure = without_escapes.translate(None, _NO_STRUCTURE).replace(b'""', b"")
        num_texts = structure.count(b'"') // 2
        if num_texts > limits.max_values + limits.max_nodes or not fits(b"".join(structure.split(b'"')[::2])):
            raise ApiError(
                400,
                f"The body is too finely divided: at most {limits.max_values} values, and {limits.max_nodes} lists, "
                "objects and keys are allowed.",
            )

    def _too_large(self) -> ApiError:
        return ApiError(413, f"The body is larger than {self._limits.max_body_bytes} bytes; shorten the request.")
