"""/v1/chat/completions: conversations, answered."""

from __future__ import annotations

from typing import Any, Literal

from fastapi import APIRouter
from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from foredraft.answers import Part
from foredraft.models.tokenizer import Tokenizer
from foredraft.outputs import CompletionOutput, TokenEvent
from foredraft.params import MAX_LOGPROBS
from foredraft.server import reports
from foredraft.server.bodies import BodyRoute, Many, RequestModel
from foredraft.server.constraint import ResponseFormat, grammar_of
from foredraft.server.errors import bad_request, json_bytes
from foredraft.server.fields import OpenAIRequest, check_count
from foredraft.server.generation import Generation, begin
from foredraft.server.messages import ChatMessage, TemplateFields, TextPart, conversation, text_of
from foredraft.server.openai_completions import CompletionAnswer
from foredraft.server.reports import Logprobs
from foredraft.server.service import Served
from foredraft.server.sse import respond
from foredraft.server.tokenising import encode
from foredraft.server.tools import NamedTool, ToolChoice, ToolRequest, choose
from foredraft.tool_calls import ToolCall

PATH = "/v1/chat/completions"
_MARK = "\ue000"  # stands for the text of a content event; no name of a model and no id contains it
router = APIRouter(route_class=BodyRoute)


class PredictedContent(RequestModel):
    type: Literal["content"]
    content: str | Many[TextPart]


class ChatRequest(TemplateFields, OpenAIRequest):
    messages: Many[ChatMessage]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    response_format: ResponseFormat | None = None
    tools: Many[ToolRequest] | None = None
    tool_choice: str | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    prediction: PredictedContent | None = Field(default=None, description="the client's own draft of the answer")
    speculation_trace: bool | None = Field(
        default=None, description="whether chunks carry what was drafted and accepted"
    )


@router.post(PATH)
async def create_chat_completion(body: ChatRequest, request: Request, service: Served) -> Response:
    """Answer a conversation."""
    if body.speculation_trace and not body.stream:
        raise bad_request("speculation_trace is only allowed with stream=true.", "speculation_trace")
    check_count(service.limits.max_messages, "messages", body.messages)
    if body.tools:
        check_count(service.limits.max_tools, "tools", body.tools)
    choice = choose(body.tools, body.tool_choice)
    grammar = grammar_of(body, body.response_format, choice)
    if body.top_logprobs is not None and not body.logprobs:
        raise bad_request("top_logprobs needs logprobs=true.", "top_logprobs")
    top = (body.top_logprobs or 0) if body.logprobs else None
    if top is not None and not 0 <= top <= MAX_LOGPROBS:
        raise bad_request(f"top_logprobs must be a whole number from 0 to {MAX_LOGPROBS}.", "top_logprobs")
    wanted = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    predicted = None
    if body.prediction is not None:
        predicted = await encode(service, text_of(body.prediction.content, "prediction"), add_special_tokens=False)
    params = body.sampling_params(service, wanted, logprobs=top, grammar=grammar, prediction=predicted)
    prompt = conversation(service, body.messages, body.tools if choice.tools else None, body)
    generation = await begin(service, request, body, [prompt], params)
    logprobs = None if top is None else Logprobs(service.llm.tokenizer, top)
    traced = service.llm.tokenizer if body.speculation_trace else None
    answer = ChatAnswer(generation, service.name, logprobs, choice, body.includes_usage, traced)
    return await respond(generation, answer, service.limits, body.stream)


class ChatAnswer(CompletionAnswer):
    """A generation as /v1/chat/completions writes it: choices hold messages with thoughts, content and calls."""

    id_prefix, kind, chunk_kind = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def __init__(
        self,
        generation: Generation,
        model: str,
        logprobs: Logprobs | None,
        tools: ToolChoice,
        includes_usage: bool,
        traced: Tokenizer | None = None,
    ) -> None:
        super().__init__(generation, model, logprobs, includes_usage)
        self._tools = tools
        self._traced = traced  # the tokenizer, for requests that want to see what speculation did
        self._readers = [tools.reader(generation.answer_format) for _ in range(generation.num_choices)]
        self._num_calls = [0] * generation.num_choices
        self._frames: dict[tuple[int, str], tuple[bytes, bytes]] = {}  # of a choice's text events, around the text

    def body(self) -> dict[str, Any]:
        """The log probabilities of the prompt, which all choices share, stand beside them, as vLLM has it."""
        prompt_logprobs = reports.prompt_logprobs(self._generation, self._generation.outputs[0])
        return super().body() | ({} if prompt_logprobs is None else {"prompt_logprobs": prompt_logprobs})

    def _choice(self, index: int, output: CompletionOutput) -> dict[str, Any]:
        part = self._readers[index].whole(output.text)
        message: dict[str, Any] = {"role": "assistant", "content": part.content or (None if part.calls else "")}
        if part.reasoning:
            message["reasoning_content"] = part.reasoning
        if part.calls:
            message["tool_calls"] = [_call_object(call) for call in part.calls]
        return {
            "message": {**message, "refusal": None},
            "logprobs": self._logprobs.chat(output.logprobs or ()) if self._logprobs else None,
            "finish_reason": self._finish_reason(output, bool(part.calls)),
        }

    def begin(self) -> bytes:
        delta = {"role": "assistant", "content": ""}
        return b"".join(self._event([_part(index, delta)]) for index in range(len(self._readers)))

    def _chunk(self, index: int, tokens: list[TokenEvent]) -> bytes:
        text = "".join([token.text for token in tokens])
        output = tokens[-1].output
        reader = self._readers[index]
        part = reader.feed(text) if output is None else reader.whole(text)
        texts = _texts(part)
        chunk = b""
        logprobs = self._logprobs.chat(token.logprob for token in tokens) if self._logprobs else None
        steps = reports.speculation_trace(tokens, self._traced) if self._traced else []
        if logprobs or steps:
            first = _part(index, texts or {"content": ""}, logprobs)
            chunk = self._event([{**first, "speculation_trace": steps} if steps else first])
        else:
            chunk = b"".join([self._text_event(index, field, text) for field, text in texts.items()])
        for call in part.calls:
            delta = {"tool_calls": [{"index": self._num_calls[index], **_call_object(call)}]}
            self._num_calls[index] += 1
            chunk += self._event([_part(index, delta)])
        if output is not None:
            reason = self._finish_reason(output, self._num_calls[index] > 0)
            chunk += self._last_event({**_part(index, {}), "finish_reason": reason}, output)
        return chunk

    def _text_event(self, index: int, field: str, text: str) -> bytes:
        """What nearly all events of a stream are: only the text differs, so only the text is written as JSON anew."""
        if (index, field) not in self._frames:
            marked = self._event([_part(index, {field: _MARK})])
            head, _, tail = marked.partition(json_bytes(_MARK))
            self._frames[index, field] = head, tail
        head, tail = self._frames[index, field]
        return head + json_bytes(text) + tail

    def _finish_reason(self, output: CompletionOutput, has_calls: bool) -> str:
        reason = output.finish_reason
        return "tool_calls" if has_calls and reason == "stop" and not self._tools.named else reason


def _texts(part: Part) -> dict[str, str]:
    """The texts of a delta, by field: thoughts come before what is said."""
    told = {"reasoning_content": part.reasoning, "content": part.content}
    return {field: text for field, text in told.items() if text}


def _part(index: int, delta: dict[str, Any], logprobs: dict[str, Any] | None = None) -> dict[str, Any]:
    """The choice of a chunk."""
    return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": None}


def _call_object(call: ToolCall) -> dict[str, Any]:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
