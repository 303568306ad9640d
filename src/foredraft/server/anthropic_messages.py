"""/v1/messages: Anthropic's API, for texts and tools and without state."""

from __future__ import annotations

import json
from typing import Any, Literal

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from foredraft.answers import Part
from foredraft.outputs import CompletionOutput
from foredraft.server import reports
from foredraft.server.bodies import BodyRoute, Many, RequestModel
from foredraft.server.constraint import grammar_of
from foredraft.server.errors import ApiError, bad_request, error_object, json_response, not_supported
from foredraft.server.fields import GenerationRequest, check_count
from foredraft.server.generation import Generation, Tokens, begin
from foredraft.server.messages import (
    CalledFunction,
    ChatMessage,
    MessageToolCall,
    TemplateFields,
    TextPart,
    conversation,
    text_of,
)
from foredraft.server.service import Conversation, Served, Service
from foredraft.server.sse import event, respond
from foredraft.server.tokenising import encode
from foredraft.server.tools import Function, NamedFunction, NamedTool, ToolChoice, ToolRequest, choose
from foredraft.tool_calls import ToolCall

PATH = "/v1/messages"
_TEXT: dict[str, Any] = {"type": "text", "text": ""}
_THOUGHT: dict[str, Any] = {"type": "thinking", "thinking": "", "signature": ""}  # nobody signs it
router = APIRouter(route_class=BodyRoute)


class ContentBlock(TextPart):
    """A text, a thought (`thinking`) or a call (`tool_use`) of the assistant, or what came of one (`tool_result`)."""

    id: str | None = None
    name: str | None = None
    input: dict[str, Any] | None = None
    tool_use_id: str | None = None
    content: str | Many[TextPart] | None = None
    is_error: bool | None = None
    thinking: str | None = None


class MessageParam(RequestModel):
    role: str
    content: str | Many[ContentBlock]


class Tool(RequestModel):
    type: str | None = None
    name: str
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    strict: bool | None = None

    @property
    def function(self) -> Function:
        return Function(name=self.name, description=self.description, parameters=self.input_schema, strict=self.strict)


class ToolWanted(RequestModel):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(RequestModel):
    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: int | None = None  # how long a model thinks is its own choice


class PromptRequest(GenerationRequest):
    """What both routes take."""

    messages: Many[MessageParam]
    system: str | Many[TextPart] | None = None
    tools: Many[Tool] | None = None
    tool_choice: ToolWanted | None = None
    thinking: Thinking | None = None


class MessagesRequest(PromptRequest):
    max_tokens: int
    stop_sequences: Many[str] | None = None
    seed: int | None = None


@router.post(PATH)
async def create_message(body: MessagesRequest, request: Request, service: Served) -> Response:
    """Answer a conversation."""
    choice = choose(_tools(service, body), _wanted(body.tool_choice))
    params = body.sampling_params(
        service, body.max_tokens, stop=body.stop_sequences, grammar=grammar_of(body, None, choice, closes_tools=True)
    )
    generation = await begin(service, request, body, [_prompt(service, body)], params)
    return await respond(generation, MessagesAnswer(generation, service.name, choice), service.limits, body.stream)


@router.post(f"{PATH}/count_tokens")
async def count_tokens(body: PromptRequest, request: Request, service: Served) -> Response:
    """How many tokens a conversation has."""
    return json_response({"input_tokens": len(await encode(service, _prompt(service, body)))})


def _prompt(service: Service, body: PromptRequest) -> Conversation:
    check_count(service.limits.max_messages, "messages", body.messages)
    messages = [each for place, message in enumerate(body.messages) for each in _messages(message, place)]
    if body.system:
        messages.insert(0, ChatMessage(role="system", content=text_of(body.system, "system")))
    tools = _tools(service, body)
    thinks = None if body.thinking is None else {"enable_thinking": body.thinking.type != "disabled"}
    options = TemplateFields(chat_template_kwargs=thinks)
    return conversation(service, messages, tools if choose(tools, _wanted(body.tool_choice)).tools else None, options)


def _messages(message: MessageParam, place: int) -> list[ChatMessage]:
    """Results of tools are messages of their own to templates; they come before what the user says beside them."""
    if isinstance(message.content, str):
        return [ChatMessage(role=message.role, content=message.content)]
    where = f"messages[{place}]"
    results, calls, texts = list[ChatMessage](), list[MessageToolCall](), list[TextPart]()
    thoughts = [block.thinking for block in message.content if block.type == "thinking" and block.thinking]
    for block in message.content:
        if block.type == "tool_result":
            told = ChatMessage(role="tool", content=text_of(block.content, where), tool_call_id=block.tool_use_id)
            results.append(told)
        elif block.type == "tool_use":
            if block.name is None:
                raise bad_request(f"A tool_use in {where} has no name.", "messages")
            function = CalledFunction(name=block.name, arguments=json.dumps(block.input or {}))
            calls.append(MessageToolCall(id=block.id, function=function))
        elif block.type not in ("thinking", "redacted_thinking"):
            texts.append(block)
    if results and not texts:
        return results
    content = text_of(texts, where) if texts or not calls else None
    thought = "\n\n".join(thoughts) or None
    said = ChatMessage(role=message.role, content=content, tool_calls=calls or None, reasoning_content=thought)
    return [*results, said]


