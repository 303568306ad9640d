"""One request on its way through the engine: admitted, read, timed, and given up when its client leaves."""

from __future__ import annotations

import asyncio
import logging
import time
from contextlib import suppress
from math import inf
from typing import Any

from starlette.requests import Request

from foredraft.answers import AnswerFormat
from foredraft.engine.stream import Stream
from foredraft.errors import ForedraftError
from foredraft.outputs import CompletionOutput, TokenEvent
from foredraft.params import SamplingParams
from foredraft.proposers.registry import Spec
from foredraft.server.auth import key_of
from foredraft.server.errors import ApiError, as_api_error, failure_of
from foredraft.server.fields import GenerationRequest
from foredraft.server.log import record_of
from foredraft.server.service import Conversation, FillIn, Prompt, Service
from foredraft.server.sharing import with_sharing

log = logging.getLogger(__name__)

NOTE_HEADER = "x-foredraft-note"
Tokens = dict[int, list[TokenEvent]]  # by the choice that they belong to; no list is empty


class ClientGone(Exception):
    """Nobody waits for the answer any more."""


class Generation:
    """The answers to one request. Choices are numbered through: those of the first prompt come first."""

    def __init__(
        self,
        service: Service,
        request: Request,
        streams: list[Stream],
        arrived: asyncio.Event,
        params: SamplingParams,
    ) -> None:
        self.outputs: dict[int, CompletionOutput] = {}
        self.created = int(time.time())
        self.client_left = False
        self.num_choices = len(streams) * params.n
        self._service = service
        self.tokenizer = service.llm.tokenizer
        self._record = record_of(request)
        self.id = self._record.id
        self._streams = streams
        self._news = arrived  # of all streams: something may have changed since they were last read
        self._params = params
        self._loop = asyncio.get_running_loop()
        self._started = self._loop.time()
        self._last_s: dict[int, float] = {}  # when the last tokens of a choice came
        self._first_s: float | None = None  # when the first tokens of all came
        self._is_closed = False
        service.num_answering += 1
        self._watch = asyncio.create_task(self._watch_client(request))
        self._ticker = self._loop.call_later(service.limits.tick_s, self._tick)

    @property
    def answer_format(self) -> AnswerFormat:
        """How the answers to the first prompt are to be read."""
        return self.tokenizer.answer_format(self._streams[0].prompt_token_ids, self._params.grammar is not None)

    @property
    def num_prompt_tokens(self) -> int:
        return sum(len(stream.prompt_token_ids) for stream in self._streams)

    @property
    def num_cached_tokens(self) -> int:
        return sum(self.outputs[index].metrics.cached_tokens for index in self.outputs if not index % self._params.n)

    @property
    def is_complete(self) -> bool:
        return len(self.outputs) == self.num_choices

    @property
    def is_large(self) -> bool:
        """Whether writing the answers as a whole takes so long that others would notice."""
        num_tokens = sum(len(output.token_ids) for output in self.outputs.values())
        size = num_tokens * (1 + (self._params.logprobs or 0))
        if self._params.prompt_logprobs is not None:
            size += self.num_prompt_tokens * self._params.n * (1 + self._params.prompt_logprobs)
        return size > 20_000

    async def admitted(self) -> None:
        """Wait until the engine has taken the whole request; raises ApiError or ClientGone."""
        try:
            async with asyncio.timeout(self._service.limits.waiting_timeout_s):
                for stream in self._streams:
                    await stream.admitted()
        except TimeoutError:
            raise self._waited_too_long() from None
        if self.client_left:
            raise ClientGone
        for stream in self._streams:
            self._service.metrics.count_request(len(stream.prompt_token_ids), self._params)

    async def next(self, patience_s: float = inf) -> Tokens | None:
        """All tokens since the last call: none when all answers are complete or the client has left. None: nothing came
        within `patience_s`."""
        now = self._loop.time()
        patient_until = now + patience_s
        while not self.is_complete and not self.client_left:
            self._check_clock(now)
            if now >= patient_until:
                return None
            await self._news.wait()
            self._news.clear()
            now = self._loop.time()
            if tokens := self._arrived(now):
                return tokens
        return {}

    async def finish(self) -> None:
        """Wait for all answers; raises ApiError or ClientGone."""
        while await self.next():
            pass
        if self.client_left:
            raise ClientGone

    async def close(self) -> None:
        """End whatever still runs, and account for the request. May be called again."""
        if self._is_closed:
            return
        self._is_closed = True
        self._ticker.cancel()
        self._watch.cancel()
        with suppress(asyncio.CancelledError):
            await self._watch
        for stream in self._streams:
            await stream.aclose()
        self._service.num_answering -= 1
        if self.client_left:
            self._service.metrics.disconnects.inc()
        else:
            self._service.recent_s.append(self._loop.time() - self._started)
        self._describe()

    def _arrived(self, now: float) -> Tokens:
        tokens: Tokens = {}
        for place, stream in enumerate(self._streams):
            for event in stream.arrived():
                index = place * self._params.n + event.index
                tokens.setdefault(index, []).append(event)
                if event.output is not None:
                    self._end(index, event.output, len(stream.prompt_token_ids))
        if tokens:
            self._first_s = self._first_s or now
        for index in tokens:
            if index in self._last_s:
                self._service.metrics.gaps.observe(now - self._last_s[index])
            self._last_s[index] = now
        return tokens

    def _end(self, index: int, output: CompletionOutput, num_prompt_tokens: int) -> None:
        self.outputs[index] = output
        self._service.metrics.count_output(output, num_prompt_tokens)
        if output.finish_reason == "error":
            log.error("request %s failed: %s", self.id, output.error)
            raise failure_of(output.error)
        if output.finish_reason == "abort":
            raise ApiError(503, "The server stopped before the answer was complete; send it to another one.")

    def _check_clock(self, now: float) -> None:
        limits = self._service.limits
        if self._first_s is None and now >= self._started + limits.waiting_timeout_s:
            raise self._waited_too_long()
        if self._first_s is not None and now >= self._first_s + limits.running_timeout_s:
            seconds = limits.running_timeout_s
            raise ApiError(504, f"The answer took longer than {seconds:g} seconds; lower max_tokens.")

    def _tick(self) -> None:
        """Has the reader look at the clock now and then: a timeout for every token would cost more than the token."""
        self._news.set()
        self._ticker = self._loop.call_later(self._service.limits.tick_s, self._tick)

    async def _watch_client(self, request: Request) -> None:
        """The body has been read, so what comes next is the end of the connection."""
        while (await request.receive())["type"] != "http.disconnect":
            pass
        self.client_left = not self.is_complete  # else it has what it came for
        for stream in self._streams:
            await stream.aclose()

    def _waited_too_long(self) -> ApiError:
        seconds = self._service.limits.waiting_timeout_s
        retry = self._service.retry_after_s()
        return ApiError(503, f"No token came within {seconds:g} seconds; try again later.", retry_after_s=retry)

    def _describe(self) -> None:
        """Into the request's line of the log."""
        outputs = list(self.outputs.values())
        fields = self._record.fields
        fields["prompt_tokens"] = self.num_prompt_tokens
        fields["completion_tokens"] = sum(len(output.token_ids) for output in outputs)
        fields["finish"] = "disconnect" if self.client_left else [output.finish_reason for output in outputs]
        if outputs:
            fields["queue_s"] = round(outputs[0].metrics.queue_time_s, 4)
            fields["first_token_s"] = round(outputs[0].metrics.time_to_first_token_s, 4)
            fields["tokens_per_run"] = round(outputs[0].metrics.tokens_per_run, 3)
        if self._record.log_prompts:
            fields["answers"] = [output.text for output in outputs]


