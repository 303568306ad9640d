"""What all routes share: the model, its engine, and what the operator allows."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Annotated, Any

from fastapi import Depends
from starlette.requests import Request

from foredraft.engine.async_engine import AsyncEngine
from foredraft.errors import ForedraftError
from foredraft.llm import LLM
from foredraft.models.tokenizer import Tokenizer
from foredraft.proposers.allowed_specs import AllowedSpecs
from foredraft.proposers.registry import Spec, parse_spec
from foredraft.server.errors import ApiError, bad_request, not_supported
from foredraft.server.limits import Limits
from foredraft.server.metrics import Metrics

DEFAULT_SPECS = (
    "auto",
    "ngram",
    "suffix",
    "prediction",
)  # what requests may name where the operator says nothing: they load no file
_LONGEST_RETRY_S = 60
_TOKENISING_AT_ONCE = 8  # requests that only tokenise: they share threads with those that generate


@dataclass(frozen=True)
class Conversation:
    """A prompt that the model's chat template writes."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None = None
    variables: dict[str, Any] | None = None  # that the template may read beside them
    continues: bool = False  # whether the answer goes on with the last message
    add_generation_prompt: bool = True  # else whether an answer is begun

    def encode(self, tokenizer: Tokenizer, max_tokens: int | None = None) -> list[int]:
        return tokenizer.encode_chat(
            self.messages, self.tools, max_tokens, self.variables, self.continues, self.add_generation_prompt
        )


@dataclass(frozen=True)
class FillIn:
    """A prompt with a gap that is to be filled."""

    before: str
    behind: str
    files: tuple[tuple[str, str], ...] = ()  # names and texts of others
    begun: str = ""  # how the filling begins

    def encode(self, tokenizer: Tokenizer, max_tokens: int | None = None) -> list[int]:
        return tokenizer.encode_fill_in(self.before, self.behind, self.files, self.begun, max_tokens)


Prompt = str | list[int] | Conversation | FillIn


class Service:
    """One served model. `names` are those that requests may use for it, the first is the one that answers carry.
    `given_name` is how the operator named it, perhaps a path: requests may use it too, and nobody is told of it.
    `label` tells this server's metrics from those of its replicas."""

    def __init__(
        self,
        llm: LLM,
        names: Iterable[str],
        limits: Limits,
        allowed_specs: Iterable[str] = DEFAULT_SPECS,
        honours_priority: bool = False,
        label: str = "0",
        shares_answers: bool = False,
        given_name: str = "",
        is_strict: bool = False,
    ) -> None:
        """Starts the engine's thread and the rendering of conversations. The default spec is the LLM's own and is
        always allowed."""
        self.specs = AllowedSpecs((llm.spec, *allowed_specs))
        llm.tokenizer.warm_chat()
        self.fills_in = llm.tokenizer.fill_in is not None  # looking through a vocabulary takes a while
        self.llm = llm
        self.engine = AsyncEngine(llm.engine, self._encode, limits.max_waiting)
        self.names = tuple(names)
        self.name = self.names[0]
        self.limits = limits
        self.metrics = Metrics(self.name, self.engine.stats, label)
        self.honours_priority = honours_priority
        self.shares_answers = shares_answers  # among all requests without a `cache_salt`
        self.is_strict = is_strict  # requests with unknown fields are refused
        self.started = int(time.time())
        self.is_draining = False  # from SIGTERM on; no request may begin any more
        self.num_answering = 0  # requests
        self.tokenising = asyncio.Semaphore(_TOKENISING_AT_ONCE)
        self.recent_s: deque[float] = deque(maxlen=32)  # how long the last requests took
        self._default_spec = parse_spec(llm.spec)
        self._given_name = given_name

    def check_model(self, name: str | None) -> None:
        if name is not None and name not in (*self.names, self._given_name):
            raise ApiError(
                404,
                f"The model {name[:100]!r} is not served here; use {' or '.join(self.names)}.",
                "model",
                "model_not_found",
            )

    def fill_in(
        self, before: str, behind: str, files: Iterable[tuple[str, str]] = (), begun: str = ""
    ) -> tuple[FillIn, list[int]]:
        """A prompt with a gap, and the tokens that end what fills it; raises ApiError where the model has no tokens for
        that."""
        tokenizer = self.llm.tokenizer
        if tokenizer.fill_in is None:
            raise not_supported(
                "suffix", "this model has no tokens for fill-in-the-middle and only continues a prompt; serve a coder"
            )
        return FillIn(before, behind, tuple(files), begun), list(tokenizer.fill_in.end_ids)

    def spec(self, text: str | None) -> Spec:
        """The speculation that a request names; raises ApiError for one that is none or that is not allowed."""
        try:
            return self._default_spec if text is None else self.specs.check(text)
        except ForedraftError as error:
            raise bad_request(str(error), "spec") from error

    def retry_after_s(self) -> int:
        """When a place may be free: about as long as the requests in front take that wait now."""
        stats = self.engine.stats()
        return retry_after_s(self.recent_s, 1 + stats.waiting / max(1, stats.running))

    def _encode(self, prompt: Prompt) -> list[int]:
        if isinstance(prompt, Conversation | FillIn):
            return prompt.encode(self.llm.tokenizer, self.llm.max_model_len)
        if isinstance(prompt, str):
            return self.llm.tokenizer.encode(prompt, max_tokens=self.llm.max_model_len)
        return prompt


def retry_after_s(recent_s: Collection[float], rounds: float = 1.0) -> int:
    """What `rounds` requests take one after the other, if they are like the last ones."""
    mean = sum(recent_s) / len(recent_s) if recent_s else 1.0
    return max(1, min(_LONGEST_RETRY_S, round(mean * rounds)))


async def service_of(request: Request) -> Service:
    service = request.app.state.service
    assert isinstance(service, Service)
    return service


Served = Annotated[Service, Depends(service_of)]  # as handlers take it
