"""What all routes share: the model, its engine, and what the operator allows."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from starlette.requests import Request

from foredraft.engine.async_engine import AsyncEngine
from foredraft.errors import ForedraftError
from foredraft.llm import LLM
from foredraft.proposers.allowed_specs import AllowedSpecs
from foredraft.proposers.registry import Spec, parse_spec
from foredraft.server.errors import ApiError, bad_request
from foredraft.server.lifecycle import Lifecycle
from foredraft.server.limits import Limits
from foredraft.server.metrics import Metrics

DEFAULT_SPECS = ("auto", "ngram", "suffix")  # what requests may name where the operator says nothing: they load no file
_LONGEST_RETRY_S = 60
_TOKENISING_AT_ONCE = 8  # requests that only tokenise: they share threads with those that generate


@dataclass(frozen=True)
class Conversation:
    """A prompt that the model's chat template writes."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None = None


Prompt = str | list[int] | Conversation


@dataclass(frozen=True)
class Service:
    """One served model. `names` are those that requests may use for it, the first is the one that answers carry.
    `given_name` is how the operator named it, perhaps a path: requests may use it too, and nobody is told of it."""

    llm: LLM
    engine: AsyncEngine
    names: tuple[str, ...]
    specs: AllowedSpecs
    default_spec: Spec
    limits: Limits
    metrics: Metrics
    honours_priority: bool = False
    shares_answers: bool = False  # among all requests without a `cache_salt`
    given_name: str = ""
    started: int = field(default_factory=lambda: int(time.time()))
    lifecycle: Lifecycle = field(default_factory=Lifecycle)
    tokenising: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(_TOKENISING_AT_ONCE))
    recent_s: deque[float] = field(default_factory=lambda: deque(maxlen=32))  # how long the last requests took

    @property
    def name(self) -> str:
        return self.names[0]

    def has_name(self, name: str) -> bool:
        return name in self.names or name == self.given_name

    def check_model(self, name: str | None) -> None:
        if name is not None and not self.has_name(name):
            raise ApiError(
                404,
                f"The model {name[:100]!r} is not served here; use {' or '.join(self.names)}.",
                "model",
                "model_not_found",
            )

    def spec(self, text: str | None) -> Spec:
        """The speculation that a request names; raises ApiError for one that is none or that is not allowed."""
        try:
            return self.default_spec if text is None else self.specs.check(text)
        except ForedraftError as error:
            raise bad_request(str(error), "spec") from error

    def retry_after_s(self) -> int:
        """When a place may be free: about as long as the requests in front take that wait now."""
        stats = self.engine.stats()
        mean = sum(self.recent_s) / len(self.recent_s) if self.recent_s else 1.0
        rounds = 1 + stats.waiting / max(1, stats.running)
        return max(1, min(_LONGEST_RETRY_S, round(mean * rounds)))


def make_service(
    llm: LLM,
    names: Iterable[str],
    limits: Limits,
    allowed_specs: Iterable[str] = DEFAULT_SPECS,
    honours_priority: bool = False,
    label: str = "0",
    shares_answers: bool = False,
    given_name: str = "",
) -> Service:
    """Starts the engine's thread and the rendering of conversations. The default spec is the LLM's own and is always
    allowed. `label` tells this server's metrics from those of its replicas."""

    def encode(prompt: Prompt) -> list[int]:
        if isinstance(prompt, Conversation):
            return llm.tokenizer.encode_chat(prompt.messages, prompt.tools, llm.max_model_len)
        if isinstance(prompt, str):
            return llm.tokenizer.encode(prompt, max_tokens=llm.max_model_len)
        return prompt

    llm.tokenizer.warm_chat()
    engine = AsyncEngine(llm.engine, encode, limits.max_waiting)
    served = tuple(names)
    return Service(
        llm=llm,
        engine=engine,
        names=served,
        specs=AllowedSpecs((llm.spec, *allowed_specs)),
        default_spec=parse_spec(llm.spec),
        limits=limits,
        metrics=Metrics(served[0], engine.stats, label),
        honours_priority=honours_priority,
        shares_answers=shares_answers,
        given_name=given_name,
    )


def public_name(model: str) -> str:
    """What clients call a model: of a path only its end, as the rest is about this machine."""
    return Path(model).name if Path(model).exists() else model


def service_of(request: Request) -> Service:
    service = request.app.state.service
    assert isinstance(service, Service)
    return service
