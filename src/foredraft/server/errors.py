"""Every error in the shape of the API that the client speaks. Messages tell nothing about this machine."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

from starlette.responses import Response

from foredraft.errors import ForedraftError, InvalidModel, InvalidPrompt, Overloaded
from foredraft.params import SamplingParams

ANTHROPIC_PATHS = "/v1/messages"
OLLAMA_PATHS = "/api/"
_COMMON_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
}
_OPENAI_TYPES = _COMMON_TYPES | dict.fromkeys((500, 503, 504), "server_error")
_ANTHROPIC_TYPES = _COMMON_TYPES | {
    413: "request_too_large",
    500: "api_error",
    503: "overloaded_error",
    504: "timeout_error",
}
_INVALID = "invalid_request_error"
_ENCODER = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"))  # json.dumps would make one for every event
_FIELD = re.compile(r"^(\w+)[= ]")  # how the messages of SamplingParams begin


@dataclass(eq=False)
class ApiError(Exception):
    """What a client is told instead of an answer."""

    status: int
    message: str
    param: str | None = None
    code: str | None = None
    retry_after_s: int | None = None

    def __str__(self) -> str:
        return self.message


def bad_request(message: str, param: str | None = None) -> ApiError:
    return ApiError(400, message, param)


def not_supported(what: str, remedy: str, param: str | None = None) -> ApiError:
    """Of a field, or of something in one that `param` names."""
    return ApiError(400, f"{what} is not supported here; {remedy}.", param or what, "unsupported_parameter")


def failure() -> ApiError:
    return ApiError(500, "The server failed while it answered this request; its log says why.")


def failure_of(message: str | None) -> ApiError:
    """Of an answer that ended with an error: the client hears what is wrong with a field of its request, and nothing of
    what is wrong here."""
    return bad_request(message, field) if message and (field := _named_field(message)) else failure()


def as_api_error(error: ForedraftError, retry_after_s: int) -> ApiError:
    """The library's sentence for the client; of the operator's files it hears nothing."""
    message = str(error)
    if isinstance(error, Overloaded):
        return ApiError(429, message, code="rate_limit_exceeded", retry_after_s=retry_after_s)
    if isinstance(error, InvalidModel):
        return failure()
    if isinstance(error, InvalidPrompt):
        code = "context_length_exceeded" if "tokens" in message and "allowed" not in message else None
        return ApiError(400, message, code=code)
    return bad_request(message, _named_field(message))


def _named_field(message: str) -> str | None:
    found = _FIELD.match(message)
    return found[1] if found and found[1] in {*SamplingParams.names(), "spec"} else None


def error_object(path: str, error: ApiError, request_id: str = "") -> dict[str, Any]:
    """The body of an error response, and what an error in the middle of a stream carries."""
    if path.startswith(ANTHROPIC_PATHS):
        kind = _ANTHROPIC_TYPES.get(error.status, _INVALID)
        return {"type": "error", "error": {"type": kind, "message": error.message}, "request_id": request_id}
    if path.startswith(OLLAMA_PATHS):
        return {"error": error.message}
    kind = _OPENAI_TYPES.get(error.status, _INVALID)
    return {"error": {"message": error.message, "type": kind, "param": error.param, "code": error.code}}


def json_bytes(value: Any) -> bytes:
    """JSON that is valid UTF-8, whatever surrogates a client sent."""
    return _ENCODER.encode(value).encode("utf-8", "replace")


def json_response(value: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(json_bytes(value), status, headers, media_type="application/json")


def error_response(path: str, error: ApiError, request_id: str = "") -> Response:
    headers = {} if error.retry_after_s is None else {"retry-after": str(error.retry_after_s)}
    if error.status == 401:
        headers["www-authenticate"] = "Bearer"
    return json_response(error_object(path, error, request_id), error.status, headers)
