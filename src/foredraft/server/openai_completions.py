"""/v1/completions: prompts as texts or token ids, continued."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from foredraft.outputs import CompletionOutput, TokenEvent
from foredraft.server import reports
from foredraft.server.bodies import BodyRoute, Many
from foredraft.server.errors import ApiError, bad_request, error_object, not_supported
from foredraft.server.fields import OpenAIRequest, check_count
from foredraft.server.generation import Generation, Tokens, begin
from foredraft.server.reports import Logprobs, Offsets
from foredraft.server.service import Prompt, Served, Service
from foredraft.server.sse import DONE, event, respond

PATH = "/v1/completions"
router = APIRouter(route_class=BodyRoute)


class CompletionRequest(OpenAIRequest):
    prompt: str | Many[str] | Many[int] | Many[Many[int]]
    logprobs: int | None = None
    best_of: int | None = None
    echo: bool | None = None
    suffix: str | None = None


@router.post(PATH)
async def create_completion(body: CompletionRequest, request: Request, service: Served) -> Response:
    """Continue one prompt or several."""
    if body.echo:
        raise not_supported("echo", "put the prompt in front of the answer yourself")
    if body.best_of not in (None, body.n or 1):
        raise not_supported("best_of", "use n, and choose among its answers")
    prompts = _prompts(body.prompt)
    check_count(service.limits.max_prompts, "prompt", prompts)
    others: dict[str, Any] = {}
    if body.suffix:  # an empty one is none
        prompts, others["stop_token_ids"] = _with_gap(service, prompts, body.suffix, body.stop_token_ids)
    max_tokens = 16 if body.max_tokens is None else body.max_tokens  # OpenAI's default
    params = body.sampling_params(service, max_tokens, **others)
    generation = await begin(service, request, body, prompts, params)
    logprobs = None if body.logprobs is None else Logprobs(service.llm.tokenizer, body.logprobs)
    answer = CompletionAnswer(generation, service.name, logprobs, body.includes_usage)
    return await respond(generation, answer, service.limits, body.stream)


def _prompts(given: str | list[str] | list[int] | list[list[int]]) -> list[Prompt]:
    if isinstance(given, str) or (given and isinstance(given[0], int)):
        return [given]
    return list(given)  # type: ignore[arg-type]


def _with_gap(
    service: Service, prompts: list[Prompt], suffix: str, stop_token_ids: list[int] | None
) -> tuple[list[Prompt], list[int]]:
    """Prompts that stand before a gap with `suffix` behind it, and the tokens that end what fills it."""
    filled: list[Prompt] = []
    ends: list[int] = []
    for prompt in prompts:
        if not isinstance(prompt, str):
            raise bad_request("suffix needs prompts that are texts.", "suffix")
        fill_in, ends = service.fill_in(prompt, suffix)
        filled.append(fill_in)
    return filled, [*(stop_token_ids or ()), *ends]


class CompletionAnswer:
    """A generation as /v1/completions writes it: a list of choices, or chunks with one choice each. Chats differ in
    what a choice holds."""

    id_prefix, kind, chunk_kind = "cmpl", "text_completion", "text_completion"

    def __init__(self, generation: Generation, model: str, logprobs: Logprobs | None, includes_usage: bool) -> None:
        self._generation = generation
        self._logprobs = logprobs
        self._includes_usage = includes_usage
        self._offsets: defaultdict[int, Offsets] = defaultdict(Offsets)  # by choice
        own_id = f"{self.id_prefix}-{generation.id}"
        self._head = {"id": own_id, "object": self.kind, "created": generation.created, "model": model}
        self._chunk_head = {**self._head, "object": self.chunk_kind}

    def body(self) -> dict[str, Any]:
        choices = (  # one at a time: each may have many log probabilities
            {"index": index, **self._choice(index, output), "stop_reason": output.stop_reason, "seed": output.seed}
            for index, output in sorted(self._generation.outputs.items())
        )
        return {**self._head, "choices": choices, **reports.totals(self._generation)}

    def _choice(self, index: int, output: CompletionOutput) -> dict[str, Any]:
        """The complete answer, up to its finish reason."""
        logprobs = self._logprobs.completion(output.logprobs or (), Offsets()) if self._logprobs else None
        choice = {"text": output.text, "logprobs": logprobs, "finish_reason": output.finish_reason}
        prompt_logprobs = reports.prompt_logprobs(self._generation, output)
        return choice if prompt_logprobs is None else {**choice, "prompt_logprobs": prompt_logprobs}

    def begin(self) -> bytes:
        return b""

    def delta(self, tokens: Tokens) -> bytes:
        return b"".join([self._chunk(index, its) for index, its in tokens.items()])

    def _chunk(self, index: int, tokens: list[TokenEvent]) -> bytes:
        """The events of new tokens of one choice."""
        text = "".join([token.text for token in tokens])
        last, logprobs = tokens[-1], None
        if self._logprobs is not None:
            logprobs = self._logprobs.completion((token.logprob for token in tokens), self._offsets[index])
        choice = {"index": index, "text": text, "logprobs": logprobs, "finish_reason": last.finish_reason}
        return self._event([choice]) if last.output is None else self._last_event(choice, last.output)

    def _event(self, choices: list[dict[str, Any]], **extra: Any) -> bytes:
        return event({**self._chunk_head, "choices": choices, **extra})

    def _last_event(self, choice: dict[str, Any], output: CompletionOutput) -> bytes:
        """The event that completes an answer; with the last of all answers come the metrics."""
        extra = {"metrics": reports.metrics(self._generation)} if self._generation.is_complete else {}
        return self._event([{**choice, "stop_reason": output.stop_reason, "seed": output.seed}], **extra)

    def end(self) -> bytes:
        usage = self._event([], **reports.totals(self._generation)) if self._includes_usage else b""
        return usage + DONE

    def failure(self, error: ApiError) -> bytes:
        return event(error_object(PATH, error)) + DONE
