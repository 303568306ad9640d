"""A stand-in for an LLM that is benchmarked: its clock advances only while it writes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

from foredraft.errors import InvalidPrompt
from foredraft.outputs import CompletionOutput, RequestOutput
from foredraft.params import SamplingParams
from tests.unit.fake_llm import METRICS


@dataclass
class _Controller:
    """Remembers every text."""

    texts: list[str]

    def copy(self) -> _Controller:
        return _Controller(list(self.texts))


class TimedLLM:
    """Takes one second for plain decoding and half of one for anything else; a spec in `liars` writes other tokens."""

    dtype, backend_name, exact_report, max_model_len = "float32", "fake", "exact", 100

    def __init__(self, liars: tuple[str, ...] = (), error: str | None = None, **options: Any) -> None:
        self.options = options
        self.liars, self.error = liars, error
        self.clock = 0.0
        self.log: list[tuple[str, list[str], tuple[int | None, ...]]] = []
        self.forgotten = 0
        self.known: list[list[str]] = []  # what the controller remembered when it was asked
        self.seen: list[set[str]] = []  # the proposers that observed each run
        device = SimpleNamespace(type="cpu")
        assignments = SimpleNamespace(proposers={}, choices=lambda spec: spec.choices)
        self.engine = SimpleNamespace(
            speculation=SimpleNamespace(clear=self._forget, assignments=assignments, controller=None),
            runner=SimpleNamespace(backend=SimpleNamespace(device=device)),
        )

    def encode(self, prompt: Any) -> list[int]:
        if isinstance(prompt, list):
            raise InvalidPrompt("The model has no chat template.")
        return [ord(letter) for letter in prompt]

    def generate(
        self, prompts: list[list[int]], params: SamplingParams | list[SamplingParams], *, spec: str
    ) -> list[RequestOutput]:
        every = params if isinstance(params, list) else [params] * len(prompts)
        self.clock += 1.0 if spec == "off" else 0.5
        self.log.append((spec, ["".join(map(chr, prompt)) for prompt in prompts], tuple(p.seed for p in every)))
        if spec != "off":
            self.engine.speculation.assignments.proposers.setdefault(spec, object())
        self.seen.append(set(self.engine.speculation.assignments.proposers))
        if spec.startswith("auto"):
            self._learn("".join(map(chr, prompts[0])))
        tokens = [1, 2, 4 if spec in self.liars else 3]
        metrics = METRICS if spec == "off" else replace(METRICS, target_runs=2, drafted_tokens=2, accepted_tokens=1)
        output = CompletionOutput(0, "", tokens, "length", None, 7, None, None, metrics, self.error)
        return [RequestOutput(str(index), None, prompt, [output]) for index, prompt in enumerate(prompts)]

    def close(self) -> None:
        """Nothing is open."""

    def _learn(self, text: str) -> None:
        """The controller remembers every text, and it comes with the first request that leaves the choice to it."""
        speculation = self.engine.speculation
        if speculation.controller is None:
            speculation.controller = _Controller([])
        self.known.append(list(speculation.controller.texts))
        speculation.controller.texts.append(text)

    def _forget(self) -> None:
        self.forgotten += 1
