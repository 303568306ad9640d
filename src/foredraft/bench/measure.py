"""Plain decoding and every speculation setting in one run, interleaved, so that a slow moment of the machine hits all.

No setting may profit from having seen a prompt. Stores of finished outputs are cleared before every timed run. The
controller starts every run of a group with what it had learnt before that group, as in service: the acceptance of other
prompts, never of this one. The measured costs of runs on this machine are kept. The LLM must have been opened with
`prefix_caching=False`.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from itertools import cycle, islice, zip_longest
from typing import TYPE_CHECKING, Any

from foredraft.control.economics import VerifyCurve
from foredraft.errors import InvalidParameter, InvalidPrompt
from foredraft.outputs import RequestOutput
from foredraft.params import MAX_SEED, SamplingParams
from foredraft.proposers.registry import parse_spec
from foredraft.reports.prompts import Question

if TYPE_CHECKING:
    from foredraft.engine.engine import Engine
    from foredraft.llm import LLM

OFF = "off"
MAX_BATCH = 256
WARM_UP_TOKENS = 8

Tick = Callable[[], None]  # called after each timed run, for a progress bar


@dataclass(frozen=True)
class Plan:
    """What to measure; every bad value is refused here. Plain decoding is always part of it."""

    specs: tuple[str, ...]
    batches: tuple[int, ...] = (1,)
    temperatures: tuple[float, ...] = (0.0,)
    max_tokens: int = 128
    repeats: int = 3
    seed: int = 1

    def __post_init__(self) -> None:
        for spec in self.specs:
            parse_spec(spec)
        for temperature in self.temperatures:
            SamplingParams(max_tokens=self.max_tokens, temperature=temperature, seed=self.seed)
        for batch in self.batches:
            if not 1 <= batch <= MAX_BATCH:
                raise InvalidParameter(f"batch={batch} must be a whole number from 1 to {MAX_BATCH}.")
        if self.repeats < 1:
            raise InvalidParameter(f"repeats={self.repeats} must be a whole number of at least 1.")

    @property
    def settings(self) -> tuple[str, ...]:
        """Plain decoding, then every other setting once."""
        return tuple(dict.fromkeys((OFF, *self.specs)))

    def params(self, temperature: float, prompt: int) -> SamplingParams:
        """Those of one prompt: all settings write it with the same seed."""
        seed = (self.seed + prompt) % (MAX_SEED + 1)
        return SamplingParams(max_tokens=self.max_tokens, temperature=temperature, seed=seed)


@dataclass(frozen=True)
class Group:
    """Prompts of one category, by their indices, that run at once; some more than once where the category has few."""

    category: str
    prompts: tuple[int, ...]


@dataclass(frozen=True)
class Run:
    """One prompt of one timed run. `seconds` is the time of the whole call, which the prompts of a group share."""

    prompt: int
    category: str
    batch: int
    group: int
    group_size: int
    repeat: int
    temperature: float
    spec: str
    tokens: int
    seconds: float
    target_runs: int
    tokens_per_run: float
    acceptance_per_depth: list[float]
    by_origin: dict[str, int]
    drafted: int
    accepted: int
    draft_time_s: float
    verify_time_s: float
    token_ids_hash: str
    error: str | None = None


class Learnt:
    """What an engine's controller has learnt about acceptance, to go back to; nothing before there is one."""

    def __init__(self, engine: Engine) -> None:
        controller = engine.speculation.controller
        self._controller = controller.copy() if controller else None

    def back_to(self, engine: Engine) -> None:
        if self._controller:
            engine.speculation.controller = self._controller.copy()


def groups_of(questions: Sequence[Question], batch: int) -> list[Group]:
    """Chunks of each category in order, categories taking turns. What is missing to a full batch is taken from the
    category's beginning again: a batch of 8 is 8 sequences at once, or it says nothing about a batch of 8."""
    by_category: dict[str, list[int]] = {}
    for index, question in enumerate(questions):
        by_category.setdefault(question.category, []).append(index)
    chunks = [
        [
            Group(category, tuple(islice(cycle([*indices[start:], *indices[:start]]), batch)))
            for start in range(0, len(indices), batch)
        ]
        for category, indices in by_category.items()
    ]
    return [group for turn in zip_longest(*chunks) for group in turn if group is not None]


def in_turn(settings: Sequence[str], turn: int) -> list[str]:
    """The settings, each in its turn the first."""
    first = turn % len(settings)
    return [*settings[first:], *settings[:first]]


