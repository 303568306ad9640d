"""Prometheus metrics: under the names that vLLM uses, so that its dashboards and benchmarks read them, and our own."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator
from itertools import accumulate
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import HistogramMetricFamily
from prometheus_client.registry import Collector

from foredraft.engine.stats import EngineStats
from foredraft.params import SamplingParams
from foredraft.types import CompletionOutput

if TYPE_CHECKING:
    from prometheus_client.metrics import MetricWrapperBase

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 80, 160, 320, 640)
_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000)
_COUNTS = (1, 2, 5, 10, 20)
_MAX_POSITIONS = 64  # deeper draft tokens are counted together: labels must not grow without end


class Metrics:
    """All metrics of one server, in a registry of its own. Everything has the labels `model_name` and `engine`, which
    is the server's own `label`."""

    def __init__(self, model_name: str, stats: Callable[[], EngineStats], label: str = "0") -> None:
        self._registry = CollectorRegistry()
        self._values = (model_name, label)
        self._stats = stats

        self._load()
        self._prompt_tokens = self._counter("vllm:prompt_tokens", "Prompt tokens of finished requests.")
        self._generation_tokens = self._counter("vllm:generation_tokens", "Tokens that were generated.")
        self._cache_queries = self._counter("vllm:prefix_cache_queries", "Prompt tokens looked up in the prefix cache.")
        self._cache_hits = self._counter("vllm:prefix_cache_hits", "Prompt tokens found in the prefix cache.")
        self._preemptions = self._counter("vllm:num_preemptions", "Sequences that were preempted.")
        self._success = self._counter("vllm:request_success", "Finished sequences.", "finished_reason")
        self._request_prompt = self._histogram("vllm:request_prompt_tokens", "Prompt tokens per request.", _TOKENS)
        self._request_output = self._histogram("vllm:request_generation_tokens", "Tokens per answer.", _TOKENS)
        self._params_n = self._histogram("vllm:request_params_n", "n of requests.", _COUNTS)
        self._params_max = self._histogram("vllm:request_params_max_tokens", "max_tokens of requests.", _TOKENS)
        seconds: dict[str, str] = {
            "time_to_first_token": "From arrival to the first token.",
            "request_time_per_output_token": "Mean time per token after the first, per answer.",
            "e2e_request_latency": "From arrival to the last token.",
            "request_queue_time": "From arrival to the first run.",
            "request_prefill_time": "From the first run to the first token.",
            "request_decode_time": "From the first token to the last.",
            "request_inference_time": "From the first run to the last token.",
        }
        self._seconds = {
            name: self._histogram(f"vllm:{name}_seconds", about, SECONDS) for name, about in seconds.items()
        }

        self._gaps = Gaps(dict(zip(self._labels(), self._values)))
        self._registry.register(self._gaps)

        self._drafts = self._counter("vllm:spec_decode_num_drafts", "Runs that had draft tokens to verify.")
        self._drafted = self._counter("vllm:spec_decode_num_draft_tokens", "Draft tokens that were verified.")
        self._accepted = self._counter("vllm:spec_decode_num_accepted_tokens", "Draft tokens that were accepted.")
        self._per_position = self._counter(
            "vllm:spec_decode_num_accepted_tokens_per_pos", "Accepted draft tokens by depth, from 0 on.", "position"
        )

        self._runs = self._counter("foredraft:target_runs", "Runs of the target that gave tokens.")
        self._saved = self._gauge("foredraft:saved_seconds", "Time saved against plain decoding; below 0: lost.")
        self._decisions = self._counter("foredraft:decisions", "The controller's decisions by reason.", "reason")
        self._by_proposer = {
            what: self._counter(f"foredraft:{what}_tokens_by_proposer", f"{what.title()} draft tokens.", "proposer")
            for what in ("drafted", "accepted")
        }
        self._refused = self._counter("foredraft:requests_refused", "Requests that got an error.", "status")
        self._disconnects = self._counter("foredraft:disconnects", "Requests whose client left before the end.")

    def render(self) -> bytes:
        return generate_latest(self._registry)

    def count_refusal(self, status: int) -> None:
        self._refused.labels(*self._values, str(status)).inc()

    def count_disconnect(self) -> None:
        self._disconnects.labels(*self._values).inc()

    def observe_gap(self, seconds: float) -> None:
        """The time between two deliveries of tokens of one sequence."""
        self._gaps.observe(seconds)

    def count_request(self, num_prompt_tokens: int, params: SamplingParams) -> None:
        """A request that was admitted."""
        self._prompt_tokens.labels(*self._values).inc(num_prompt_tokens)
        self._request_prompt.labels(*self._values).observe(num_prompt_tokens)
        self._params_n.labels(*self._values).observe(params.n)
        self._params_max.labels(*self._values).observe(params.max_tokens)

    def count_output(self, output: CompletionOutput, num_prompt_tokens: int) -> None:
        """A sequence that has ended."""
        values, spec = self._values, output.metrics
        self._success.labels(*values, output.finish_reason).inc()
        self._generation_tokens.labels(*values).inc(spec.emitted_tokens)
        self._request_output.labels(*values).observe(spec.emitted_tokens)
        self._cache_queries.labels(*values).inc(num_prompt_tokens)
        self._cache_hits.labels(*values).inc(spec.cached_tokens)
        self._preemptions.labels(*values).inc(spec.preemptions)
        times = {
            "time_to_first_token": spec.time_to_first_token_s,
            "request_time_per_output_token": spec.inter_token_latency_s,
            "e2e_request_latency": spec.total_time_s,
            "request_queue_time": spec.queue_time_s,
            "request_prefill_time": spec.time_to_first_token_s - spec.queue_time_s,
            "request_decode_time": spec.total_time_s - spec.time_to_first_token_s,
            "request_inference_time": spec.total_time_s - spec.queue_time_s,
        }
        for name, seconds in times.items():
            self._seconds[name].labels(*values).observe(max(0.0, seconds))
        self._count_speculation(output)

    def _count_speculation(self, output: CompletionOutput) -> None:
        values, spec = self._values, output.metrics
        self._runs.labels(*values).inc(spec.target_runs)
        self._drafts.labels(*values).inc(spec.drafts)
        self._drafted.labels(*values).inc(spec.drafted_tokens)
        self._accepted.labels(*values).inc(spec.accepted_tokens)
        for depth, accepted in enumerate(spec.accepted_per_depth):
            self._per_position.labels(*values, str(min(depth, _MAX_POSITIONS))).inc(accepted)
        self._saved.labels(*values).inc(spec.saved_time_s)
        for reason, steps in spec.decisions.items():
            self._decisions.labels(*values, reason).inc(steps)
        for origin, count in spec.drafted_by_origin.items():
            self._by_proposer["drafted"].labels(*values, origin).inc(count)
            self._by_proposer["accepted"].labels(*values, origin).inc(spec.by_origin.get(origin, 0))

    def _load(self) -> None:
        """Gauges that are read when somebody looks."""
        gauges: dict[str, tuple[str, Callable[[EngineStats], float]]] = {
            "vllm:num_requests_running": ("Sequences that run.", lambda stats: stats.running),
            "vllm:num_requests_waiting": ("Sequences that wait.", lambda stats: stats.waiting),
            "vllm:kv_cache_usage_perc": ("Used share of the KV cache; 1 is all.", _kv_use),
            "foredraft:steps": ("Steps since the server started.", lambda stats: stats.num_steps),
            "foredraft:step_seconds": ("Median time of the last steps.", _median_step),
        }
        for name, (about, value) in gauges.items():
            gauge = self._gauge(name, about).labels(*self._values)
            gauge.set_function(lambda value=value: float(value(self._stats())))  # type: ignore[misc]

    def _labels(self, *more: str) -> tuple[str, ...]:
        return ("model_name", "engine", *more)

    def _started(self, metric: MetricWrapperBase, more: tuple[str, ...]) -> None:
        if not more:  # shown from the first moment on, as 0
            metric.labels(*self._values)

    def _counter(self, name: str, about: str, *more: str) -> Counter:
        metric = Counter(name, about, self._labels(*more), registry=self._registry)
        self._started(metric, more)
        return metric

    def _gauge(self, name: str, about: str) -> Gauge:
        metric = Gauge(name, about, self._labels(), registry=self._registry)
        self._started(metric, ())
        return metric

    def _histogram(self, name: str, about: str, buckets: tuple[float, ...]) -> Histogram:
        metric = Histogram(name, about, self._labels(), registry=self._registry, buckets=buckets)
        self._started(metric, ())
        return metric


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


def _kv_use(stats: EngineStats) -> float:
    return 1 - stats.free_blocks / stats.num_blocks


def _median_step(stats: EngineStats) -> float:
    times = sorted(stats.step_times_s)
    return times[len(times) // 2] if times else 0.0
