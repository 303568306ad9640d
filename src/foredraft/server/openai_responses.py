"""/v1/responses: OpenAI's newer API, for texts and functions. Nothing is stored, and nothing can be continued."""

from __future__ import annotations

from typing import Any, Literal

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from foredraft.outputs import CompletionOutput
from foredraft.server import reports
from foredraft.server.bodies import BodyRoute, Many, RequestModel
from foredraft.server.constraint import JsonSchema, ResponseFormat, grammar_of
from foredraft.server.errors import ApiError, error_object, not_supported
from foredraft.server.fields import GenerationRequest, check_count
from foredraft.server.generation import Generation, Tokens, begin
from foredraft.server.messages import CalledFunction, ChatMessage, MessageToolCall, TextPart, conversation, text_of
from foredraft.server.service import Served, Service
from foredraft.server.sse import event, respond
from foredraft.server.tools import Function, NamedFunction, NamedTool, ToolChoice, ToolRequest, choose
from foredraft.tool_calls import ToolCall

PATH = "/v1/responses"
router = APIRouter(route_class=BodyRoute)


class InputItem(RequestModel):
    """A message, a call of the assistant (`function_call`), or what came of one (`function_call_output`). What this
    route has answered is an item as it stands."""

    type: str | None = None
    id: str | None = None
    status: str | None = None
    role: str | None = None
    content: str | Many[TextPart] | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    output: str | Many[TextPart] | None = None


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


class ResponsesRequest(GenerationRequest):
    input: str | Many[InputItem]
    instructions: str | None = None
    max_output_tokens: int | None = None
    seed: int | None = None
    stop: str | Many[str] | None = None
    text: TextOptions | None = None
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
    prompt = conversation(service, messages, tools if choice.tools else None)
    generation = await begin(service, request, body, [prompt], params)
    answer = ResponsesAnswer(generation, service.name, body, choice)
    return await respond(generation, answer, service.limits, body.stream)


def _messages(body: ResponsesRequest) -> list[ChatMessage]:
    messages = [] if body.instructions is None else [ChatMessage(role="system", content=body.instructions)]
    if isinstance(body.input, str):
        return [*messages, ChatMessage(role="user", content=body.input)]
    for place, item in enumerate(body.input):
        match item:
            case InputItem(type="function_call", name=str(name)):
                function = CalledFunction(name=name, arguments=item.arguments or "{}")
                call = MessageToolCall(id=item.call_id, function=function)
                last = messages[-1] if messages else None
                if last is not None and last.role == "assistant":  # calls of one answer are one message
                    last.tool_calls = [*(last.tool_calls or ()), call]
                else:
                    messages.append(ChatMessage(role="assistant", tool_calls=[call]))
            case InputItem(type="function_call_output"):
                told = text_of(item.output, f"input[{place}]")
                messages.append(ChatMessage(role="tool", content=told, tool_call_id=item.call_id))
            case InputItem(type=None | "message", role=str(role)):
                messages.append(ChatMessage(role=role, content=item.content))
            case InputItem(type="reasoning"):
                continue  # what models elsewhere have thought
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


class ResponsesAnswer:
    """A generation as /v1/responses writes it: an output item for the text, and one for each call."""

    def __init__(self, generation: Generation, model: str, body: ResponsesRequest, tools: ToolChoice) -> None:
        self._generation = generation
        self._model = model
        self._request = body
        self._parser = tools.parser()
        self._opens_text = not tools.tools  # else the answer may be a call
        self._item_id = f"msg_{generation.id}"
        self._number = 0
        self._items: list[dict[str, Any]] = []  # that are complete in the stream
        self._open_text: str | None = None  # of the item that the stream is in

    def body(self) -> dict[str, Any]:
        (output,) = self._generation.outputs.values()
        text, calls = self._parser.whole(output.text)
        status = "incomplete" if output.finish_reason == "length" else "completed"
        message = [self._message(status, text)] if text or not calls else []
        return self._whole(output, [*message, *map(_call, calls)])

    def begin(self) -> bytes:
        response = self._response("in_progress")
        return (
            self._event("response.created", response=response)
            + self._event("response.in_progress", response=response)
            + (self._begin_text() if self._opens_text else b"")
        )

    def delta(self, tokens: Tokens) -> bytes:
        return self._written(*self._parser.feed("".join([token.text for its in tokens.values() for token in its])))

    def end(self) -> bytes:
        (output,) = self._generation.outputs.values()
        rest = self._written(*self._parser.end())
        if not self._items and self._open_text is None:
            rest += self._begin_text()
        rest += self._end_text("incomplete" if output.finish_reason == "length" else "completed")
        response = self._whole(output, self._items)
        return rest + self._event(f"response.{response['status']}", response=response)

    def _written(self, text: str, calls: list[ToolCall]) -> bytes:
        events = b""
        if text:
            events += (b"" if self._open_text is not None else self._begin_text()) + self._event(
                "response.output_text.delta", **self._place, delta=text, logprobs=[]
            )
            self._open_text = (self._open_text or "") + text
        for call in calls:
            events += self._end_text("completed")
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
        return {"item_id": self._item_id, "output_index": len(self._items), "content_index": 0}

    def _begin_text(self) -> bytes:
        self._open_text = ""
        item = {**self._message("in_progress", ""), "content": []}
        return self._event("response.output_item.added", output_index=len(self._items), item=item) + self._event(
            "response.content_part.added", **self._place, part=_text("")
        )

    def _end_text(self, status: str) -> bytes:
        if self._open_text is None:
            return b""
        item = self._message(status, self._open_text)
        events = (
            self._event("response.output_text.done", **self._place, text=self._open_text, logprobs=[])
            + self._event("response.content_part.done", **self._place, part=_text(self._open_text))
            + self._event("response.output_item.done", output_index=len(self._items), item=item)
        )
        self._items.append(item)
        self._open_text = None
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

    def _message(self, status: str, text: str) -> dict[str, Any]:
        message = {"id": self._item_id, "type": "message", "status": status, "role": "assistant"}
        return {**message, "content": [_text(text)]}

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


def _text(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _call(call: ToolCall) -> dict[str, Any]:
    told = {"type": "function_call", "call_id": call.id, "name": call.name, "arguments": call.arguments}
    return {"id": f"fc_{call.id}", **told, "status": "completed"}


def _dumped(value: RequestModel | str | None) -> Any:
    return value.model_dump(exclude_none=True) if isinstance(value, RequestModel) else value
