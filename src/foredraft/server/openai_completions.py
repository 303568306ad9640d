"""/v1/completions: prompts as texts or token ids, continued."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from foredraft.server import reports
from foredraft.server.bodies import BodyRoute, Many
from foredraft.server.errors import ApiError, error_object, not_supported
from foredraft.server.fields import OpenAISampling, check_count
from foredraft.server.generation import Generation, Tokens, begin
from foredraft.server.reports import Logprobs
from foredraft.server.service import Prompt, service_of
from foredraft.server.sse import event, respond
from foredraft.types import TokenEvent

PATH = "/v1/completions"
DEFAULT_MAX_TOKENS = 16  # OpenAI's
router = APIRouter(route_class=BodyRoute)


class CompletionRequest(OpenAISampling):
    prompt: str | Many[str] | Many[int] | Many[Many[int]]
    logprobs: int | None = None
    best_of: int | None = None
    echo: bool | None = None
    suffix: str | None = None


@router.post(PATH)
async def create_completion(body: CompletionRequest, request: Request) -> Response:
    """Continue one prompt or several."""
    service = service_of(request)
    body.check_common(service)
    if body.echo:
        raise not_supported("echo", "put the prompt in front of the answer yourself")
    if body.suffix is not None:
        raise not_supported("suffix", "the models here only continue a prompt")
    if body.best_of not in (None, body.n or 1):
        raise not_supported("best_of", "use n, and choose among its answers")
    prompts = _prompts(body.prompt)
    check_count(service.limits.max_prompts, "prompt", prompts)
    params = body.sampling_params(service, DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens)
    generation = await begin(service, request, body, prompts, params)
    logprobs = None if body.logprobs is None else Logprobs(service.llm.tokenizer, body.logprobs)
    answer = CompletionAnswer(generation, service.name, logprobs, body.includes_usage)
    return await respond(generation, answer, service.limits, body.stream)


def _prompts(given: str | list[str] | list[int] | list[list[int]]) -> list[Prompt]:
    if isinstance(given, str) or (given and isinstance(given[0], int)):
        return [given]
    return list(given)  # type: ignore[arg-type]


class CompletionAnswer:
    """A generation as /v1/completions writes it."""

    def __init__(self, generation: Generation, model: str, logprobs: Logprobs | None, includes_usage: bool) -> None:
        self._generation = generation
        self._logprobs = logprobs
        self._includes_usage = includes_usage
        self._lengths: dict[int, int] = {}  # characters of each choice that were sent
        self._head = {
            "id": f"cmpl-{generation.id}",
            "object": "text_completion",
            "created": generation.created,
            "model": model,
        }

    def body(self) -> dict[str, Any]:
        choices = (  # one at a time: each may have many log probabilities
            {
                "index": index,
                "text": output.text,
                "logprobs": self._logprobs.completion(output.logprobs or (), 0) if self._logprobs else None,
                "finish_reason": output.finish_reason,
                "stop_reason": output.stop_reason,
                "seed": output.seed,
            }
            for index, output in sorted(self._generation.outputs.items())
        )
        return {**self._head, "choices": choices, **reports.totals(self._generation)}

    def begin(self) -> bytes:
        return b""

    def delta(self, tokens: Tokens) -> bytes:
        return b"".join([self._chunk(index, its) for index, its in tokens.items()])

    def _chunk(self, index: int, tokens: list[TokenEvent]) -> bytes:
        text = "".join([token.text for token in tokens])
        offset = self._lengths.get(index, 0)
        self._lengths[index] = offset + len(text)
        last = tokens[-1]
        logprobs = self._logprobs.completion((token.logprob for token in tokens), offset) if self._logprobs else None
        choice: dict[str, Any] = {
            "index": index,
            "text": text,
            "logprobs": logprobs,
            "finish_reason": last.finish_reason,
        }
        if last.output is not None:
            choice |= {"stop_reason": last.output.stop_reason, "seed": last.output.seed}
        is_end = last.output is not None and self._generation.is_complete
        extra = {"metrics": reports.metrics(self._generation)} if is_end else {}
        return self._event([choice], **extra)

    def end(self) -> bytes:
        usage = self._event([], **reports.totals(self._generation)) if self._includes_usage else b""
        return usage + b"data: [DONE]\n\n"

    def _event(self, choices: list[dict[str, Any]], **extra: Any) -> bytes:
        return event({**self._head, "choices": choices, **extra})

    def failure(self, error: ApiError) -> bytes:
        return event(error_object(PATH, error)) + b"data: [DONE]\n\n"
