"""Routes about the server itself: health, readiness, models, version, metrics."""

from __future__ import annotations

from importlib.metadata import version as installed_version
from typing import Any

from fastapi import APIRouter
from starlette.responses import Response

from foredraft.server.errors import json_response
from foredraft.server.service import Served, Service

router = APIRouter()
VERSION = installed_version("foredraft")


@router.get("/health")
async def health(service: Served) -> Response:
    """200 while the engine can answer."""
    alive = service.engine.is_alive
    return json_response({"status": "ok" if alive else "dead"}, 200 if alive else 503)


@router.get("/ready")
async def ready(service: Served) -> Response:
    """200 while new requests are taken; 503 once the server is about to stop."""
    takes = service.engine.is_alive and not service.is_draining
    return json_response({"status": "ready" if takes else "draining"}, 200 if takes else 503)


@router.get("/version")
async def version() -> Response:
    return json_response({"version": VERSION})


@router.get("/metrics")
async def metrics(service: Served) -> Response:
    """Prometheus text format."""
    return Response(service.metrics.render(), media_type="text/plain; version=0.0.4; charset=utf-8")


@router.get("/v1/stats")
async def stats(service: Served) -> Response:
    """What the page shows of the server: the model, what requests may name, and the load at this moment."""
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
async def models(service: Served) -> Response:
    return json_response({"object": "list", "data": [_model(service, name) for name in service.names]})


@router.get("/v1/models/{name:path}")
async def model(name: str, service: Served) -> Response:
    service.check_model(name)
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