def _tools(service: Service, body: PromptRequest) -> list[ToolRequest] | None:
    if not body.tools:
        return None
    check_count(service.limits.max_tools, "tools", body.tools)
    for tool in body.tools:
        if tool.type not in (None, "custom"):
            raise not_supported(f"The tool type {tool.type[:40]!r}", "describe a tool of your own by its input_schema")
    return [ToolRequest(type="function", function=tool.function) for tool in body.tools]


def _wanted(choice: ToolWanted | None) -> str | NamedTool | None:
    if choice is None or choice.type != "tool":
        return None if choice is None else {"any": "required"}.get(choice.type, choice.type)
    if choice.name is None:
        raise bad_request("tool_choice of the type tool needs a name.", "tool_choice")
    return NamedTool(type="function", function=NamedFunction(name=choice.name))


class MessagesAnswer:
    """A generation as /v1/messages writes it: blocks of thoughts, text and calls."""

    def __init__(self, generation: Generation, model: str, tools: ToolChoice) -> None:
        self._generation = generation
        self._reader = tools.reader(generation.answer_format)
        self._opens_text = not tools.tools and not generation.answer_format.may_reason
        self._num_blocks = 0  # that were begun in the stream
        self._open: dict[str, Any] | None = None  # the block of text that the stream is in, as it began
        self._has_answered = False  # with more than thoughts
        self._has_calls = False
        self._message: dict[str, Any] = {
            "id": f"msg_{generation.id}",
            "type": "message",
            "role": "assistant",
            "model": model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": {"input_tokens": generation.num_prompt_tokens, "output_tokens": 0},
        }

    def body(self) -> dict[str, Any]:
        (output,) = self._generation.outputs.values()
        part = self._reader.whole(output.text)
        content = [{**_THOUGHT, "thinking": part.reasoning}] if part.reasoning else []
        if part.content or not part.calls:
            content.append({**_TEXT, "text": part.content})
        return {
            **self._message,
            "content": [*content, *({**_block(call), "input": call.object} for call in part.calls)],
            **_stop(output, bool(part.calls)),
            "usage": self._usage(),
            "seed": output.seed,
            "metrics": reports.metrics(self._generation),
        }

    def begin(self) -> bytes:
        start = _event({"type": "message_start", "message": self._message})
        return start + (self._begin(_TEXT) if self._opens_text else b"") + _event({"type": "ping"})

    def delta(self, tokens: Tokens) -> bytes:
        return self._written(self._reader.feed("".join([token.text for its in tokens.values() for token in its])))

    def end(self) -> bytes:
        (output,) = self._generation.outputs.values()
        rest = self._written(self._reader.end())
        if not self._has_answered:
            rest += self._begin(_TEXT)
        usage, metrics = self._usage(), reports.metrics(self._generation)
        stop = _stop(output, self._has_calls)
        return (
            rest
            + self._end()
            + _event({"type": "message_delta", "delta": stop, "usage": usage, "metrics": metrics})
            + _event({"type": "message_stop"})
        )

    def _written(self, part: Part) -> bytes:
        events = b""
        if part.reasoning:
            events += self._begin(_THOUGHT) + self._delta("thinking_delta", thinking=part.reasoning)
        if part.content:
            events += self._begin(_TEXT) + self._delta("text_delta", text=part.content)
        for call in part.calls:
            self._has_calls = self._has_answered = True
            events += self._end() + self._begin_block({**_block(call), "input": {}})
            events += self._delta("input_json_delta", partial_json=call.arguments) + self._end_block()
        return events

    def _begin(self, block: dict[str, Any]) -> bytes:
        """Be in a block of this kind."""
        if self._open is block:
            return b""
        ended = self._end()
        self._open = block
        self._has_answered = self._has_answered or block is _TEXT
        return ended + self._begin_block(block)

    def _end(self) -> bytes:
        """Be in no block."""
        was_open, self._open = self._open, None
        return b"" if was_open is None else self._end_block()

    def _begin_block(self, block: dict[str, Any]) -> bytes:
        self._num_blocks += 1
        return _event({"type": "content_block_start", "index": self._num_blocks - 1, "content_block": block})

    def _delta(self, kind: str, **fields: str) -> bytes:
        delta = {"type": kind, **fields}
        return _event({"type": "content_block_delta", "index": self._num_blocks - 1, "delta": delta})

    def _end_block(self) -> bytes:
        return _event({"type": "content_block_stop", "index": self._num_blocks - 1})

    def failure(self, error: ApiError) -> bytes:
        return _event(error_object(PATH, error, self._generation.id))

    def _usage(self) -> dict[str, int]:
        """Unlike OpenAI's: `input_tokens` are those that were not in the cache."""
        usage = reports.usage(self._generation)
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        return {
            "input_tokens": usage["prompt_tokens"] - cached,
            "cache_read_input_tokens": cached,
            "output_tokens": usage["completion_tokens"],
        }


def _event(data: dict[str, Any]) -> bytes:
    return event(data, data["type"])


def _block(call: ToolCall) -> dict[str, Any]:
    return {"type": "tool_use", "id": call.id, "name": call.name}


def _stop(output: CompletionOutput, has_calls: bool) -> dict[str, Any]:
    if isinstance(output.stop_reason, str):
        return {"stop_reason": "stop_sequence", "stop_sequence": output.stop_reason}
    ended = "tool_use" if has_calls else "end_turn"
    return {"stop_reason": "max_tokens" if output.finish_reason == "length" else ended, "stop_sequence": None}
