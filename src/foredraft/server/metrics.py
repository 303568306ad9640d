"""Prometheus metrics: under the names that vLLM uses, so that its dashboards and benchmarks read them, and our own."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator
from functools import partial
from itertools import accumulate
from statistics import median_high
from typing import Any, TypeVar

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import HistogramMetricFamily
from prometheus_client.registry import Collector

from foredraft.engine.stats import EngineStats
from foredraft.outputs import CompletionOutput, SpecMetrics
from foredraft.params import SamplingParams

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 80, 160, 320, 640)
_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000)
_N = (1, 2, 5, 10, 20)
_MAX_POSITIONS = 64  # deeper draft tokens are counted together: labels must not grow without end

_Metric = TypeVar("_Metric", Counter, Gauge, Histogram)

# Read when somebody looks.
_LOAD: dict[str, tuple[str, Callable[[EngineStats], float]]] = {
    "vllm:num_requests_running": ("Sequences that run.", lambda stats: stats.running),
    "vllm:num_requests_waiting": ("Sequences that wait.", lambda stats: stats.waiting),
    "vllm:kv_cache_usage_perc": ("Used share of the KV cache; 1 is all.", lambda stats: stats.kv_use),
    "foredraft:kv_cache_bytes_per_token": (
        "Bytes of K and V that every token takes.",
        lambda stats: stats.kv_bytes_per_token,
    ),
    "foredraft:kv_cache_bytes_per_window": (
        "Bytes of K and V that a sequence takes in layers with a sliding window, however long it is.",
        lambda stats: stats.kv_bytes_per_window,
    ),
    "foredraft:steps": ("Steps since the server started.", lambda stats: stats.num_steps),
    "foredraft:misfit_heads": (
        "Heads that do not seem to belong to this model: hardly any first token of theirs was right.",
        lambda stats: len(stats.misfit_heads),
    ),
    "foredraft:step_seconds": ("Median time of the last steps.", lambda stats: median_high(stats.step_times_s or (0,))),
}
# Sums of a field of SpecMetrics.
_COUNTS = {
    "vllm:generation_tokens": ("Tokens that were generated.", "emitted_tokens"),
    "vllm:prefix_cache_hits": ("Prompt tokens found in the prefix cache.", "cached_tokens"),
    "vllm:num_preemptions": ("Sequences that were preempted.", "preemptions"),
    "vllm:spec_decode_num_drafts": ("Runs that had draft tokens to verify.", "drafts"),
    "vllm:spec_decode_num_draft_tokens": ("Draft tokens that were verified.", "drafted_tokens"),
    "vllm:spec_decode_num_accepted_tokens": ("Draft tokens that were accepted.", "accepted_tokens"),
    "foredraft:target_runs": ("Runs of the target that gave tokens.", "target_runs"),
}
_SECONDS: dict[str, tuple[str, Callable[[SpecMetrics], float]]] = {
    "time_to_first_token": ("From arrival to the first token.", lambda m: m.time_to_first_token_s),
    "request_time_per_output_token": (
        "Mean time per token after the first, per answer.",
        lambda m: m.inter_token_latency_s,
    ),
    "e2e_request_latency": ("From arrival to the last token.", lambda m: m.total_time_s),
    "request_queue_time": ("From arrival to the first run.", lambda m: m.queue_time_s),
    "request_prefill_time": (
        "From the first run to the first token.",
        lambda m: m.time_to_first_token_s - m.queue_time_s,
    ),
    "request_decode_time": ("From the first token to the last.", lambda m: m.total_time_s - m.time_to_first_token_s),
    "request_inference_time": ("From the first run to the last token.", lambda m: m.total_time_s - m.queue_time_s),
}


class Metrics:
    """All metrics of one server, in a registry of its own. Everything has the labels `model_name` and `engine`, which
    is the server's own `label`."""

    def __init__(self, model_name: str, stats: Callable[[], EngineStats], label: str = "0") -> None:
        self._registry = CollectorRegistry()
        self._labels = {"model_name": model_name, "engine": label}
        own = partial(labelled, self._registry, self._labels)
        for name, (about, read) in _LOAD.items():
            own(Gauge, name, about).set_function(lambda read=read: float(read(stats())))  # type: ignore[misc]
        self._prompt_tokens = own(Counter, "vllm:prompt_tokens", "Prompt tokens of finished requests.")
        self._cache_queries = own(Counter, "vllm:prefix_cache_queries", "Prompt tokens looked up in the prefix cache.")
        self._counts = [(own(Counter, name, about), field) for name, (about, field) in _COUNTS.items()]
        self._seconds = [
            (own(Histogram, f"vllm:{name}_seconds", about, buckets=SECONDS), read)
            for name, (about, read) in _SECONDS.items()
        ]
        sizes = partial(own, Histogram, buckets=_TOKENS)
        self._request_prompt = sizes("vllm:request_prompt_tokens", "Prompt tokens per request.")
        self._request_output = sizes("vllm:request_generation_tokens", "Tokens per answer.")
        self._params_max = sizes("vllm:request_params_max_tokens", "max_tokens of requests.")
        self._params_n = own(Histogram, "vllm:request_params_n", "n of requests.", buckets=_N)
        self.gaps = Gaps(self._labels)
        self._registry.register(self.gaps)
        self._saved = own(Gauge, "foredraft:saved_seconds", "Time saved against plain decoding; below 0: lost.")
        self.disconnects = own(Counter, "foredraft:disconnects", "Requests whose client left before the end.")
        self._success = self._by("finished_reason", "vllm:request_success", "Finished sequences.")
        self._per_position = self._by(
            "position", "vllm:spec_decode_num_accepted_tokens_per_pos", "Accepted draft tokens by depth, from 0 on."
        )
        self._decisions = self._by("reason", "foredraft:decisions", "The controller's decisions by reason.")
        self._drafted_by = self._by("proposer", "foredraft:drafted_tokens_by_proposer", "Drafted draft tokens.")
        self._accepted_by = self._by("proposer", "foredraft:accepted_tokens_by_proposer", "Accepted draft tokens.")
        self._refused = self._by("status", "foredraft:requests_refused", "Requests that got an error.")

    def render(self) -> bytes:
        return generate_latest(self._registry)

    def count_refusal(self, status: int) -> None:
        self._refused(str(status)).inc()

    def count_request(self, num_prompt_tokens: int, params: SamplingParams) -> None:
        """A request that was admitted."""
        self._prompt_tokens.inc(num_prompt_tokens)
        self._request_prompt.observe(num_prompt_tokens)
        self._params_n.observe(params.n)
        self._params_max.observe(params.max_tokens)

    def count_output(self, output: CompletionOutput, num_prompt_tokens: int) -> None:
        """A sequence that has ended."""
        spec = output.metrics
        self._success(output.finish_reason).inc()
        self._request_output.observe(spec.emitted_tokens)
        self._cache_queries.inc(num_prompt_tokens)
        for counter, field in self._counts:
            counter.inc(getattr(spec, field))
        for histogram, seconds in self._seconds:
            histogram.observe(max(0.0, seconds(spec)))
        self._saved.inc(spec.saved_time_s)
        for depth, accepted in enumerate(spec.accepted_per_depth):
            self._per_position(str(min(depth, _MAX_POSITIONS))).inc(accepted)
        for reason, steps in spec.decisions.items():
            self._decisions(reason).inc(steps)
        for origin, count in spec.drafted_by_origin.items():
            self._drafted_by(origin).inc(count)
            self._accepted_by(origin).inc(spec.by_origin.get(origin, 0))

    def _by(self, label: str, name: str, about: str) -> Callable[[str], Counter]:
        """Counters by the values of one more label."""
        counter = Counter(name, about, (*self._labels, label), registry=self._registry)
        return partial(counter.labels, *self._labels.values())


def labelled(
    registry: CollectorRegistry, labels: dict[str, str], kind: type[_Metric], name: str, about: str, **more: Any
) -> _Metric:
    """A metric with these labels, shown from the first moment on, as 0."""
    return kind(name, about, tuple(labels), registry=registry, **more).labels(**labels)


class Gaps(Collector):
    """The histogram that is observed for every token: the library's own takes a lock and looks at every bucket."""

    def __init__(self, labels: dict[str, str]) -> None:
        self._labels = labels
        self._counts = [0] * (len(SECONDS) + 1)  # by bucket; the last has no upper bound
        self._sum_s = 0.0

    def observe(self, seconds: float) -> None:
        self._counts[bisect_left(SECONDS, seconds)] += 1
        self._sum_s += seconds

    def collect(self) -> Iterator[HistogramMetricFamily]:
        about = "Between two deliveries of tokens of one sequence."
        family = HistogramMetricFamily("vllm:inter_token_latency_seconds", about, labels=list(self._labels))
        bounds = [*(str(float(bound)) for bound in SECONDS), "+Inf"]
        buckets = list(zip(bounds, accumulate(self._counts)))
        family.add_metric(list(self._labels.values()), buckets, self._sum_s)
        yield family
