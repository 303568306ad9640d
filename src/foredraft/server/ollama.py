"""/api/chat and /api/generate: Ollama's API, which many local tools speak. Streams are lines of JSON, and an answer
streams unless the client says otherwise."""

from __future__ import annotations

import json
from typing import Any, Literal

from fastapi import APIRouter
from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from foredraft.answers import AnswerFormat, AnswerReader, Part
from foredraft.server import reports
from foredraft.server.bodies import BodyRoute, Many, RequestModel
from foredraft.server.constraint import Grammar, ResponseFormat, grammar_of
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
from foredraft.server.ollama_models import OllamaBody, time_text
from foredraft.server.service import Conversation, Prompt, Served, Service
from foredraft.server.sse import LINES, respond
from foredraft.server.tools import ToolChoice, ToolRequest, choose
from foredraft.tool_calls import ToolCall

router = APIRouter(route_class=BodyRoute)


class Options(RequestModel):
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


class OllamaRequest(OllamaBody, GenerationRequest):
    """What both routes take."""

    options: Options | None = None
    format: str | Grammar | None = None
    keep_alive: Any = Field(default=None, description="without effect: the model stays as long as the server")
    images: Many[str] | None = None
    think: bool | str | None = None

    def check(self, service: Service) -> None:
        super().check(service)
        if self.images:
            raise not_supported("images", "this model reads texts only")

    @property
    def response_format(self) -> ResponseFormat | None:
        if not self.format:
            return None
        if isinstance(self.format, dict):
            return ResponseFormat.model_validate({"type": "json_object", "schema": self.format})
        if self.format != "json":
            raise bad_request("format must be json or a JSON schema.", "format")
        return ResponseFormat(type="json_object")

    def others(self) -> tuple[int | None, dict[str, Any]]:
        """How many tokens are wanted, and the sampling parameters, both out of `options`."""
        given = (self.options or Options()).model_dump(exclude_none=True)
        wanted = given.pop("num_predict", None)
        if "repeat_penalty" in given:
            given["repetition_penalty"] = given.pop("repeat_penalty")
        return wanted, given


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
    prompt: str | None = None
    suffix: str | None = None
    system: str | None = None
    raw: bool | None = None
    template: Literal[""] | None = None  # the template is the model's own
    context: Any = None


@router.post("/api/chat")
async def chat(body: ChatRequest, request: Request, service: Served) -> Response:
    """Answer a conversation; one without messages asks for the model to be loaded, which it is."""
    if not body.messages:
        return _loaded(body, service, {"message": {"role": "assistant", "content": ""}})
    check_count(service.limits.max_messages, "messages", body.messages)
    if body.tools:
        check_count(service.limits.max_tools, "tools", body.tools)
    messages = [_message(message, place) for place, message in enumerate(body.messages)]
    prompt = conversation(service, messages, body.tools, _template_fields(body.think))
    return await _answer(body, request, service, prompt, choose(body.tools, None), "message")


@router.post("/api/generate")
async def generate(body: GenerateRequest, request: Request, service: Served) -> Response:
    """Answer a prompt, fill a gap in front of `suffix`, or, with `raw`, continue a text. Without either the model is
    to be loaded, which it is."""
    if body.context is not None:
        raise not_supported("context", "send the whole conversation to /api/chat")
    if not body.prompt and not body.suffix:
        return _loaded(body, service, {"response": ""})
    ends: list[int] = []
    text = body.prompt or ""
    prompt: Prompt = text
    if body.suffix:
        prompt, ends = service.fill_in(text, body.suffix)
    elif not body.raw:
        system = [ChatMessage(role="system", content=body.system)] if body.system else []
        messages = [*system, ChatMessage(role="user", content=text)]
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
    # With 0 the prompt is computed ahead: the answer is empty.
    params = body.sampling_params(service, 1 if wanted == 0 else wanted, grammar=grammar, **others)
    generation = await begin(service, request, body, [prompt], params)
    is_answer = isinstance(prompt, Conversation)  # else the text is continued, and all of it is shown
    reader = tools.reader(generation.answer_format if is_answer else AnswerFormat())
    shows_thoughts = body.think is not False
    answer = OllamaAnswer(generation, service.name, reader, field, shows_thoughts, has_content=wanted != 0)
    return await respond(generation, answer, service.limits, body.stream is not False, LINES)


def _loaded(body: OllamaRequest, service: Service, empty: dict[str, Any]) -> Response:
    """The model neither comes nor goes. One object, in a stream too, as Ollama has it."""
    reason = "unload" if body.keep_alive in (0, "0", "0s", "0m", "0h") else "load"
    head = {"model": service.name, "created_at": time_text()}
    return json_response({**head, **empty, "done": True, "done_reason": reason})


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


class OllamaAnswer:
    """A generation as Ollama writes it: lines whose `message` or `response` has a piece of the text."""

    def __init__(
        self,
        generation: Generation,
        model: str,
        reader: AnswerReader,
        field: str,
        shows_thoughts: bool,
        has_content: bool,
    ) -> None:
        self._generation = generation
        self._model = model
        self._reader = reader
        self._field = field
        self._shows_thoughts = shows_thoughts
        self._has_content = has_content

    def body(self) -> dict[str, Any]:
        (output,) = self._generation.outputs.values()
        return {**self._part(self._reader.whole(output.text if self._has_content else "")), **self._end()}

    def begin(self) -> bytes:
        return b""

    def delta(self, tokens: Tokens) -> bytes:
        if not self._has_content:
            return b""
        part = self._reader.feed("".join([token.text for its in tokens.values() for token in its]))
        return _line({**self._part(part), "done": False}) if part else b""

    def end(self) -> bytes:
        part = self._reader.end()
        rest = _line({**self._part(part), "done": False}) if part else b""
        return rest + _line({**self._part(Part()), **self._end()})

    def failure(self, error: ApiError) -> bytes:
        return _line(error_object(OLLAMA_PATHS, error))

    def _part(self, part: Part) -> dict[str, Any]:
        head = {"model": self._model, "created_at": time_text()}
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
            "eval_count": usage["completion_tokens"] if self._has_content else 0,
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
