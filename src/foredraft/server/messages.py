"""Conversations as clients send them, and as chat templates want them."""

from __future__ import annotations

import json
from typing import Any

from pydantic import Field

from foredraft.server.bodies import Many, RequestModel
from foredraft.server.errors import bad_request, not_supported
from foredraft.server.service import Conversation, Service
from foredraft.server.tools import ToolRequest


class TextPart(RequestModel):
    """Of the parts that OpenAI and Anthropic know, only texts can be answered here."""

    type: str
    text: str | None = None
    annotations: Any = None  # of an answer of /v1/responses that comes back, as are its log probabilities
    logprobs: Any = None


class CalledFunction(RequestModel):
    name: str
    arguments: str


class MessageToolCall(RequestModel):
    id: str | None = None
    type: str | None = None
    function: CalledFunction


class ChatMessage(RequestModel):
    role: str
    content: str | Many[TextPart] | None = None
    name: str | None = None
    tool_calls: Many[MessageToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None  # what the assistant thought before it said this


class TemplateFields(RequestModel):
    """How a conversation becomes a prompt, in vLLM's words."""

    chat_template_kwargs: dict[str, Any] | None = Field(default=None, description="variables for the chat template")
    reasoning_effort: str | None = Field(default=None, description="how long to think, if the chat template reads it")
    add_generation_prompt: bool | None = Field(default=None, description="whether an answer is begun")
    continue_final_message: bool | None = Field(
        default=None, description="whether the answer goes on with the last message"
    )

    @property
    def variables(self) -> dict[str, Any]:
        """What the template may read; one that does not know of it leaves it out."""
        effort = {} if self.reasoning_effort is None else {"reasoning_effort": self.reasoning_effort}
        return {**effort, **(self.chat_template_kwargs or {})}

    def continues(self, messages: list[ChatMessage]) -> bool:
        """Whether the answer goes on with the last message; one of the assistant is continued if nothing else is
        said."""
        if self.continue_final_message and self.add_generation_prompt:
            raise bad_request(
                "continue_final_message and add_generation_prompt cannot both be true.", "continue_final_message"
            )
        if self.continue_final_message is not None:
            return self.continue_final_message
        last = messages[-1]
        return last.role == "assistant" and not last.tool_calls and not self.add_generation_prompt


def text_of(content: str | list[TextPart] | None, where: str) -> str:
    """The text of a message; raises ApiError for images and the like, which would otherwise be lost silently."""
    if content is None or isinstance(content, str):
        return content or ""
    texts = []
    for part in content:
        if part.text is None:
            what = f"A part of the type {part.type[:40]!r} in {where}"
            raise not_supported(what, "this model reads texts only", where)
        texts.append(part.text)
    return "\n".join(texts)


def conversation(
    service: Service,
    messages: list[ChatMessage],
    tools: list[ToolRequest] | None = None,
    options: TemplateFields | None = None,
) -> Conversation:
    """What the chat template gets."""
    options = options or TemplateFields()
    written = [_template_message(message, f"messages[{place}]") for place, message in enumerate(messages)]
    return Conversation(
        written,
        [each.model_dump(exclude_none=True) for each in tools or ()] or None,
        variables=options.variables,
        continues=options.continues(messages),
        add_generation_prompt=options.add_generation_prompt is not False,
    )


def _template_message(message: ChatMessage, where: str) -> dict[str, Any]:
    """Roles are those that templates know; arguments of calls are objects, which templates write as JSON again."""
    role = "system" if message.role == "developer" else message.role
    if not role or len(role) > 64 or not role.replace("_", "").isalnum():
        raise bad_request(f"{where} has the role {role[:40]!r}; use system, user, assistant or tool.", "messages")
    if message.content is None and not message.tool_calls:
        raise bad_request(f"{where} has no content.", "messages")
    names = message.model_dump(include={"name", "tool_call_id"}, exclude_none=True)
    written: dict[str, Any] = {"role": role, "content": text_of(message.content, where), **names}
    if message.reasoning_content:
        written["reasoning_content"] = message.reasoning_content
        if not (message.tool_calls and written["content"]):  # of a call, gpt-oss's template takes one of the two
            written["thinking"] = message.reasoning_content
    if message.tool_calls:
        written["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.function.name, "arguments": _arguments(call.function.arguments)},
            }
            for call in message.tool_calls
        ]
    return written


def _arguments(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text  # a model may have written it
