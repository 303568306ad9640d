"""/v1/responses: OpenAI's newer API, for texts and without state: nothing is stored, and nothing can be continued."""

from __future__ import annotations

from typing import Any, Literal

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from foredraft.server import reports
from foredraft.server.bodies import BodyRoute, Many, RequestModel
from foredraft.server.constraint import JsonSchema, ResponseFormat, grammar_of
from foredraft.server.errors import ApiError, error_object, not_supported
from foredraft.server.fields import GenerationRequest, check_count
from foredraft.server.generation import Generation, Tokens, begin
from foredraft.server.messages import ChatMessage, TextPart, conversation
from foredraft.server.service import Served
from foredraft.server.sse import event, respond

PATH = "/v1/responses"
router = APIRouter(route_class=BodyRoute)


class InputItem(RequestModel):
    type: str | None = None
    role: str | None = None
    content: str | Many[TextPart] | None = None


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
    tools: Many[Any] | None = None
    previous_response_id: str | None = None
    background: bool | None = None


@router.post(PATH)
async def create_response(body: ResponsesRequest, request: Request, service: Served) -> Response:
    """Answer an input. Nothing is stored."""
    if body.previous_response_id is not None:
        raise not_supported("previous_response_id", "nothing is stored, so send the whole conversation as input")
    if body.background:
        raise not_supported("background", "wait for the answer, or stream it")
    if body.tools:
        raise not_supported("tools", "use /v1/chat/completions for them")
    messages = _messages(body)
    check_count(service.limits.max_messages, "input", messages)
    wanted = body.text.format if body.text else None
    response_format = ResponseFormat(type=wanted.type, json_schema=wanted) if wanted else None
    grammar = grammar_of(body, response_format)
    params = body.sampling_params(service, body.max_output_tokens, grammar=grammar)
    prompt = conversation(service, messages)
    generation = await begin(service, request, body, [prompt], params)
    answer = ResponsesAnswer(generation, service.name, body)
    return await respond(generation, answer, service.limits, body.stream)


def _messages(body: ResponsesRequest) -> list[ChatMessage]:
    messages = [] if body.instructions is None else [ChatMessage(role="system", content=body.instructions)]
    if isinstance(body.input, str):
        return [*messages, ChatMessage(role="user", content=body.input)]
    for place, item in enumerate(body.input):
        if item.type not in (None, "message") or item.role is None:
            raise not_supported(f"input[{place}]", "an item must be a message with a role and a content")
        messages.append(ChatMessage(role=item.role, content=item.content))
    return messages


class ResponsesAnswer:
    """A generation as /v1/responses writes it: one output item with one text."""

    def __init__(self, generation: Generation, model: str, body: ResponsesRequest) -> None:
        self._generation = generation
        self._model = model
        self._request = body
        self._item_id = f"msg_{generation.id}"
        self._place = {"item_id": self._item_id, "output_index": 0, "content_index": 0}
        self._number = 0

    def body(self) -> dict[str, Any]:
        (output,) = self._generation.outputs.values()
        is_cut = output.finish_reason == "length"
        usage = reports.usage(self._generation)
        return {
            **self._response("incomplete" if is_cut else "completed"),
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "output": [self._item("incomplete" if is_cut else "completed", [_text(output.text)])],
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

    def begin(self) -> bytes:
        response = self._response("in_progress")
        return (
            self._event("response.created", response=response)
            + self._event("response.in_progress", response=response)
            + self._event("response.output_item.added", output_index=0, item=self._item("in_progress", []))
            + self._event("response.content_part.added", **self._place, part=_text(""))
        )

    def delta(self, tokens: Tokens) -> bytes:
        text = "".join([token.text for its in tokens.values() for token in its])
        return self._event("response.output_text.delta", **self._place, delta=text, logprobs=[]) if text else b""

    def end(self) -> bytes:
        response = self.body()
        (item,) = response["output"]
        (part,) = item["content"]
        return (
            self._event("response.output_text.done", **self._place, text=part["text"], logprobs=[])
            + self._event("response.content_part.done", **self._place, part=part)
            + self._event("response.output_item.done", output_index=0, item=item)
            + self._event(f"response.{response['status']}", response=response)
        )

    def failure(self, error: ApiError) -> bytes:
        told = error_object(PATH, error)["error"]
        return self._event("error", **{name: told.get(name) for name in ("code", "message", "param")})

    def _event(self, kind: str, **fields: Any) -> bytes:
        self._number += 1
        return event({"type": kind, "sequence_number": self._number - 1, **fields}, kind)

    def _item(self, status: str, content: list[dict[str, Any]]) -> dict[str, Any]:
        return {"id": self._item_id, "type": "message", "status": status, "role": "assistant", "content": content}

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
            "parallel_tool_calls": False,
            "previous_response_id": None,
            "store": False,
            "temperature": self._request.temperature,
            "text": {"format": {"type": wanted.type if wanted else "text"}},
            "tool_choice": "none",
            "tools": [],
            "top_p": self._request.top_p,
            "truncation": "disabled",
            "usage": None,
            "metadata": {},
        }


def _text(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
