"""Measures a machine for simulations: runs, the rest of a step, and each proposer on prompts of each kind."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import zip_longest
from statistics import fmean, median
from time import perf_counter
from typing import TYPE_CHECKING

from foredraft.bench.suite import load_suite
from foredraft.control.economics import quotient
from foredraft.errors import InvalidSpec
from foredraft.params import SamplingParams
from foredraft.proposers.registry import parse_spec, proposer_class
from foredraft.reports.facts import cpu_name
from foredraft.simulate.machine import DraftFigures, DraftProfile, Machine
from foredraft.simulate.traffic import ANY
from foredraft.types import NO_DRAFT, Draft, Sequence, Work

if TYPE_CHECKING:
    from foredraft.control.costs import Calibration
    from foredraft.llm import LLM
    from foredraft.outputs import SpecMetrics
    from foredraft.reports.prompts import Question

_PROMPTS = 18  # three of each built-in kind
_MAX_TOKENS = 64
_BATCHES = (1, 8)  # sequences at once whose plain steps are timed
_OVERHEAD_PROMPT = 32  # tokens of the prompts of those steps
_TEMPERATURES = (0.0, 1.0)  # of draws: half of the requests are taken to be sampled
_DRAWS = 8  # draws that are timed together, as along one draft
_ROUNDS = 50  # repetitions of the timed draws
_SPREAD = 3.0  # standard deviation of the random logits that are drawn from


def measured_machine(
    llm: LLM, model: str, specs: Iterable[str], progress: Callable[[int, int], None] | None = None
) -> Machine:
    """Nothing else may run. Prompts are decoded one at a time and greedily; stores are cleared before each. Every spec
    names one proposer. The LLM must have been opened with `prefix_caching=False`. `progress` is told the measurements
    that are done, and how many there are."""
    from foredraft.engine.calibration import calibrate

    names = [_single(spec) for spec in specs]
    done, total = 0, 2 + len(names) * _PROMPTS + len(_TEMPERATURES)

    def tick() -> None:
        nonlocal done
        done += 1
        if progress is not None:
            progress(done, total)

    calibration = calibrate(llm.engine.runner, llm.engine.scheduler.pool, llm.max_model_len)
    tick()
    step_s, sequence_s = _overheads(llm, calibration)
    tick()
    proposers = {name: _figures(llm, name, tick) for name in names}
    draws: list[float] = []
    for temperature in _TEMPERATURES:
        draws.append(_draw_s(llm, temperature))
        tick()
    token_s = fmean(draws)
    return Machine(f"{model} {llm.dtype} on {cpu_name()}", calibration, proposers, step_s, sequence_s, token_s)


def _single(text: str) -> str:
    spec = parse_spec(text)
    if spec.adaptive or len(spec.choices) != 1:
        raise InvalidSpec(f"spec={text!r} must name one proposer, for instance suffix or ngram:k=4: auto is over all.")
    return str(spec.choices[0])


def _figures(llm: LLM, name: str, tick: Callable[[], None]) -> DraftFigures:
    by_kind: dict[str, list[SpecMetrics]] = {}
    for question in load_suite("builtin", _PROMPTS):
        by_kind.setdefault(question.category, []).append(_decoded(llm, question, name))
        tick()
    every = [metrics for found in by_kind.values() for metrics in found]
    choice = parse_spec(name).choices[0]
    free: bool = proposer_class(choice.name).free
    # a free one is queried in every run; another is charged by the depths that it drafted
    calls = sum(each.target_runs if free else sum(each.drafted_per_depth) for each in every)
    scheduling_s = _scheduling_s(llm) * sum(each.target_runs for each in every)
    seconds = quotient(max(0.0, sum(each.draft_time_s for each in every) - scheduling_s), calls)
    profiles = {kind: _profile(found) for kind, found in by_kind.items()}
    return DraftFigures(choice.name, free, {**profiles, ANY: _profile(every)}, seconds)


def _decoded(llm: LLM, question: Question, spec: str) -> SpecMetrics:
    params = SamplingParams(max_tokens=_MAX_TOKENS, temperature=0)
    prompt = question.encoded(llm)[: llm.max_model_len - _MAX_TOKENS]
    llm.engine.speculation.clear()
    return llm.generate([prompt], params, spec=spec)[0].metrics


def _scheduling_s(llm: LLM) -> float:
    """Seconds of a step that are counted as drafting but are not: those of a proposer that is never queried, because
    these requests have no grammar."""
    metrics = _decoded(llm, load_suite("builtin", 1)[0], "grammar")
    return quotient(metrics.draft_time_s, metrics.target_runs)


def _profile(found: list[SpecMetrics]) -> DraftProfile:
    runs = sum(metrics.target_runs for metrics in found)
    drafted, accepted = (
        [sum(counts) for counts in zip_longest(*each, fillvalue=0)]
        for each in ([m.drafted_per_depth for m in found], [m.accepted_per_depth for m in found])
    )
    return DraftProfile.of_counts(runs, drafted, accepted, sum(metrics.drafted_tokens for metrics in found))


def _draw_s(llm: LLM, temperature: float) -> float:
    """Seconds of the draw after one more accepted token: of a draft that is right to its end, less one without."""
    import torch

    from foredraft.sampling.draw import pick
    from foredraft.sampling.verify import verify

    vocab, backend = llm.engine.config.vocab_size, llm.engine.runner.backend
    params = SamplingParams(temperature=temperature, max_tokens=_MAX_TOKENS).resolved({})
    noise = torch.randn(1 + _DRAWS, vocab, generator=torch.Generator().manual_seed(0))
    rows = (_SPREAD * noise).to(backend.device)
    sequence = Sequence(0, "", 0, [1], 1, params, seed=0, max_tokens=_MAX_TOKENS)
    tokens = tuple(pick(rows[place], params, sequence.noise_seed, 1 + place) for place in range(_DRAWS))
    right = Draft.chain(tokens, 1.0, "")
    times: dict[int, list[float]] = {0: [], _DRAWS: []}
    for _ in range(_ROUNDS):
        for draft in (NO_DRAFT, right):
            started = perf_counter()
            (verdict,) = verify(rows[: 1 + len(draft)], [Work(sequence, 1, _DRAWS, draft)], backend.sample)
            times[len(verdict.path)].append(perf_counter() - started)
    return max(0.0, median(times[_DRAWS]) - median(times[0])) / _DRAWS


def _overheads(llm: LLM, calibration: Calibration) -> tuple[float, float]:
    """Seconds of a plain step beside its run: for any step, and for every sequence. A line through two batch sizes."""
    bare = Machine("", calibration)
    params = SamplingParams(max_tokens=_MAX_TOKENS, temperature=0, ignore_eos=True)
    context = _OVERHEAD_PROMPT + _MAX_TOKENS // 2
    over: list[float] = []
    for batch in _BATCHES:
        prompts = [[1 + (place + offset) % 99 for offset in range(_OVERHEAD_PROMPT)] for place in range(batch)]
        outputs = llm.generate(prompts, params, spec="off")
        step_s = fmean(output.metrics.inter_token_latency_s for output in outputs)
        over.append(step_s - bare.run_s(batch, batch * context))
    (few, many), (low, high) = _BATCHES, over
    sequence_s = max(0.0, (high - low) / (many - few))
    return max(0.0, low - few * sequence_s), sequence_s
