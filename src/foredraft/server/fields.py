"""The request fields that several APIs share, and the SamplingParams that they add up to."""

from __future__ import annotations

from collections.abc import Sized
from typing import Annotated, Any

from pydantic import AfterValidator, Field, PrivateAttr, WithJsonSchema

from foredraft.errors import ForedraftError
from foredraft.params import MAX_SEED, MAX_WHOLE, SamplingParams
from foredraft.server.bodies import Body, Many, RequestModel
from foredraft.server.constraint import GrammarFields, grammar_of
from foredraft.server.errors import as_api_error, bad_request, not_supported
from foredraft.server.service import Service

# Its entries are checked by SamplingParams, once there are not too many of them.
LogitBias = Annotated[dict[str, Any], WithJsonSchema({"type": "object", "additionalProperties": {"type": "number"}})]


def _unsigned(seed: int) -> int:
    """OpenAI's seeds are signed; what is too small for that is refused as it is."""
    return seed & MAX_SEED if -MAX_SEED <= seed + 1 <= 0 else seed


Seed = Annotated[int, AfterValidator(_unsigned)]

_NO_LIMIT = (-1, -2)  # what clients of Ollama, llama.cpp and vLLM send as max_tokens for as much as there is


class GenerationRequest(GrammarFields, Body):
    """What every API that generates takes. Beside `temperature` and `top_p` these are extensions of this server."""

    stream: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    ignore_eos: bool | None = Field(default=None, description="whether the answer goes on behind the end of text")
    min_tokens: int | None = None
    stop_token_ids: Many[int] | None = None
    acceptance: str | None = Field(
        default=None, description="the rule that accepts draft tokens: match, rejection or block"
    )
    cache_salt: str | None = Field(
        None, description="requests with one salt share cached prompts and remembered answers"
    )
    spec: str | None = Field(default=None, description="the speculation of this request, such as auto, off or ngram")
    priority: int | None = Field(
        default=None, description="with --priority: of the requests that wait, the lowest runs first"
    )
    chat_template: Any = None

    _max_tokens: int | None = PrivateAttr(None)  # that the client wants, under whatever name

    def check(self, service: Service) -> None:
        super().check(service)
        if self.chat_template is not None:
            raise not_supported("chat_template", "the template is the model's own")
        if self.priority and not service.honours_priority:
            raise not_supported("priority", "this server takes requests in the order of arrival")
        if not -(2**31) <= (self.priority or 0) < 2**31:
            raise bad_request("priority must be a whole number of at most 32 bits.", "priority")

    def sampling_params(self, service: Service, max_tokens: int | None, **others: Any) -> SamplingParams:
        """The fields that SamplingParams has under the same names, and `others` in place of those that have another
        name or meaning here. Checked against the operator's limits and the library's; raises ApiError. More tokens
        than an answer can have are cut, and `cut_note` tells that."""
        names = type(self).model_fields.keys() & set(SamplingParams.names())
        given = {**{name: getattr(self, name) for name in names}, **others}
        if "grammar" not in others:
            given["grammar"] = grammar_of(self)
        limits = service.limits
        most = min(limits.max_tokens, service.llm.max_model_len)
        if max_tokens in _NO_LIMIT:
            max_tokens = None
        _in_range("max_tokens", max_tokens, MAX_WHOLE)
        self._max_tokens = max_tokens
        check_at_most(limits.max_stops, "stop", given.get("stop"))
        _in_range("n", given.get("n"), limits.max_n)
        try:
            return SamplingParams(**{**given, "max_tokens": most if max_tokens is None else min(max_tokens, most)})
        except ForedraftError as error:
            raise as_api_error(error, 1) from error

    def cut_note(self, service: Service, num_prompt_tokens: int) -> str | None:
        """What a client is told whose answer has less room than it wants."""
        room = min(service.limits.max_tokens, service.llm.max_model_len - num_prompt_tokens)
        if self._max_tokens is None or self._max_tokens <= room:
            return None
        return f"max_tokens={self._max_tokens} is cut to {room}"


class StreamOptions(RequestModel):
    include_usage: bool | None = None


class OpenAIRequest(GenerationRequest):
    """What /v1/completions and /v1/chat/completions have in common."""

    max_tokens: int | None = None
    n: int | None = None
    seed: Seed | None = None
    stop: str | Many[str] | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: LogitBias | None = None
    prompt_logprobs: int | None = Field(default=None, description="so many best tokens beside each token of the prompt")
    stream_options: StreamOptions | None = None
    user: str | None = None

    def check(self, service: Service) -> None:
        super().check(service)
        if self.stream_options is not None and not self.stream:
            raise bad_request("stream_options is only allowed with stream=true.", "stream_options")
        if self.prompt_logprobs is not None and self.stream:
            raise bad_request("prompt_logprobs is only allowed without stream=true.", "prompt_logprobs")

    @property
    def includes_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)


def check_count(limit: int, name: str, values: Sized) -> None:
    if not 1 <= len(values) <= limit:
        raise bad_request(f"{name} has {len(values)} entries; there must be from 1 to {limit}.", name)


def check_at_most(limit: int, name: str, values: Any) -> None:
    if isinstance(values, list | dict) and len(values) > limit:
        raise bad_request(f"{name} has {len(values)} entries; at most {limit} are allowed.", name)


def _in_range(name: str, number: int | None, most: int) -> None:
    if number is not None and not 1 <= number <= most:
        shown = str(number) if abs(number) < 10**20 else "a number of very many digits"
        raise bad_request(f"{name}={shown} must be a whole number from 1 to {most}.", name)
