"""Where Python spends a step, by speculation string: microseconds per decoding step in the parts of a step.

    python benchmarks/host.py [--model smollm2-135m] [--device cuda] [--dtype bfloat16] [--suite questions.jsonl]
        [--limit 6] [--max-tokens 96] [--profile 20] [SPEC ...]

One request at a time. Three rounds per spec, the first of which only warms up: the second times whole steps, the third
the parts. Parts contain each other as their indentation shows. Steps that run a prompt do not count. On a GPU the host
waits for the device in `sample` and `wait`, and what it does in `learn` takes no time of its own.
"""

from __future__ import annotations

import argparse
import cProfile
import gc
import pstats
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any
from unittest import mock

from foredraft import LLM, SamplingParams
from foredraft.bench.suite import CHAT, load_suite
from foredraft.control.controller import Controller
from foredraft.engine import engine as engine_module
from foredraft.engine import speculation as speculation_module
from foredraft.proposers import eagle as eagle_module
from foredraft.proposers import run_ahead
from foredraft.proposers.registry import parse_spec
from foredraft.proposers.suffix import Suffix
from foredraft.proposers.tree_drafter import TreeDrafter

SPECS = ("off", "auto", "suffix", "eagle:nodes=16", "suffix+eagle:nodes=16")


def parts(llm: LLM) -> list[tuple[str, Any, str]]:
    """Labels, indented by what contains them, and the functions to time."""
    engine = llm.engine
    backend = engine.runner.backend
    return [
        ("schedule", engine.scheduler, "schedule"),
        ("propose", engine.speculation, "propose"),
        ("  budgets", Controller, "budgets"),
        ("  suffix", Suffix, "propose"),
        ("  head", TreeDrafter, "propose"),
        ("    pack", eagle_module, "pack"),
        ("    whole draft", run_ahead.RunAhead, "__call__"),
        ("      tell", run_ahead._Program, "tell"),
        ("      wait", run_ahead._Program, "wait"),
        ("      Levels", run_ahead.Levels, "__init__"),
        ("    draft of it", run_ahead.Levels, "draft"),
        ("    record", TreeDrafter, "_record"),
        ("  observe_query", Controller, "observe_query"),
        ("  merge", speculation_module, "merge"),
        ("  choose", Controller, "choose"),
        ("pack", engine_module, "pack"),
        ("forward", engine.runner, "forward"),
        ("  prepare", backend, "prepare"),
        ("  replay", backend, "replay"),
        ("learn", engine.speculation, "learn"),
        ("verify", engine_module, "verify"),
        ("  sample", backend, "sample"),
        ("cut", engine, "_cut"),
        ("keep", engine.kv, "keep"),
        ("update_from_output", engine.scheduler, "update_from_output"),
        ("observe", engine.speculation, "observe"),
        ("events", engine, "_events"),
    ]


@contextmanager
def timed(owner: Any, name: str, seconds: list[float]) -> Iterator[None]:
    inner = getattr(owner, name)

    def wrapped(*arguments: Any, **options: Any) -> Any:
        started = time.perf_counter()
        try:
            return inner(*arguments, **options)
        finally:
            seconds[0] += time.perf_counter() - started

    with mock.patch.object(owner, name, wrapped):
        yield


def decode(llm: LLM, spec: str, prompts: list[list[int]], max_tokens: int, step: Callable[[], Any]) -> int:
    """Write an answer to every prompt, with `step` for each step that runs no prompt; returns their tokens."""
    engine, params = llm.engine, SamplingParams(max_tokens=max_tokens, temperature=0, ignore_eos=True)
    engine.speculation.clear()
    tokens = 0
    for index, prompt in enumerate(prompts):
        engine.add(str(index), prompt, params, parse_spec(spec))
        while engine.has_work:
            is_decoding = not engine.scheduler.waiting and engine.scheduler.num_decoding
            events = step() if is_decoding else engine.step()
            tokens += len(events) if is_decoding else 0
    return tokens


def measured(llm: LLM, write: Callable[[Callable[[], Any]], int]) -> dict[str, float]:
    """Microseconds per step and per token, tokens per step, and microseconds of the parts of a step."""
    step, whole = llm.engine.step, [0.0]
    sums = {label: [0.0] for label, _, _ in parts(llm)}
    counts = [0, 0]

    def whole_step() -> Any:
        counts[0] += 1
        started = time.perf_counter()
        events = step()
        whole[0] += time.perf_counter() - started
        return events

    def step_in_parts() -> Any:
        counts[1] += 1
        with ExitStack() as stack:
            for label, owner, name in parts(llm):
                stack.enter_context(timed(owner, name, sums[label]))
            return step()

    tokens = write(whole_step)
    write(step_in_parts)
    first = {"step": 1e6 * whole[0] / counts[0], "per token": 1e6 * whole[0] / tokens, "tokens": tokens / counts[0]}
    return first | {label: 1e6 * seconds[0] / counts[1] for label, seconds in sums.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("specs", nargs="*", default=SPECS, metavar="SPEC")
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--suite")
    parser.add_argument("--limit", type=int, default=6)
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--profile", type=int, default=0, help="functions of a profile to print for each spec")
    arguments = parser.parse_args()
    llm = LLM(
        *(arguments.model,),
        device=arguments.device, dtype=arguments.dtype, spec="off", prefix_caching=False, max_num_seqs=1,
        max_model_len=2048, kv_cache_tokens=4096,
    )  # fmt: skip
    gc.collect()
    gc.freeze()  # as a server does: a full collection goes through all of torch
    texts = [one.text for one in load_suite(arguments.suite, arguments.limit)] if arguments.suite else list(CHAT)
    prompts = [llm.encode([{"role": "user", "content": text}]) for text in texts[: arguments.limit]]
    found: dict[str, dict[str, float]] = {}
    for spec in arguments.specs:
        write = partial(decode, llm, spec, prompts, arguments.max_tokens)
        write(llm.engine.step)
        if "auto" in spec:
            llm.engine.speculation.calibrate()
            write(llm.engine.step)  # the controller learns what proposers cost
        found[spec] = measured(llm, write)
        if arguments.profile:
            profile = cProfile.Profile()
            write(partial(profile.runcall, llm.engine.step))
            print(f"profile of {spec}", flush=True)
            pstats.Stats(profile).sort_stats("tottime").print_stats(arguments.profile)
    labels = list(dict.fromkeys(label for times in found.values() for label in times))
    print(f"µs per step{'':12}" + "".join(f"{spec[:21]:>22}" for spec in found))
    for label in labels:
        print(f"{label:23}" + "".join(f"{times.get(label, 0.0):22.2f}" for times in found.values()))


if __name__ == "__main__":
    main()
