"""/api/tags, /api/show, /api/ps and /api/version: what Ollama's clients ask about the model before they use it."""

from __future__ import annotations

import hashlib
from datetime import UTC, datetime, timedelta
from math import prod
from typing import Any, ClassVar

from fastapi import APIRouter
from pydantic import field_validator
from starlette.requests import Request
from starlette.responses import Response

from foredraft.models.shapes import required_shapes
from foredraft.server.bodies import Body, BodyRoute
from foredraft.server.errors import json_response
from foredraft.server.service import Served, Service

LATEST = ":latest"  # the tag that these clients give a name without one
# Of Ollama's API and not our own: GitHub Copilot refuses what is older than 0.6.4, and `think` came with 0.9.0.
API_VERSION = "0.9.0"
_BITS = {"float32": 32.0, "bfloat16": 16.0, "int8": 8.5, "int4": 5.0}  # of a weight, with its share of scales
_FOREVER = timedelta(days=365 * 100)  # clients show what lies this far ahead as no end at all
router = APIRouter()
posts = APIRouter(route_class=BodyRoute)


class OllamaBody(Body):
    """What Ollama's routes have in common. Many of its clients send JSON as a form (`curl -d`) or as nothing: it does
    not ask. What keeps the pages of others out is their origin (see sites.py)."""

    names_content_type: ClassVar[bool] = False

    @field_validator("model")
    @classmethod
    def _without_tag(cls, name: str | None) -> str | None:
        return None if name is None else name.removesuffix(LATEST)


class ShowRequest(OllamaBody):
    verbose: bool | None = None  # there is no more to tell


@posts.post("/api/show")
async def show(body: ShowRequest, request: Request, service: Served) -> Response:
    """What is known of the model."""
    template = service.llm.tokenizer.chat_template or ""
    defaults = service.llm.engine.generation_defaults
    return json_response(
        {
            "modelfile": f"FROM {service.name}\n",
            "parameters": "\n".join(f"{name} {value}" for name, value in defaults.items()),
            "template": template,
            "details": _details(service),
            "model_info": _model_info(service),
            "capabilities": _capabilities(service, template),
            "modified_at": time_text(service.started),
        }
    )


@router.get("/api/tags")
async def tags(service: Served) -> Response:
    """The model that is served, by all its names."""
    return json_response(
        {"models": [{**_listed(service, name), "modified_at": time_text(service.started)} for name in service.names]}
    )


@router.get("/api/ps")
async def running(service: Served) -> Response:
    """The same model: it is loaded as long as the server runs."""
    listed = _listed(service, service.name)
    loaded = {
        **listed,
        "expires_at": time_text(service.started, _FOREVER),
        "size_vram": 0 if service.llm.device == "cpu" else listed["size"],
        "context_length": service.llm.max_model_len,
    }
    return json_response({"models": [loaded]})


@router.get("/api/version")
async def version() -> Response:
    """The version of Ollama's API that is spoken here; our own is at /version."""
    return json_response({"version": API_VERSION})


def time_text(seconds: float | None = None, later: timedelta = timedelta()) -> str:
    """As Ollama writes it; without `seconds` it is now."""
    moment = datetime.now(UTC) if seconds is None else datetime.fromtimestamp(seconds, UTC)
    return (moment + later).isoformat().replace("+00:00", "Z")


def _listed(service: Service, name: str) -> dict[str, Any]:
    """The digest tells models apart. It is made from what describes the weights: they may be gigabytes."""
    config, dtype = service.llm.model_config, service.llm.dtype
    return {
        "name": name,
        "model": name,
        "size": round(_num_parameters(service) * _BITS[dtype] / 8),
        "digest": hashlib.sha256(repr((service.name, config, dtype)).encode()).hexdigest(),
        "details": _details(service),
    }


def _details(service: Service) -> dict[str, Any]:
    family, count = service.llm.model_config.architecture, _num_parameters(service)
    unit, letter = (1e9, "B") if count >= 1e9 else (1e6, "M")
    return {
        "parent_model": "",
        "format": "gguf",
        "family": family,
        "families": [family],
        "parameter_size": f"{count / unit:.{1 if letter == 'B' else 2}f}{letter}",
        "quantization_level": service.llm.dtype,
    }


def _model_info(service: Service) -> dict[str, Any]:
    """Under the names that GGUF has for it."""
    config = service.llm.model_config
    return {
        "general.architecture": config.architecture,
        "general.parameter_count": _num_parameters(service),
        **{
            f"{config.architecture}.{name}": value
            for name, value in {
                "context_length": service.llm.max_model_len,
                "block_count": config.num_layers,
                "embedding_length": config.hidden_size,
                "feed_forward_length": config.intermediate_size,
                "attention.head_count": config.num_heads,
                "attention.head_count_kv": config.num_kv_heads,
                "vocab_size": config.vocab_size,
            }.items()
        },
    }


def _capabilities(service: Service, template: str) -> list[str]:
    """Tools need conversations, and a model whose template has no place for them gets them in its system prompt."""
    has = {
        "completion": True,
        "tools": bool(template),
        "insert": service.fills_in,
        "thinking": "enable_thinking" in template,
    }
    return [name for name, is_there in has.items() if is_there]


def _num_parameters(service: Service) -> int:
    return sum(prod(shape) for _, shape in required_shapes(service.llm.model_config))


router.include_router(posts)
