"""Where Python spends a step, by speculation string: microseconds per decoding step in the parts of a step.

    python benchmarks/host.py [--model smollm2-135m] [--device cuda] [--dtype bfloat16] [--suite questions.jsonl]
        [--limit 6] [--batch 1] [--max-tokens 96] [--profile 20] [SPEC ...]

`--batch` requests at a time. Three rounds per spec, the first of which only warms up: the second times whole steps, the
third the parts. Parts contain each other as their indentation shows. Steps that run a prompt do not count. On a GPU the
host waits for the device in `sample` and `wait`, and learns while it runs. "beside proposers" is all of `propose` and
`observe` but the proposers' own computing, and on a CPU `learn` too: what speculation itself takes.
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
from foredraft.bench.suite import built_in, load_suite
from foredraft.control.controller import Controller
from foredraft.engine import engine as engine_module
from foredraft.engine import speculation as speculation_module
from foredraft.heads import propose as eagle_module
from foredraft.proposers.model import run_ahead
from foredraft.proposers.model.drafter import TreeDrafter
from foredraft.proposers.registry import parse_spec
from foredraft.proposers.suffix import Suffix

SPECS = ("off", "auto", "suffix", "eagle:nodes=16", "suffix+eagle:nodes=16")


def parts(llm: LLM) -> list[tuple[str, Any, str]]:
    """Labels, indented by what contains them, and the functions to time."""
    engine = llm.engine
    backend = engine.runner.backend
    return [
        ("schedule", engine.scheduler, "schedule"),
        ("propose", engine.speculation, "propose"),
        ("  wants", Controller, "wants"),
        ("  min_score", Controller, "min_score"),
        ("  suffix", Suffix, "propose"),
        ("  head", TreeDrafter, "propose"),
        ("    pack", eagle_module, "pack"),
        ("    whole draft", run_ahead.RunAhead, "__call__"),
        ("      tell", run_ahead._Program, "tell"),
        ("      wait", run_ahead._Program, "wait"),
        ("      Levels", run_ahead.Levels, "__init__"),
        ("    draft of it", run_ahead.Levels, "draft"),
        ("    record", TreeDrafter, "_record"),
        ("  offers", Controller, "offers"),
        ("  merge", speculation_module, "merge"),
        ("  choose", Controller, "choose"),
        ("pack", engine_module, "pack"),
        ("forward", engine.runner, "forward"),
        ("  prepare", backend, "prepare"),
        ("  replay", backend, "replay"),
        ("learn", engine.speculation, "learn"),
        ("  from queries", Controller, "observe_query"),
        ("  from steps", Controller, "observe"),
        ("verify", engine_module, "verify"),
        ("  sample", backend, "sample"),
        ("stops", engine, "_stops"),
        ("keep", engine.kv, "keep"),
        ("update_from_output", engine.scheduler, "update_from_output"),
        ("observe", engine.speculation, "observe"),
        ("  suffix learns", Suffix, "observe"),
        ("events", engine, "_events"),
    ]


@contextmanager
def timed(owner: Any, name: str, seconds: list[float]) -> Iterator[None]:
    inner, clock = getattr(owner, name), time.perf_counter

    def wrapped(*arguments: Any, **named: Any) -> Any:
        started = clock()
        result = inner(*arguments, **named)
        seconds[0] += clock() - started
        return result

    with mock.patch.object(owner, name, wrapped):
        yield


def decode(llm: LLM, spec: str, prompts: list[list[int]], batch: int, max_tokens: int, step: Callable[[], Any]) -> int:
    """Write an answer to every prompt, with `step` for each step that runs no prompt; returns their tokens."""
    engine, params = llm.engine, SamplingParams(max_tokens=max_tokens, temperature=0, ignore_eos=True)
    engine.speculation.clear()
    tokens = 0
    for first in range(0, len(prompts), batch):
        for index in range(first, min(first + batch, len(prompts))):
            engine.add(str(index), prompts[index], params, parse_spec(spec))
        while engine.has_work:
            running = engine.scheduler.running
            is_decoding = not engine.scheduler.waiting and engine.scheduler.num_decoding == len(running)
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
        before = [seconds[0] for seconds in others.values()]
        events = step()
        for total, seconds, so_far in zip(sums.values(), others.values(), before, strict=True):
            total[0] += seconds[0] - so_far
        return events

    tokens = write(whole_step)
    others = {label: [0.0] for label in sums}  # of all steps, those that run prompts too
    with ExitStack() as stack:
        for label, owner, name in parts(llm):
            stack.enter_context(timed(owner, name, others[label]))
        write(step_in_parts)
    first = {"step": 1e6 * whole[0] / counts[0], "per token": 1e6 * whole[0] / tokens, "tokens": tokens / counts[0]}
    times = {label: 1e6 * seconds[0] / counts[1] for label, seconds in sums.items()}
    own = ("  suffix", "  head", "  suffix learns")
    beside = times["propose"] + times["observe"] - sum(times[each] for each in own)
    if llm.engine.runner.backend.device.type == "cpu":
        beside += times["learn"]
    return first | times | {"beside proposers": beside}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("specs", nargs="*", default=SPECS, metavar="SPEC")
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--suite")
    parser.add_argument("--limit", type=int, default=6)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--profile", type=int, default=0, help="functions of a profile to print for each spec")
    arguments = parser.parse_args()
    llm = LLM(
        *(arguments.model,),
        device=arguments.device, dtype=arguments.dtype, threads=arguments.threads, spec="off", prefix_caching=False,
        max_num_seqs=arguments.batch, max_model_len=2048, kv_cache_tokens=2048 * (1 + arguments.batch),
    )  # fmt: skip
    gc.collect()
    gc.freeze()  # as a server does: a full collection goes through all of torch
    chat = [one for one in built_in() if one.category == "chat"]
    texts = [one.text for one in (load_suite(arguments.suite, arguments.limit) if arguments.suite else chat)]
    prompts = [llm.encode([{"role": "user", "content": text}]) for text in texts[: arguments.limit]]
    found: dict[str, dict[str, float]] = {}
    for spec in arguments.specs:
        write = partial(decode, llm, spec, prompts, arguments.batch, arguments.max_tokens)
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
