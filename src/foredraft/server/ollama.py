"""/api/chat, /api/generate, /api/tags and /api/version: Ollama's API, which many local tools speak. Streams are lines
of JSON, and an answer streams unless the client says otherwise."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import Any, ClassVar, Literal

from fastapi import APIRouter
from pydantic import ConfigDict, field_validator
from starlette.requests import Request
from starlette.responses import Response

from foredraft.answers import AnswerFormat, AnswerReader, Part
from foredraft.server import reports
from foredraft.server.bodies import BodyRoute, Many, RequestModel
from foredraft.server.constraint import Grammar, JsonSchema, ResponseFormat, grammar_of
from foredraft.server.errors import (
    OLLAMA_PATHS,
    ApiError,
    bad_request,
    error_object,
    json_bytes,
    json_response,
    not_supported,
)
from foredraft.server.fields import GenerationRequest, check_count
from foredraft.server.generation import Generation, Tokens, begin
from foredraft.server.messages import CalledFunction, ChatMessage, MessageToolCall, TemplateFields, conversation
from foredraft.server.service import Conversation, Prompt, Served, Service
from foredraft.server.sse import LINES, respond
from foredraft.server.status import VERSION
from foredraft.server.tools import ToolChoice, ToolRequest, choose
from foredraft.tool_calls import ToolCall

LATEST = ":latest"  # the tag that these clients give a name without one
router = APIRouter()
posts = APIRouter(route_class=BodyRoute)


class Options(RequestModel):
    """Unknown ones are kept, to tell the client that they are ignored."""

    model_config = ConfigDict(extra="allow")

    num_predict: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    stop: str | Many[str] | None = None
    repeat_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None


class OllamaRequest(GenerationRequest):
    """What both routes take. Many of Ollama's clients send JSON as a form (`curl -d`) or as nothing: it does not ask.
    What keeps the pages of others out is their origin (see sites.py)."""

    names_content_type: ClassVar[bool] = False

    options: Options | None = None
    format: str | Grammar | None = None
    keep_alive: Any = None  # the model stays as long as the server
    images: Many[str] | None = None
    think: bool | str | None = None

    @field_validator("model")
    @classmethod
    def _without_tag(cls, name: str | None) -> str | None:
        return None if name is None else name.removesuffix(LATEST)

    def unknown(self) -> list[str]:
        options = (self.options.model_extra or {}) if self.options else {}
        return [*super().unknown(), *(f"options.{name}" for name, value in options.items() if value is not None)]

    def check(self, service: Service) -> None:
        super().check(service)
        if self.images:
            raise not_supported("images", "this model reads texts only")

    @property
    def response_format(self) -> ResponseFormat | None:
        if not self.format:
            return None
        if isinstance(self.format, dict):
            schema = JsonSchema.model_validate({"schema": self.format})
            return ResponseFormat(type="json_schema", json_schema=schema)
        if self.format != "json":
            raise bad_request("format must be json or a JSON schema.", "format")
        return ResponseFormat(type="json_object")

    def others(self) -> tuple[int | None, dict[str, Any]]:
        """How many tokens are wanted, and the sampling parameters, both out of `options`."""
        given = (self.options or Options()).model_dump(include=set(Options.model_fields), exclude_none=True)
        wanted = given.pop("num_predict", None)
        if "repeat_penalty" in given:
            given["repetition_penalty"] = given.pop("repeat_penalty")
        return None if wanted is None or wanted < 0 else wanted, given  # below 0: no limit


class CalledTool(RequestModel):
    name: str
    arguments: dict[str, Any] | None = None


class ToolCallParam(RequestModel):
    function: CalledTool


class MessageParam(RequestModel):
    role: str
    content: str | None = None
    images: Many[str] | None = None
    tool_calls: Many[ToolCallParam] | None = None
    tool_name: str | None = None
    thinking: str | None = None


class ChatRequest(OllamaRequest):
    messages: Many[MessageParam]
    tools: Many[ToolRequest] | None = None


class GenerateRequest(OllamaRequest):
    prompt: str = ""
    suffix: str | None = None
    system: str | None = None
    raw: bool | None = None
    template: Literal[""] | None = None  # the template is the model's own
    context: Any = None


@posts.post("/api/chat")
async def chat(body: ChatRequest, request: Request, service: Served) -> Response:
    """Answer a conversation."""
    check_count(service.limits.max_messages, "messages", body.messages)
    if body.tools:
        check_count(service.limits.max_tools, "tools", body.tools)
    messages = [_message(message, place) for place, message in enumerate(body.messages)]
    prompt = conversation(service, messages, body.tools, _template_fields(body.think))
    return await _answer(body, request, service, prompt, choose(body.tools, None), "message")


@posts.post("/api/generate")
async def generate(body: GenerateRequest, request: Request, service: Served) -> Response:
    """Answer a prompt, fill a gap in front of `suffix`, or, with `raw`, continue a text."""
    if body.context is not None:
        raise not_supported("context", "send the whole conversation to /api/chat")
    ends: list[int] = []
    prompt: Prompt = body.prompt
    if body.suffix:
        prompt, ends = service.fill_in(body.prompt, body.suffix)
    elif not body.raw:
        system = [ChatMessage(role="system", content=body.system)] if body.system else []
        messages = [*system, ChatMessage(role="user", content=body.prompt)]
        prompt = conversation(service, messages, None, _template_fields(body.think))
    return await _answer(body, request, service, prompt, ToolChoice(), "response", ends)


async def _answer(
    body: OllamaRequest,
    request: Request,
    service: Service,
    prompt: Prompt,
    tools: ToolChoice,
    field: str,
    ends: list[int] | None = None,
) -> Response:
    wanted, others = body.others()
    if ends:
        others["stop_token_ids"] = [*(body.stop_token_ids or ()), *ends]
    grammar = grammar_of(body, body.response_format, tools)
    params = body.sampling_params(service, wanted, grammar=grammar, **others)
    generation = await begin(service, request, body, [prompt], params)
    is_answer = isinstance(prompt, Conversation)  # else the text is continued, and all of it is shown
    reader = tools.reader(generation.answer_format if is_answer else AnswerFormat())
    answer = OllamaAnswer(generation, service.name, reader, field, shows_thoughts=body.think is not False)
    return await respond(generation, answer, service.limits, body.stream is not False, LINES)


def _message(message: MessageParam, place: int) -> ChatMessage:
    if message.images:
        raise not_supported(f"images in messages[{place}]", "this model reads texts only")
    calls = [
        MessageToolCall(
            function=CalledFunction(name=call.function.name, arguments=json.dumps(call.function.arguments or {}))
        )
        for call in message.tool_calls or ()
    ]
    content = message.content if message.content is not None or calls else ""
    return ChatMessage(
        role=message.role,
        content=content,
        name=message.tool_name,
        tool_calls=calls or None,
        reasoning_content=message.thinking,
    )


def _template_fields(think: bool | str | None) -> TemplateFields:
    """Templates of models that can think read `enable_thinking`, as Qwen3's, or `reasoning_effort`, as gpt-oss's."""
    return TemplateFields(
        chat_template_kwargs=None if think is None else {"enable_thinking": bool(think)},
        reasoning_effort=think if isinstance(think, str) else None,
    )


@router.get("/api/tags")
async def tags(service: Served) -> Response:
    """The model that is served, by all its names."""
    told = {"modified_at": _time(service.started), "size": 0, "digest": ""}
    details = {
        "format": "gguf",
        "family": service.llm.model_config.architecture,
        "quantization_level": service.llm.dtype,
    }
    named = [{"name": name, "model": name, **told, "details": details} for name in service.names]
    return json_response({"models": named})


@router.get("/api/version")
async def version() -> Response:
    return json_response({"version": VERSION})


class OllamaAnswer:
    """A generation as Ollama writes it: lines whose `message` or `response` has a piece of the text."""

    def __init__(
        self, generation: Generation, model: str, reader: AnswerReader, field: str, shows_thoughts: bool
    ) -> None:
        self._generation = generation
        self._model = model
        self._reader = reader
        self._field = field
        self._shows_thoughts = shows_thoughts

    def body(self) -> dict[str, Any]:
        (output,) = self._generation.outputs.values()
        return {**self._part(self._reader.whole(output.text)), **self._end()}

    def begin(self) -> bytes:
        return b""

    def delta(self, tokens: Tokens) -> bytes:
        part = self._reader.feed("".join([token.text for its in tokens.values() for token in its]))
        return _line({**self._part(part), "done": False}) if part else b""

    def end(self) -> bytes:
        part = self._reader.end()
        rest = _line({**self._part(part), "done": False}) if part else b""
        return rest + _line({**self._part(Part()), **self._end()})

    def failure(self, error: ApiError) -> bytes:
        return _line(error_object(OLLAMA_PATHS, error))

    def _part(self, part: Part) -> dict[str, Any]:
        head = {"model": self._model, "created_at": _time()}
        thought = {"thinking": part.reasoning} if part.reasoning and self._shows_thoughts else {}
        if self._field != "message":
            return {**head, self._field: part.content, **thought}
        message: dict[str, Any] = {"role": "assistant", "content": part.content, **thought}
        if part.calls:
            message["tool_calls"] = [_call(call) for call in part.calls]
        return {**head, "message": message}

    def _end(self) -> dict[str, Any]:
        (output,) = self._generation.outputs.values()
        usage, metrics = reports.usage(self._generation), output.metrics
        first_s = metrics.time_to_first_token_s
        return {
            "done": True,
            "done_reason": "length" if output.finish_reason == "length" else "stop",
            "total_duration": _nanoseconds(metrics.total_time_s),
            "load_duration": 0,
            "prompt_eval_count": usage["prompt_tokens"],
            "prompt_eval_duration": _nanoseconds(first_s),
            "eval_count": usage["completion_tokens"],
            "eval_duration": _nanoseconds(metrics.total_time_s - first_s),
            "seed": output.seed,
            "metrics": reports.metrics(self._generation),
        }


def _call(call: ToolCall) -> dict[str, Any]:
    return {"function": {"name": call.name, "arguments": call.object}}


def _line(value: dict[str, Any]) -> bytes:
    return json_bytes(value) + b"\n"


def _nanoseconds(seconds: float) -> int:
    return max(0, round(seconds * 1e9))


def _time(seconds: float | None = None) -> str:
    moment = datetime.now(UTC) if seconds is None else datetime.fromtimestamp(seconds, UTC)
    return moment.isoformat().replace("+00:00", "Z")


router.include_router(posts)
