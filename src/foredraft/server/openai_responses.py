"""/v1/responses: OpenAI's newer API, for texts and functions. Nothing is stored, and nothing can be continued."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from foredraft.answers import Part
from foredraft.outputs import CompletionOutput
from foredraft.server import reports
from foredraft.server.bodies import BodyRoute, Many, RequestModel
from foredraft.server.constraint import JsonSchema, ResponseFormat, grammar_of
from foredraft.server.errors import ApiError, error_object, not_supported
from foredraft.server.fields import GenerationRequest, Seed, check_count
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
from foredraft.server.service import Served, Service
from foredraft.server.sse import event, respond
from foredraft.server.tools import Function, NamedFunction, NamedTool, ToolChoice, ToolRequest, choose
from foredraft.tool_calls import ToolCall

PATH = "/v1/responses"
router = APIRouter(route_class=BodyRoute)


class InputItem(RequestModel):
    """A message, a thought of the assistant (`reasoning`), a call (`function_call`), or what came of one
    (`function_call_output`). What this route has answered is an item as it stands."""

    type: str | None = None
    id: str | None = None
    status: str | None = None
    role: str | None = None
    content: str | Many[TextPart] | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    output: str | Many[TextPart] | None = None
    summary: Many[TextPart] | None = None


class FunctionTool(Function):
    """Unlike in a chat, the function lies beside its type."""

    type: str


class FunctionWanted(RequestModel):
    type: Literal["function"]
    name: str


class TextFormat(JsonSchema):
    """Unlike in a chat, the schema lies beside its type."""

    type: Literal["text", "json_object", "json_schema"]


class TextOptions(RequestModel):
    format: TextFormat | None = None


class Reasoning(RequestModel):
    effort: str | None = None


class ResponsesRequest(GenerationRequest):
    input: str | Many[InputItem]
    instructions: str | None = None
    max_output_tokens: int | None = None
    seed: Seed | None = None
    stop: str | Many[str] | None = None
    text: TextOptions | None = None
    reasoning: Reasoning | None = None
    tools: Many[FunctionTool] | None = None
    tool_choice: str | FunctionWanted | None = None
    parallel_tool_calls: bool | None = None
    previous_response_id: str | None = None
    background: bool | None = None


@router.post(PATH)
async def create_response(body: ResponsesRequest, request: Request, service: Served) -> Response:
    """Answer an input. Nothing is stored."""
    if body.previous_response_id is not None:
        raise not_supported("previous_response_id", "nothing is stored, so send the whole conversation as input")
    if body.background:
        raise not_supported("background", "wait for the answer, or stream it")
    tools = _tools(service, body)
    named = body.tool_choice
    if isinstance(named, FunctionWanted):
        choice = choose(tools, NamedTool(type="function", function=NamedFunction(name=named.name)))
    else:
        choice = choose(tools, named)
    messages = _messages(body)
    check_count(service.limits.max_messages, "input", messages)
    wanted = body.text.format if body.text else None
    response_format = ResponseFormat(type=wanted.type, json_schema=wanted) if wanted else None
    grammar = grammar_of(body, response_format, choice)
    params = body.sampling_params(service, body.max_output_tokens, grammar=grammar)
    options = TemplateFields(reasoning_effort=body.reasoning.effort if body.reasoning else None)
    prompt = conversation(service, messages, tools if choice.tools else None, options)
    generation = await begin(service, request, body, [prompt], params)
    answer = ResponsesAnswer(generation, service.name, body, choice)
    return await respond(generation, answer, service.limits, body.stream)


def _messages(body: ResponsesRequest) -> list[ChatMessage]:
    messages = [] if body.instructions is None else [ChatMessage(role="system", content=body.instructions)]
    if isinstance(body.input, str):
        return [*messages, ChatMessage(role="user", content=body.input)]
    thought: str | None = None  # of the assistant's message that comes next
    for place, item in enumerate(body.input):
        match item:
            case InputItem(type="function_call", name=str(name)):
                function = CalledFunction(name=name, arguments=item.arguments or "{}")
                call = MessageToolCall(id=item.call_id, function=function)
                last = messages[-1] if messages else None
                if last is not None and last.role == "assistant" and thought is None:  # calls of one answer
                    last.tool_calls = [*(last.tool_calls or ()), call]
                else:
                    messages.append(ChatMessage(role="assistant", tool_calls=[call], reasoning_content=thought))
                thought = None
            case InputItem(type="function_call_output"):
                told = text_of(item.output, f"input[{place}]")
                messages.append(ChatMessage(role="tool", content=told, tool_call_id=item.call_id))
            case InputItem(type=None | "message", role=str(role)):
                its_own = thought if role == "assistant" else None
                messages.append(ChatMessage(role=role, content=item.content, reasoning_content=its_own))
                thought = None
            case InputItem(type="reasoning"):
                thought = text_of(item.content or item.summary, f"input[{place}]") or None
            case _:
                raise not_supported(
                    f"input[{place}]", "an item must be a message with a role and a content, or a call of a function"
                )
    return messages


def _tools(service: Service, body: ResponsesRequest) -> list[ToolRequest] | None:
    """Functions are strict here unless they say otherwise, as OpenAI has it."""
    if not body.tools:
        return None
    check_count(service.limits.max_tools, "tools", body.tools)
    for tool in body.tools:
        if tool.type != "function":
            raise not_supported(f"The tool type {tool.type[:40]!r}", "describe a function of your own")
    functions = [
        Function(name=t.name, description=t.description, parameters=t.parameters, strict=t.strict is not False)
        for t in body.tools
    ]
    return [ToolRequest(type="function", function=function) for function in functions]


@dataclass(frozen=True)
class Written:
    """A kind of item that has a text."""

    id_prefix: str
    event: str  # how the events about its text begin
    empty_item: dict[str, Any]
    empty_part: dict[str, Any]
    more: dict[str, Any]  # that these events hold

    def item(self, own_id: str, status: str, text: str) -> dict[str, Any]:
        return {"id": f"{self.id_prefix}_{own_id}", **self.empty_item, "status": status, "content": [self.part(text)]}

    def part(self, text: str) -> dict[str, Any]:
        return {**self.empty_part, "text": text}


MESSAGE = Written(
    "msg",
    "response.output_text",
    {"type": "message", "role": "assistant"},
    {"type": "output_text", "annotations": [], "logprobs": []},
    {"logprobs": []},
)
REASONING = Written(
    "rs", "response.reasoning_text", {"type": "reasoning", "summary": []}, {"type": "reasoning_text"}, {}
)


class ResponsesAnswer:
    """A generation as /v1/responses writes it: an output item for thoughts, one for the text, and one for each call."""

    def __init__(self, generation: Generation, model: str, body: ResponsesRequest, tools: ToolChoice) -> None:
        self._generation = generation
        self._model = model
        self._request = body
        self._reader = tools.reader(generation.answer_format)
        self._opens_message = not tools.tools and not generation.answer_format.may_reason
        self._number = 0
        self._items: list[dict[str, Any]] = []  # that are complete in the stream
        self._open: Written | None = None  # the item that the stream is in
        self._text = ""  # of that item

    def body(self) -> dict[str, Any]:
        (output,) = self._generation.outputs.values()
        part = self._reader.whole(output.text)
        status = "incomplete" if output.finish_reason == "length" else "completed"
        items = [REASONING.item(self._own_id(0), "completed", part.reasoning)] if part.reasoning else []
        if part.content or not part.calls:
            items.append(MESSAGE.item(self._own_id(len(items)), status, part.content))
        return self._whole(output, [*items, *map(_call, part.calls)])

    def begin(self) -> bytes:
        response = self._response("in_progress")
        return (
            self._event("response.created", response=response)
            + self._event("response.in_progress", response=response)
            + (self._begin(MESSAGE) if self._opens_message else b"")
        )

    def delta(self, tokens: Tokens) -> bytes:
        return self._written(self._reader.feed("".join([token.text for its in tokens.values() for token in its])))

    def end(self) -> bytes:
        (output,) = self._generation.outputs.values()
        rest = self._written(self._reader.end())
        if not any(item["type"] != "reasoning" for item in self._items):
            rest += self._begin(MESSAGE)
        rest += self._end("incomplete" if output.finish_reason == "length" else "completed")
        response = self._whole(output, self._items)
        return rest + self._event(f"response.{response['status']}", response=response)

    def _written(self, part: Part) -> bytes:
        events = b""
        for kind, text in ((REASONING, part.reasoning), (MESSAGE, part.content)):
            if text:
                events += self._begin(kind) + self._event(f"{kind.event}.delta", **self._place, delta=text, **kind.more)
                self._text += text
        for call in part.calls:
            events += self._end("completed")
            item = _call(call)
            place = {"item_id": item["id"], "output_index": len(self._items)}
            begun = {**item, "arguments": "", "status": "in_progress"}
            events += (
                self._event("response.output_item.added", output_index=len(self._items), item=begun)
                + self._event("response.function_call_arguments.delta", **place, delta=call.arguments)
                + self._event(
                    "response.function_call_arguments.done", **place, name=call.name, arguments=call.arguments
                )
                + self._event("response.output_item.done", output_index=len(self._items), item=item)
            )
            self._items.append(item)
        return events

    @property
    def _place(self) -> dict[str, Any]:
        assert self._open is not None
        own_id = self._own_id(len(self._items))
        return {"item_id": f"{self._open.id_prefix}_{own_id}", "output_index": len(self._items), "content_index": 0}

    def _own_id(self, place: int) -> str:
        """Of the item at this place, but for its kind."""
        return f"{self._generation.id}_{place}"

    def _begin(self, kind: Written) -> bytes:
        """Be in an item of this kind."""
        if self._open is kind:
            return b""
        ended = self._end("completed")
        self._open, self._text = kind, ""
        item = {**kind.item(self._own_id(len(self._items)), "in_progress", ""), "content": []}
        return (
            ended
            + self._event("response.output_item.added", output_index=len(self._items), item=item)
            + self._event("response.content_part.added", **self._place, part=kind.part(""))
        )

    def _end(self, status: str) -> bytes:
        """Be in no item."""
        kind, text = self._open, self._text
        if kind is None:
            return b""
        item = kind.item(self._own_id(len(self._items)), status, text)
        events = (
            self._event(f"{kind.event}.done", **self._place, text=text, **kind.more)
            + self._event("response.content_part.done", **self._place, part=kind.part(text))
            + self._event("response.output_item.done", output_index=len(self._items), item=item)
        )
        self._items.append(item)
        self._open = None
        return events

    def _whole(self, output: CompletionOutput, items: list[dict[str, Any]]) -> dict[str, Any]:
        is_cut = output.finish_reason == "length"
        usage = reports.usage(self._generation)
        return {
            **self._response("incomplete" if is_cut else "completed"),
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "output": items,
            "usage": {
                "input_tokens": usage["prompt_tokens"],
                "input_tokens_details": usage["prompt_tokens_details"],
                "output_tokens": usage["completion_tokens"],
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": usage["total_tokens"],
            },
            "seed": output.seed,
            "metrics": reports.metrics(self._generation),
        }

    def failure(self, error: ApiError) -> bytes:
        told = error_object(PATH, error)["error"]
        return self._event("error", **{name: told.get(name) for name in ("code", "message", "param")})

    def _event(self, kind: str, **fields: Any) -> bytes:
        self._number += 1
        return event({"type": kind, "sequence_number": self._number - 1, **fields}, kind)

    def _response(self, status: str) -> dict[str, Any]:
        wanted = self._request.text.format if self._request.text else None
        return {
            "id": f"resp_{self._generation.id}",
            "object": "response",
            "created_at": self._generation.created,
            "status": status,
            "error": None,
            "incomplete_details": None,
            "instructions": self._request.instructions,
            "max_output_tokens": self._request.max_output_tokens,
            "model": self._model,
            "output": [],
            "parallel_tool_calls": self._request.parallel_tool_calls is not False,
            "previous_response_id": None,
            "store": False,
            "temperature": self._request.temperature,
            "text": {"format": {"type": wanted.type if wanted else "text"}},
            "tool_choice": _dumped(self._request.tool_choice) or "auto",
            "tools": [_dumped(tool) for tool in self._request.tools or ()],
            "top_p": self._request.top_p,
            "truncation": "disabled",
            "usage": None,
            "metadata": {},
        }


def _call(call: ToolCall) -> dict[str, Any]:
    told = {"type": "function_call", "call_id": call.id, "name": call.name, "arguments": call.arguments}
    return {"id": f"fc_{call.id}", **told, "status": "completed"}


def _dumped(value: RequestModel | str | None) -> Any:
    return value.model_dump(exclude_none=True) if isinstance(value, RequestModel) else value
