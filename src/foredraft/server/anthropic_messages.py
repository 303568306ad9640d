"""/v1/messages: Anthropic's API, for texts and without state."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from foredraft.server import reports
from foredraft.server.bodies import BodyRoute, Many, RequestModel
from foredraft.server.errors import ApiError, error_object, json_response, not_supported
from foredraft.server.fields import GenerationRequest, check_count
from foredraft.server.generation import Generation, Tokens, begin
from foredraft.server.messages import ChatMessage, TextPart, conversation, text_of
from foredraft.server.service import Conversation, Served, Service
from foredraft.server.sse import event, respond
from foredraft.server.tokenising import encode
from foredraft.types import CompletionOutput

PATH = "/v1/messages"
router = APIRouter(route_class=BodyRoute)


class MessageParam(RequestModel):
    role: str
    content: str | Many[TextPart]


class PromptRequest(GenerationRequest):
    """What both routes take."""

    messages: Many[MessageParam]
    system: str | Many[TextPart] | None = None
    tools: Many[Any] | None = None


class MessagesRequest(PromptRequest):
    max_tokens: int
    stop_sequences: Many[str] | None = None
    seed: int | None = None


@router.post(PATH)
async def create_message(body: MessagesRequest, request: Request, service: Served) -> Response:
    """Answer a conversation."""
    prompt = _prompt(service, body)
    params = body.sampling_params(service, body.max_tokens, stop=body.stop_sequences)
    generation = await begin(service, request, body, [prompt], params)
    return await respond(generation, MessagesAnswer(generation, service.name), service.limits, body.stream)


@router.post(f"{PATH}/count_tokens")
async def count_tokens(body: PromptRequest, request: Request, service: Served) -> Response:
    """How many tokens a conversation has."""
    return json_response({"input_tokens": len(await encode(service, _prompt(service, body)))})


def _prompt(service: Service, body: PromptRequest) -> Conversation:
    if body.tools:
        raise not_supported("tools", "use /v1/chat/completions for them")
    check_count(service.limits.max_messages, "messages", body.messages)
    messages = [ChatMessage(role=message.role, content=message.content) for message in body.messages]
    if body.system:
        messages.insert(0, ChatMessage(role="system", content=text_of(body.system, "system")))
    return conversation(service, messages)


class MessagesAnswer:
    """A generation as /v1/messages writes it: one block of text."""

    def __init__(self, generation: Generation, model: str) -> None:
        self._generation = generation
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
        return {
            **self._message,
            "content": [{"type": "text", "text": output.text}],
            **_stop(output),
            "usage": self._usage(),
            "seed": output.seed,
            "metrics": reports.metrics(self._generation),
        }

    def begin(self) -> bytes:
        block = {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}}
        start = {"type": "message_start", "message": self._message}
        return _event(start) + _event(block) + _event({"type": "ping"})

    def delta(self, tokens: Tokens) -> bytes:
        text = "".join([token.text for its in tokens.values() for token in its])
        delta = {"type": "text_delta", "text": text}
        return _event({"type": "content_block_delta", "index": 0, "delta": delta}) if text else b""

    def end(self) -> bytes:
        (output,) = self._generation.outputs.values()
        usage, metrics = self._usage(), reports.metrics(self._generation)
        return (
            _event({"type": "content_block_stop", "index": 0})
            + _event({"type": "message_delta", "delta": _stop(output), "usage": usage, "metrics": metrics})
            + _event({"type": "message_stop"})
        )

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


def _stop(output: CompletionOutput) -> dict[str, Any]:
    if isinstance(output.stop_reason, str):
        return {"stop_reason": "stop_sequence", "stop_sequence": output.stop_reason}
    return {"stop_reason": "max_tokens" if output.finish_reason == "length" else "end_turn", "stop_sequence": None}
