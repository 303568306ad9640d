"""The application: routes, what stands in front of them, and how errors leave it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from foredraft.server import (
    anthropic_messages,
    docs_page,
    llama_server,
    ollama,
    ollama_models,
    openai_chat,
    openai_completions,
    openai_responses,
    page,
    status,
    tokenising,
)
from foredraft.server.auth import Auth, Gate
from foredraft.server.body_limit import BodyLimit
from foredraft.server.errors import ApiError, error_response, failure
from foredraft.server.generation import ClientGone
from foredraft.server.log import CLIENT_CLOSED, RequestLog, record_of
from foredraft.server.service import Service
from foredraft.server.sites import Sites, site_middleware


def make_app(
    service: Service, api_keys: Iterable[str] = (), log_prompts: bool = False, sites: Sites | None = None
) -> FastAPI:
    """The server for one model. Its engine ends with the application. Without `sites` nobody's Host and Origin are
    checked: a gateway has done it."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        yield
        await service.engine.close()

    app = FastAPI(
        title="Foredraft",
        version=status.VERSION,
        lifespan=lifespan,
        redirect_slashes=False,
        docs_url=None,  # it would load scripts from elsewhere; docs_page.py has our own
        redoc_url=None,
        responses=_RESPONSES,
        middleware=[  # the first is the first that a request meets
            Middleware(RequestLog, log_prompts=log_prompts),
            *(site_middleware(sites) if sites else ()),
            Middleware(Gate, check=Auth(api_keys).check),
            Middleware(HeadAsGet),
            Middleware(BodyLimit, limits=service.limits),
        ],
        exception_handlers=dict.fromkeys((ApiError, HTTPException, ClientGone, Exception), _answer_error),
    )
    app.state.service = service
    # Those that generate come first: routes are tried in turn, and these are in a hurry.
    routes = (openai_chat, openai_completions, openai_responses, anthropic_messages, llama_server, ollama, tokenising)
    for each in (*routes, ollama_models, status, docs_page, page):
        app.include_router(each.router)
    return app


class HeadAsGet:
    """Middleware that answers HEAD as it would answer GET: the protocol leaves out the body."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._app({**scope, "method": "GET"} if scope.get("method") == "HEAD" else scope, receive, send)


async def _answer_error(request: Request, error: Exception) -> Response:
    if isinstance(error, ClientGone):
        return Response(status_code=CLIENT_CLOSED)
    if isinstance(error, HTTPException):
        told = ApiError(error.status_code, _http_message(request.app, error))
    else:
        told = error if isinstance(error, ApiError) else failure()
    service = request.app.state.service
    service.metrics.count_refusal(told.status)
    record = record_of(request)
    record.fields["error"] = told.message[:200]
    response = error_response(request.url.path, told, record.id)
    if isinstance(error, HTTPException):
        response.headers.update(error.headers or {})
    return response


def _http_message(app: FastAPI, error: HTTPException) -> str:
    if error.status_code == 404:
        paths = [path for path in app.openapi()["paths"] if "{" not in path]  # made once, then kept
        return f"There is nothing at this path; there are {', '.join(paths)}."
    if error.status_code == 405:
        methods = (error.headers or {}).get("Allow", "other methods")
        return f"This path does not take this method; it takes {methods}."
    return str(error.detail)


_ERROR_SCHEMA = {"description": "An error in the shape of the API", "content": {"application/json": {}}}
_ERROR_CODES = (400, 401, 403, 404, 405, 408, 413, 415, 429, 503, 504)
_RESPONSES: dict[int | str, dict[str, Any]] = dict.fromkeys(_ERROR_CODES, _ERROR_SCHEMA)
