"""Whole steps on a GPU: tokens per second of `LLM.generate`, and where the time of a step goes.

python benchmarks/gpu_decode.py MODEL --batch 1,8,32,256 --dtype bfloat16 --tokens 256
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from statistics import median
from typing import Any
from unittest import mock

import torch

from foredraft import LLM, SamplingParams
from foredraft.engine import engine as engine_module
from foredraft.proposers.registry import Spec


def tokens_per_second(llm: LLM, batch: int, tokens: int, temperature: float) -> float:
    """Of `batch` requests at once, from the first token on, so that prompts do not count."""
    prompts = [[1 + (7 * place + 13 * index) % 200 for place in range(16)] for index in range(batch)]
    params = SamplingParams(max_tokens=tokens, temperature=temperature, seed=1, ignore_eos=True)
    outputs = llm.generate(prompts, params, spec="off")
    seconds = max(output.metrics.total_time_s - output.metrics.time_to_first_token_s for output in outputs)
    return batch * (tokens - 1) / seconds


def step_parts(llm: LLM, batch: int, steps: int = 60) -> dict[str, float]:
    """Median milliseconds of a step and of its parts. `run` is the device's time between the beginning and the end of
    the replayed graph; the host waits for it, and for the draws behind it, in `sample`."""
    engine, params = llm.engine, SamplingParams(max_tokens=4096, temperature=0, ignore_eos=True)
    for index in range(batch):
        engine.add(f"parts-{index}", [1 + index % 200, 2, 3], params, Spec(), is_followed=False)
    for _ in range(10):
        engine.step()
    events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
    backend: Any = engine.runner.backend
    replay = backend.replay

    def timed_on_device(*arguments: Any) -> Any:
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        result = replay(*arguments)
        stop.record()
        events.append((start, stop))
        return result

    for _ in range(steps):
        with mock.patch.object(backend, "replay", timed_on_device):
            engine.step()
    torch.cuda.synchronize()
    clock = Clock()
    with ExitStack() as wrapped:
        for owner, name in (
            (engine.scheduler, "schedule"),
            (engine.speculation, "propose"),
            (engine_module, "pack"),
            (backend, "prepare"),
            (backend, "replay"),
            (backend, "sample"),
            (engine, "_stops"),
            (engine.scheduler, "update_from_output"),
            (engine, "step"),
        ):
            wrapped.enter_context(clock.timing(owner, name))
        for _ in range(steps):
            engine.step()
    engine.abort_all()
    parts = {name.strip("_"): median(times) * 1e3 for name, times in clock.times.items()}
    return {"run": median(start.elapsed_time(stop) for start, stop in events), **parts}


class Clock:
    """Seconds of every call of some methods, by their names."""

    def __init__(self) -> None:
        self.times: dict[str, list[float]] = {}

    @contextmanager
    def timing(self, owner: Any, name: str) -> Iterator[None]:
        inner, times = getattr(owner, name), self.times.setdefault(name, [])

        def timed(*arguments: Any, **options: Any) -> Any:
            started = time.perf_counter()
            result = inner(*arguments, **options)
            times.append(time.perf_counter() - started)
            return result

        with mock.patch.object(owner, name, timed):
            yield


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--batch", default="1,8,32,256")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--backend", default="auto")
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--profile", action="store_true", help="print where Python spends a step at batch 1")
    options = parser.parse_args()
    batches = [int(batch) for batch in options.batch.split(",")]
    started = time.perf_counter()
    llm = LLM(
        options.model, device="cuda", dtype=options.dtype, backend=options.backend, spec="off",
        max_num_seqs=max(batches), kv_cache_tokens=max(batches) * 1024, max_model_len=1024,
        prefix_caching=False,
    )  # fmt: skip
    print(f"{options.model} {options.dtype}: loaded in {time.perf_counter() - started:.1f} s; {llm.exact_report}")
    for batch in batches:
        started = time.perf_counter()
        tokens_per_second(llm, batch, 40, options.temperature)
        first = time.perf_counter() - started
        speed = tokens_per_second(llm, batch, options.tokens, options.temperature)
        print(f"batch {batch}: {speed:.0f} tok/s, first use {first:.1f} s; milliseconds of a step:", end=" ")
        print(", ".join(f"{name} {value:.3f}" for name, value in step_parts(llm, batch).items()), flush=True)
    if options.profile:
        import cProfile
        import pstats

        profile = cProfile.Profile()
        profile.enable()
        tokens_per_second(llm, batches[0], options.tokens, options.temperature)
        profile.disable()
        pstats.Stats(profile).sort_stats("tottime").print_stats(28)


if __name__ == "__main__":
    main()
