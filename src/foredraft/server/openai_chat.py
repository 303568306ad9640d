"""/v1/chat/completions: conversations, answered."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from foredraft.models.tokenizer import Tokenizer
from foredraft.server import reports
from foredraft.server.bodies import BodyRoute, Many
from foredraft.server.constraint import ResponseFormat, grammar_of
from foredraft.server.errors import ApiError, bad_request, error_object, json_bytes
from foredraft.server.fields import OpenAISampling, check_count
from foredraft.server.generation import Generation, Tokens, begin
from foredraft.server.messages import ChatMessage, conversation
from foredraft.server.reports import Logprobs
from foredraft.server.service import service_of
from foredraft.server.sse import event, respond
from foredraft.server.tools import CallParser, NamedTool, ToolCall, ToolChoice, ToolRequest, choose
from foredraft.types import TokenEvent

PATH = "/v1/chat/completions"
_MARK = "\ue000"  # stands for the text of a content event; no name of a model and no id contains it
router = APIRouter(route_class=BodyRoute)


class ChatRequest(OpenAISampling):
    messages: Many[ChatMessage]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    response_format: ResponseFormat | None = None
    tools: Many[ToolRequest] | None = None
    tool_choice: str | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    speculation_trace: bool | None = None


@router.post(PATH)
async def create_chat_completion(body: ChatRequest, request: Request) -> Response:
    """Answer a conversation."""
    service = service_of(request)
    body.check_common(service)
    if body.speculation_trace and not body.stream:
        raise bad_request("speculation_trace is only allowed with stream=true.", "speculation_trace")
    check_count(service.limits.max_messages, "messages", body.messages)
    if body.tools:
        check_count(service.limits.max_tools, "tools", body.tools)
    choice = choose(body.tools, body.tool_choice)
    grammar = grammar_of(body.grammar, body.response_format, choice)
    top = _top_logprobs(body)
    wanted = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    params = body.sampling_params(service, wanted, logprobs=top, grammar=grammar)
    prompt = conversation(service, body.messages, body.tools if choice.tools else None)
    generation = await begin(service, request, body, [prompt], params)
    logprobs = None if top is None else Logprobs(service.llm.tokenizer, top)
    traced = service.llm.tokenizer if body.speculation_trace else None
    answer = ChatAnswer(generation, service.name, logprobs, choice, body.includes_usage, traced)
    return await respond(generation, answer, service.limits, body.stream)


def _top_logprobs(body: ChatRequest) -> int | None:
    if body.top_logprobs is not None and not body.logprobs:
        raise bad_request("top_logprobs needs logprobs=true.", "top_logprobs")
    return (body.top_logprobs or 0) if body.logprobs else None


class ChatAnswer:
    """A generation as /v1/chat/completions writes it."""

    def __init__(
        self,
        generation: Generation,
        model: str,
        logprobs: Logprobs | None,
        tools: ToolChoice,
        includes_usage: bool,
        traced: Tokenizer | None = None,
    ) -> None:
        self._generation = generation
        self._logprobs = logprobs
        self._tools = tools
        self._includes_usage = includes_usage
        self._traced = traced  # the tokenizer, for requests that want to see what speculation did
        self._parsers = [CallParser(tools) for _ in range(generation.num_choices)]
        self._num_calls = [0] * generation.num_choices
        self._frames: dict[int, tuple[bytes, bytes]] = {}  # of a choice's content events, around the text
        self._id, self._created, self._model = f"chatcmpl-{generation.id}", generation.created, model

    def body(self) -> dict[str, Any]:
        return {**self._head("chat.completion"), "choices": self._choices(), **reports.totals(self._generation)}

    def _choices(self) -> Iterator[dict[str, Any]]:
        for index, output in sorted(self._generation.outputs.items()):
            parser = self._parsers[index]
            pieces = (parser.feed(output.text), parser.end())
            content = "".join(text for text, _ in pieces)
            calls = [call for _, its in pieces for call in its]
            message: dict[str, Any] = {"role": "assistant", "content": content or (None if calls else "")}
            if calls:
                message["tool_calls"] = [_call_object(call) for call in calls]
            yield {
                "index": index,
                "message": {**message, "refusal": None},
                "logprobs": self._logprobs.chat(output.logprobs or ()) if self._logprobs else None,
                "finish_reason": self._finish_reason(output.finish_reason, bool(calls)),
                "stop_reason": output.stop_reason,
                "seed": output.seed,
            }

    def begin(self) -> bytes:
        delta = {"role": "assistant", "content": ""}
        return b"".join(self._event([self._choice(index, delta)]) for index in range(len(self._parsers)))

    def delta(self, tokens: Tokens) -> bytes:
        return b"".join([chunk for index, its in tokens.items() for chunk in self._chunks(index, its)])

    def _chunks(self, index: int, tokens: list[TokenEvent]) -> list[bytes]:
        text = "".join([token.text for token in tokens])
        output = tokens[-1].output
        content, calls = self._parsers[index].feed(text)
        if output is not None:
            rest, more = self._parsers[index].end()
            content, calls = content + rest, calls + more
        chunks = []
        logprobs = self._logprobs.chat(token.logprob for token in tokens) if self._logprobs else None
        steps = reports.speculation_trace(tokens, self._traced) if self._traced else []
        if logprobs or steps:
            first = self._choice(index, {"content": content}, logprobs)
            chunks.append(self._event([{**first, "speculation_trace": steps} if steps else first]))
        elif content:
            chunks.append(self._content_event(index, content))
        for call in calls:
            delta = {"tool_calls": [{"index": self._num_calls[index], **_call_object(call)}]}
            self._num_calls[index] += 1
            chunks.append(self._event([self._choice(index, delta)]))
        if output is not None:
            last = self._choice(index, {})
            last["finish_reason"] = self._finish_reason(output.finish_reason, self._num_calls[index] > 0)
            last |= {"stop_reason": output.stop_reason, "seed": output.seed}
            extra = {"metrics": reports.metrics(self._generation)} if self._generation.is_complete else {}
            chunks.append(self._event([last], **extra))
        return chunks

    def end(self) -> bytes:
        usage = self._event([], **reports.totals(self._generation)) if self._includes_usage else b""
        return usage + b"data: [DONE]\n\n"

    def failure(self, error: ApiError) -> bytes:
        return event(error_object(PATH, error)) + b"data: [DONE]\n\n"

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self._id, "object": kind, "created": self._created, "model": self._model}

    def _event(self, choices: list[dict[str, Any]], **extra: Any) -> bytes:
        return event({**self._head("chat.completion.chunk"), "choices": choices, **extra})

    def _content_event(self, index: int, content: str) -> bytes:
        """What nearly all events of a stream are: only the text differs, so only the text is written as JSON anew."""
        if index not in self._frames:
            marked = self._event([self._choice(index, {"content": _MARK})])
            head, _, tail = marked.partition(json_bytes(_MARK))
            self._frames[index] = head, tail
        head, tail = self._frames[index]
        return head + json_bytes(content) + tail

    def _choice(self, index: int, delta: dict[str, Any], logprobs: dict[str, Any] | None = None) -> dict[str, Any]:
        return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": None}

    def _finish_reason(self, reason: str, has_calls: bool) -> str:
        return "tool_calls" if has_calls and reason == "stop" and not self._tools.named else reason


def _call_object(call: ToolCall) -> dict[str, Any]:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
