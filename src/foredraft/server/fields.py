"""The request fields that several APIs share, and the SamplingParams that they add up to."""

from __future__ import annotations

from collections.abc import Sized
from typing import Annotated, Any

from pydantic import WithJsonSchema

from foredraft.errors import ForedraftError
from foredraft.params import SamplingParams
from foredraft.proposers.registry import Spec
from foredraft.server.bodies import Many, RequestModel
from foredraft.server.errors import as_api_error, bad_request, not_supported
from foredraft.server.service import Service

# Its entries are checked by SamplingParams, once there are not too many of them.
LogitBias = Annotated[dict[str, Any], WithJsonSchema({"type": "object", "additionalProperties": {"type": "number"}})]


class GenerationRequest(RequestModel):
    """What every API that generates takes. Beside `temperature` and `top_p` these are extensions of this server."""

    model: str | None = None
    stream: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    ignore_eos: bool | None = None
    stop_token_ids: Many[int] | None = None
    acceptance: str | None = None
    cache_salt: str | None = None
    grammar: dict[str, Any] | None = None
    spec: str | None = None
    priority: int | None = None
    chat_template: Any = None


class StreamOptions(RequestModel):
    include_usage: bool | None = None


class OpenAISampling(GenerationRequest):
    """What /v1/completions and /v1/chat/completions have in common."""

    max_tokens: int | None = None
    n: int | None = None
    seed: int | None = None
    stop: str | Many[str] | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: LogitBias | None = None
    stream_options: StreamOptions | None = None
    user: str | None = None

    def sampling(self) -> dict[str, Any]:
        return {
            **sampling_fields(self),
            "n": self.n,
            "seed": self.seed,
            "stop": self.stop,
            "presence_penalty": self.presence_penalty,
            "frequency_penalty": self.frequency_penalty,
            "logit_bias": self.logit_bias,
        }

    @property
    def includes_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)


def sampling_fields(body: GenerationRequest) -> dict[str, Any]:
    """The fields of SamplingParams that every API has under the same names."""
    names = (
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        "repetition_penalty",
        "ignore_eos",
        "stop_token_ids",
        "acceptance",
        "cache_salt",
    )
    return {name: getattr(body, name) for name in names}


def make_params(service: Service, max_tokens: int | None, fields: dict[str, Any]) -> SamplingParams:
    """Checked against the operator's limits and the library's; raises ApiError with a sentence."""
    limits = service.limits
    most = min(limits.max_tokens, service.llm.max_model_len)
    if max_tokens is not None and not 1 <= max_tokens <= most:
        raise bad_request(f"max_tokens={_shown(max_tokens)} must be a whole number from 1 to {most}.", "max_tokens")
    _at_most(limits.max_stops, "stop", fields.get("stop"))
    _at_most(limits.max_logit_bias, "logit_bias", fields.get("logit_bias"))
    n = fields.get("n")
    if n is not None and not 1 <= n <= limits.max_n:
        raise bad_request(f"n={_shown(n)} must be a whole number from 1 to {limits.max_n}.", "n")
    try:
        return SamplingParams(max_tokens=most if max_tokens is None else max_tokens, **fields)
    except ForedraftError as error:
        raise as_api_error(error, 1) from error


def check_common(service: Service, body: GenerationRequest) -> int:
    """What holds for every API; returns the priority."""
    service.check_model(body.model)
    if body.chat_template is not None:
        raise not_supported("chat_template", "the template is the model's own")
    if body.priority and not service.honours_priority:
        raise not_supported("priority", "this server takes requests in the order of arrival")
    if not -(2**31) <= (body.priority or 0) < 2**31:
        raise bad_request("priority must be a whole number of at most 32 bits.", "priority")
    return body.priority or 0


def check_count(limit: int, name: str, values: Sized) -> None:
    if not 1 <= len(values) <= limit:
        raise bad_request(f"{name} has {len(values)} entries; there must be from 1 to {limit}.", name)


def check_stream_options(body: OpenAISampling) -> None:
    if body.stream_options is not None and not body.stream:
        raise bad_request("stream_options is only allowed with stream=true.", "stream_options")


def _at_most(limit: int, name: str, values: Any) -> None:
    if isinstance(values, list | dict) and len(values) > limit:
        raise bad_request(f"{name} has {len(values)} entries; at most {limit} are allowed.", name)


def _shown(number: int) -> str:
    return str(number) if abs(number) < 10**20 else "a number of very many digits"


def spec_of(service: Service, body: GenerationRequest) -> Spec:
    """The speculation of a request; raises ApiError for one that is none or that the operator does not allow."""
    try:
        return service.spec(body.spec)
    except ForedraftError as error:
        raise bad_request(str(error), "spec") from error
