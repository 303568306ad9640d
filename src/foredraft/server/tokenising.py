"""/tokenize and /detokenize: texts and conversations to token ids, and back."""

from __future__ import annotations

import asyncio

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from foredraft.errors import ForedraftError
from foredraft.server.bodies import Body, BodyRoute, Many
from foredraft.server.errors import ApiError, as_api_error, bad_request, json_response
from foredraft.server.fields import check_at_most, check_count
from foredraft.server.messages import ChatMessage, TemplateFields, conversation
from foredraft.server.service import Conversation, Served, Service

router = APIRouter(route_class=BodyRoute)


class TokenizeRequest(TemplateFields, Body):
    prompt: str | None = None
    messages: Many[ChatMessage] | None = None
    add_special_tokens: bool | None = None


class DetokenizeRequest(Body):
    tokens: Many[int]


@router.post("/tokenize")
async def tokenize(body: TokenizeRequest, request: Request, service: Served) -> Response:
    """The token ids of a text or a conversation."""
    if (body.prompt is None) == (body.messages is None):
        raise bad_request("Give either prompt or messages.", "prompt")
    if body.messages is not None:
        check_count(service.limits.max_messages, "messages", body.messages)
        tokens = await encode(service, conversation(service, body.messages, options=body))
    else:
        tokens = await encode(service, body.prompt or "", body.add_special_tokens is not False)
    return json_response({"count": len(tokens), "max_model_len": service.llm.max_model_len, "tokens": tokens})


@router.post("/detokenize")
async def detokenize(body: DetokenizeRequest, request: Request, service: Served) -> Response:
    """The text of token ids."""
    vocab = service.llm.model_config.vocab_size
    check_at_most(service.limits.max_tokenised, "tokens", body.tokens)
    if min(body.tokens, default=0) < 0 or max(body.tokens, default=0) >= vocab:
        raise bad_request(f"tokens has ids that the model does not have; allowed are 0 to {vocab - 1}.", "tokens")
    text = await asyncio.to_thread(service.llm.tokenizer.decode, body.tokens, skip_special_tokens=False)
    return json_response({"prompt": text})


async def encode(service: Service, prompt: str | Conversation, add_special_tokens: bool = True) -> list[int]:
    """Off the event loop, as far as there is room; raises ApiError."""
    texts = [prompt] if isinstance(prompt, str) else [each["content"] for each in prompt.messages]
    length, most = sum(map(len, texts)), service.limits.max_tokenised
    if length > most:
        raise bad_request(f"The text has {length} characters; at most {most} are allowed.")
    if service.tokenising.locked():
        raise ApiError(429, "Too many texts are being tokenised; try again later.", retry_after_s=1)
    tokenizer = service.llm.tokenizer
    async with service.tokenising:
        try:
            if isinstance(prompt, Conversation):
                return await asyncio.to_thread(prompt.encode, tokenizer)
            return await asyncio.to_thread(tokenizer.encode, prompt, add_special_tokens)
        except ForedraftError as error:
            raise as_api_error(error, 1) from error
