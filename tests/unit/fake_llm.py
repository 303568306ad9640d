"""A stand-in for foredraft.llm, for tests of what is around the engine: it answers with fixed words."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from types import ModuleType
from typing import Any

from foredraft.errors import InvalidModel, InvalidPrompt
from foredraft.outputs import CompletionOutput, SpecMetrics, TokenEvent
from foredraft.params import SamplingParams
from foredraft.types import TARGET, TokenLogprob

CHUNKS = 8  # of a prompt that says "long"
WORDS = ["Hello", " there", "."]
METRICS = SpecMetrics(
    target_runs=3,
    drafted_tokens=0,
    accepted_tokens=0,
    emitted_tokens=3,
    tokens_per_run=1.0,
    acceptance_rate=0.0,
    acceptance_per_depth=[],
    by_origin={"target": 3},
    draft_time_s=0.0,
    verify_time_s=0.3,
    total_time_s=0.4,
    time_to_first_token_s=0.2,
    inter_token_latency_s=0.1,
)


class FakeLLM:
    """Answers every prompt with WORDS; the last prompt finishes first. A long one is computed in CHUNKS. `log` records
    what it was asked.

    The proposers that `spec` names draft the words before the last one, and the model "some/unfaithful" then writes
    others.
    """

    backend_name = "fake"
    dtype = "float32"

    def __init__(self, log: list[Any], model: str, error: str | None, **options: Any) -> None:
        if model == "some/missing":
            raise InvalidModel("some/missing is not a model;\nuse foredraft models.")
        self.log = log
        self.faithful = model != "some/unfaithful"
        self.spec = options["spec"]
        self.error = error
        log.append(("open", model, options))

    def stream_many(
        self,
        prompts: list[Any],
        params: SamplingParams,
        *,
        spec: str | None = None,
        progress: Callable[[int, int], None] | None = None,
    ) -> Iterator[TokenEvent]:
        self.log.append(("ask", prompts, params, spec))
        origins = _origins(spec or self.spec)
        if any(prompt == "too long" for prompt in prompts):
            raise InvalidPrompt("The prompt is too long.")
        for chunk in range(CHUNKS if "long" in str(prompts) else 0):
            self.pause()
            if progress is not None:
                progress(chunk + 1, CHUNKS)
        for request in reversed(range(len(prompts))):
            for sample in range(params.n):
                for position, word in enumerate(WORDS):
                    self.pause()
                    if "interrupt" in str(prompts[request]) and position == 1:
                        raise KeyboardInterrupt
                    last = position == len(WORDS) - 1
                    output = self._output(sample, params, origins) if last else None
                    yield TokenEvent(str(request), sample, position, word, origins[position], output=output)

    def stream(self, prompt: Any, params: SamplingParams, **options: Any) -> Iterator[TokenEvent]:
        return self.stream_many([prompt], params, **options)

    def pause(self) -> None:
        """Before each token; replaced where a test needs time to interrupt."""

    def _output(self, sample: int, params: SamplingParams, origins: list[str]) -> CompletionOutput:
        logprobs = [TokenLogprob(0, -0.5, {0: -0.5})] * 3 if params.logprobs is not None else None
        reason = "error" if self.error else "length"
        metrics = _metrics(origins)
        token_ids = [0, 1, 2] if self.faithful or not metrics.accepted_tokens else [0, 1, 3]
        return CompletionOutput(
            sample, "".join(WORDS), token_ids, reason, None, 7 + sample, logprobs, None, metrics, error=self.error
        )

    def close(self) -> None:
        self.log.append(("close",))


def _origins(spec: str) -> list[str]:
    """Who drafted each of WORDS."""
    proposers = [] if spec in ("off", "auto") else spec.split("+")[:2]
    return [*[TARGET] * (len(WORDS) - 1 - len(proposers)), *proposers, TARGET]


def _metrics(origins: list[str]) -> SpecMetrics:
    """Those of METRICS, and the time in the proportion of the runs that it took."""
    runs = origins.count(TARGET)
    return replace(
        METRICS,
        target_runs=runs,
        accepted_tokens=len(origins) - runs,
        tokens_per_run=len(origins) / runs,
        by_origin={origin: origins.count(origin) for origin in (TARGET, *sorted({*origins} - {TARGET}))},
        total_time_s=METRICS.total_time_s * (runs / len(origins)),
    )


def fake_module(log: list[Any], error: str | None = None) -> ModuleType:
    """Takes the place of foredraft.llm."""
    module = ModuleType("foredraft.llm")
    module.LLM = lambda model, **options: FakeLLM(log, model, error, **options)  # type: ignore[attr-defined]
    return module
