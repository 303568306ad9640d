"""Routes about the server itself: health, readiness, models, version, metrics."""

from __future__ import annotations

from importlib.metadata import version as installed_version
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from foredraft.server.errors import ApiError, json_response
from foredraft.server.service import Service, service_of

router = APIRouter()
VERSION = installed_version("foredraft")


@router.get("/health")
async def health(request: Request) -> Response:
    """200 while the engine can answer."""
    alive = service_of(request).engine.is_alive
    return json_response({"status": "ok" if alive else "dead"}, 200 if alive else 503)


@router.get("/ready")
async def ready(request: Request) -> Response:
    """200 while new requests are taken; 503 once the server is about to stop."""
    service = service_of(request)
    takes = service.engine.is_alive and not service.is_draining
    return json_response({"status": "ready" if takes else "draining"}, 200 if takes else 503)


@router.get("/version")
async def version() -> Response:
    return json_response({"version": VERSION})


@router.get("/metrics")
async def metrics(request: Request) -> Response:
    """Prometheus text format."""
    return Response(service_of(request).metrics.render(), media_type="text/plain; version=0.0.4; charset=utf-8")


@router.get("/v1/stats")
async def stats(request: Request) -> Response:
    """What the page shows of the server: the model, what requests may name, and the load at this moment."""
    service = service_of(request)
    load = service.engine.stats()
    return json_response(
        {
            "model": service.name,
            "max_model_len": service.llm.max_model_len,
            "max_tokens": min(service.limits.max_tokens, service.llm.max_model_len),
            "spec": service.llm.spec,
            "allowed_specs": service.specs.entries,
            "running": load.running,
            "waiting": load.waiting,
            "kv_use": load.kv_use,
            "steps": load.num_steps,
        }
    )


@router.get("/v1/models")
async def models(request: Request) -> Response:
    service = service_of(request)
    return json_response({"object": "list", "data": [_model(service, name) for name in service.names]})


@router.get("/v1/models/{name:path}")
async def model(name: str, request: Request) -> Response:
    service = service_of(request)
    if not service.has_name(name):
        raise ApiError(404, f"The model {name[:100]!r} is not served here.", "model", "model_not_found")
    return json_response(_model(service, name))


def _model(service: Service, name: str) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": service.started,
        "owned_by": "foredraft",
        "root": service.name,
        "max_model_len": service.llm.max_model_len,
    }