def num_timed_runs(questions: Sequence[Question], plan: Plan) -> int:
    """How often `measure` ticks."""
    groups = sum(len(groups_of(questions, batch)) for batch in plan.batches)
    return groups * len(plan.temperatures) * plan.repeats * len(plan.settings)


def measure(llm: LLM, questions: Sequence[Question], plan: Plan, tick: Tick) -> list[Run]:
    """All timed runs, in the order in which they were made, after a warm-up that does not count."""
    prompts = [_encode(llm, index, question) for index, question in enumerate(questions)]
    warm_up(llm, prompts, plan)
    runs: list[Run] = []
    for temperature in plan.temperatures:
        params = [plan.params(temperature, index) for index in range(len(prompts))]
        for batch in plan.batches:
            for number, group in enumerate(groups_of(questions, batch)):
                chosen = [prompts[index] for index in group.prompts], [params[index] for index in group.prompts]
                learnt = Learnt(llm.engine)
                for repeat in range(plan.repeats):
                    for spec in in_turn(plan.settings, number + repeat):
                        if parse_spec(spec).adaptive:  # others teach the controller nothing about acceptance
                            learnt.back_to(llm.engine)
                        seconds, outputs = timed(llm, *chosen, spec)
                        point = {"batch": batch, "group": number, "repeat": repeat, "temperature": temperature}
                        for index, output in zip(group.prompts, outputs, strict=True):
                            runs.append(_run(index, group, spec, seconds, output, **point))
                        tick()
    return runs


def _encode(llm: LLM, index: int, question: Question) -> list[int]:
    tokens = question.encoded(llm)
    if not 0 < len(tokens) < llm.max_model_len:
        raise InvalidPrompt(
            f"Prompt {index} of the suite has {len(tokens)} tokens, but the context holds {llm.max_model_len} "
            "including the answer; take it out."
        )
    return tokens


def warm_up(llm: LLM, prompts: list[list[int]], plan: Plan) -> None:
    """The first runs of a model and of a proposer are the slowest, and the first of the controller may measure the
    machine: every setting makes one at the largest batch. Prompts are read backwards, which tells nothing of them."""
    params = SamplingParams(max_tokens=min(WARM_UP_TOKENS, plan.max_tokens), temperature=0.0)
    backwards = [prompt[::-1] for prompt in prompts[: max(plan.batches)]]
    for spec in plan.settings:
        timed(llm, backwards, params, spec)


def timed(
    llm: LLM, prompts: list[list[int]], params: SamplingParams | list[SamplingParams], spec: str
) -> tuple[float, list[RequestOutput]]:
    llm.engine.speculation.clear()
    with _proposers_of(llm.engine, spec):
        started = time.perf_counter()
        outputs = llm.generate(prompts, params, spec=spec)
        return time.perf_counter() - started, outputs


def verify_curve(llm: LLM) -> VerifyCurve:
    """Time the target by its rows. Nothing else may run."""
    from foredraft.engine.calibration import calibrate

    return calibrate(llm.engine.runner, llm.engine.scheduler.pool, llm.max_model_len).curve


@contextmanager
def _proposers_of(engine: Engine, spec: str) -> Iterator[None]:
    """Hide the proposers of other settings, which would learn from this run and charge it for that."""
    assignments = engine.speculation.assignments
    everyone, wanted = assignments.proposers, {str(choice) for choice in assignments.choices(parse_spec(spec))}
    assignments.proposers = {name: proposer for name, proposer in everyone.items() if name in wanted}
    try:
        yield
    finally:
        assignments.proposers = {**everyone, **assignments.proposers}


def _run(prompt: int, of: Group, spec: str, seconds: float, output: RequestOutput, **point: Any) -> Run:
    """`point` are the fields of a Run that say which timed run it is."""
    metrics = output.metrics
    return Run(
        prompt=prompt,
        category=of.category,
        group_size=len(of.prompts),
        spec=spec,
        tokens=metrics.emitted_tokens,
        seconds=seconds,
        drafted=metrics.drafted_tokens,
        accepted=metrics.accepted_tokens,
        token_ids_hash=hashlib.sha256(repr(output.token_ids).encode()).hexdigest()[:16],
        error=output.error,
        **point,
        **{each.name: getattr(metrics, each.name) for each in fields(Run) if hasattr(metrics, each.name)},
    )