async def begin(
    service: Service, request: Request, body: GenerationRequest, prompts: list[Prompt], params: SamplingParams
) -> Generation:
    """Queue a request and wait until it is admitted. Load is checked first, before any prompt is tokenised. All
    requests pass here, so none shares anything under a salt of its own choice."""
    spec = service.spec(body.spec)
    if service.is_draining:
        raise ApiError(503, "The server is about to stop; send the request to another one.", retry_after_s=5)
    params = with_sharing(params, key_of(request.scope), service.shares_answers)
    record = record_of(request)
    record.fields["spec"] = _written(spec)
    if record.log_prompts:
        record.fields["prompts"] = [_logged(each) for each in prompts]
    streams: list[Stream] = []
    arrived = asyncio.Event()
    generation: Generation | None = None
    try:
        service.engine.check_load(len(prompts) * params.n)  # of all before the first: a part would be in others' way
        for prompt in prompts:
            streams.append(service.engine.generate(prompt, params, spec, priority=body.priority or 0, arrived=arrived))
        generation = Generation(service, request, streams, arrived, params)
        await generation.admitted()
        if note := body.cut_note(service, max(len(stream.prompt_token_ids) for stream in streams)):
            record.headers[NOTE_HEADER] = note
        return generation
    except BaseException as error:
        if generation is not None:
            await generation.close()
        for stream in streams:
            await stream.aclose()
        if isinstance(error, ForedraftError):
            raise as_api_error(error, service.retry_after_s()) from error
        if isinstance(error, RuntimeError) and not service.engine.is_alive:
            raise ApiError(503, "The server is about to stop; send the request to another one.") from error
        raise


def _logged(prompt: Prompt) -> Any:
    if isinstance(prompt, FillIn):
        return {"before": prompt.before, "behind": prompt.behind}
    return prompt.messages if isinstance(prompt, Conversation) else prompt


def _written(spec: Spec) -> str:
    joined = "+".join(map(str, spec.choices))
    return f"auto({joined})" if spec.adaptive and joined else "auto" if spec.adaptive else joined or "off"
