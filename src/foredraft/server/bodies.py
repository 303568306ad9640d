"""Bodies as requests: JSON that is read and checked in one place, up to the first thing that is wrong with it.

FastAPI alone would tell everything that is wrong: of a list of a million elements a million errors.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass
from email.message import Message
from typing import Annotated, Any, ClassVar, TypeVar, get_type_hints

from fastapi.routing import APIRoute
from pydantic import BaseModel, ConfigDict, GetCoreSchemaHandler, PrivateAttr, ValidationError
from pydantic_core import CoreSchema
from starlette.requests import Request
from starlette.responses import Response

from foredraft.server.errors import ApiError, bad_request
from foredraft.server.log import record_of
from foredraft.server.service import Service, service_of

_T = TypeVar("_T")
_Model = TypeVar("_Model", bound="Body")


@dataclass(frozen=True)
class _UpToTheFirstFault:
    """pydantic's FailFast, which cannot be a part of a union because it has no hash."""

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return {**handler(source), "fail_fast": True}


Many = Annotated[list[_T], _UpToTheFirstFault()]  # what requests have instead of lists


_PLAIN_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")  # of a field that a header may name
_MOST_NAMED = 20
IGNORED_HEADER = "x-foredraft-ignored"


class RequestModel(BaseModel):
    """Types are strict: "5" is no number. Fields that nobody here knows are ignored, as clients send many; `read` notes
    which."""

    model_config = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False, protected_namespaces=())


class Body(RequestModel):
    """What a whole body has."""

    names_content_type: ClassVar[bool] = True  # whether its clients say that it is JSON

    model: str | None = None

    _unknown: list[str] = PrivateAttr(default_factory=list)

    @property
    def ignored(self) -> list[str]:
        """The fields that nobody here knows, as they can be shown: `name`, or `name.of.a.part`."""
        shown = [name if _PLAIN_NAME.fullmatch(name) else "?" for name in self._unknown[:_MOST_NAMED]]
        return shown if len(self._unknown) <= _MOST_NAMED else [*shown, "..."]

    def check(self, service: Service) -> None:
        """Raises ApiError with a sentence; called before a handler gets the body."""
        service.check_model(self.model)
        if service.is_strict and (ignored := self.ignored):
            raise ApiError(
                400,
                f"The body has fields that this server does not know: {', '.join(ignored)}; leave them out.",
                ignored[0],
                "unknown_parameter",
            )


class BodyRoute(APIRoute):
    """A route whose handler takes `body`, a Body, `request` and `service`."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        endpoint, model = self.endpoint, get_type_hints(self.endpoint)["body"]

        async def handle(request: Request) -> Response:
            body = read(await request.body(), request.headers.get("content-type", ""), model)
            service = await service_of(request)
            if ignored := body.ignored:
                record_of(request).headers[IGNORED_HEADER] = ", ".join(ignored)
            body.check(service)
            response = await endpoint(body=body, request=request, service=service)
            assert isinstance(response, Response)
            return response

        return handle


def read(data: bytes, content_type: str, model: type[_Model]) -> _Model:
    """Raises ApiError with a sentence about the first thing that is wrong."""
    if model.names_content_type and not _is_json(content_type):
        named = f"the content type {content_type[:100]!r}" if content_type else "no content type"
        raise bad_request(f"The request has {named}; send JSON with the content type application/json.")
    try:
        value = json.loads(data)
    except json.JSONDecodeError as error:
        raise bad_request(f"The body is not valid JSON, at character {error.pos}.") from None
    except UnicodeDecodeError:
        raise bad_request("The body is not valid JSON: send UTF-8.") from None
    except RecursionError:
        raise bad_request("The body is nested too deeply.") from None
    except ValueError:  # Python reads no more than some thousands
        raise bad_request("The body has a number of too many digits.") from None
    if not isinstance(value, dict):
        raise bad_request("The body must be a JSON object.")
    try:
        body = model.model_validate(value)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        place = [str(part) for part in first["loc"]]
        raise bad_request(f"{'.'.join(place)[:200]}: {first['msg']}.", place[0][:200]) from None
    body._unknown = sorted(set(_unknown(body, value)))
    return body


def _unknown(made: Any, given: Any) -> Iterator[str]:
    """The fields of `given` that the models made of it do not have: null asks for nothing. All entries of a list are of
    one kind, and only some kinds can have fields."""
    if isinstance(made, RequestModel):
        names = {field.alias or name: name for name, field in type(made).model_fields.items()}
        for name, value in given.items():
            if name in names:
                for inner in _unknown(getattr(made, names[name]), value):
                    yield f"{name}.{inner}"
            elif value is not None:
                yield name
    elif isinstance(made, list) and made and isinstance(made[0], RequestModel):
        for each, value in zip(made, given, strict=True):
            yield from _unknown(each, value)


def _is_json(content_type: str) -> bool:
    header = Message()
    header["content-type"] = content_type
    kind, _, subkind = header.get_content_type().partition("/")
    return kind == "application" and (subkind == "json" or subkind.endswith("+json"))
