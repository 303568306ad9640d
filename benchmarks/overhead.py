"""What the controller costs in steady state: the time of drafting and of learning, beside that of whole steps.

    python benchmarks/overhead.py [--model smollm2-135m] [--dtype int4] [--batch 1] [--max-tokens 128] [--threads 2]

Chat prompts with `auto`: there is little to copy, so the controller has work and nothing to show for it. Proposers are
timed by themselves; the controller's own time is what remains of drafting and learning. The step of the prompts does
not count.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

from foredraft import LLM, SamplingParams
from foredraft.bench.suite import CHAT
from foredraft.proposers.registry import parse_spec

MOST = 0.01
DRAFT, OBSERVE, PROPOSE, LEARN = "draft", "observe", "proposers' propose", "proposers' observe"


class Clock:
    """Seconds spent in wrapped calls since it was last read, by name."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}

    def wrap(self, owner: object, method: str, name: str) -> None:
        """Time a method of one object."""
        inner: Callable[..., Any] = getattr(owner, method)

        def timed(*arguments: Any, **options: Any) -> Any:
            started = time.perf_counter()
            try:
                return inner(*arguments, **options)
            finally:
                self._seconds[name] = self._seconds.get(name, 0.0) + time.perf_counter() - started

        setattr(owner, method, timed)

    def read(self) -> dict[str, float]:
        seconds, self._seconds = self._seconds, {}
        return seconds


def decode(llm: LLM, prompts: list[list[int]], params: SamplingParams, clock: Clock) -> list[dict[str, float]]:
    """What every step took but those that run a prompt; under "step" all of it."""
    for index, prompt in enumerate(prompts):
        llm.engine.add(str(index), prompt, params, parse_spec("auto"))
    steps: list[dict[str, float]] = []
    while llm.engine.has_work:
        clock.read()
        started = time.perf_counter()
        events = llm.engine.step()
        seconds = time.perf_counter() - started
        steps.append({"step": seconds, "events": len(events), **clock.read()})
    return [step for step in steps[1:] if step["events"]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--dtype", default="int4")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    llm = LLM(arguments.model, dtype=arguments.dtype, threads=arguments.threads, prefix_caching=False)
    params = SamplingParams(max_tokens=arguments.max_tokens, temperature=0, ignore_eos=True)
    prompts = [llm.encode([{"role": "user", "content": text}]) for text in CHAT]
    clock = Clock()
    decode(llm, prompts[:1], params, clock)  # makes the controller and what it chooses among
    speculation = llm.engine.speculation
    for proposer in speculation.assignments.proposers.values():
        clock.wrap(proposer, "propose", PROPOSE)
        clock.wrap(proposer, "observe", LEARN)
    clock.wrap(speculation, "propose", DRAFT)
    clock.wrap(speculation, "observe", OBSERVE)
    clock.wrap(speculation, "learn", OBSERVE)
    steps: list[dict[str, float]] = []
    for start in range(0, len(prompts), arguments.batch):
        speculation.clear()
        steps += decode(llm, prompts[start : start + arguments.batch], params, clock)
    whole = statistics.median(step["step"] for step in steps)
    print(
        f"{arguments.model} {arguments.dtype}, auto, chat, batch {arguments.batch}, {arguments.threads} threads, "
        f"{len(steps)} steps; median step {1e6 * whole:.0f} µs"
    )
    for name in (DRAFT, OBSERVE, PROPOSE, LEARN):
        spent = statistics.median(step.get(name, 0.0) for step in steps)
        print(f"{name:20} {1e6 * spent:8.1f} µs {100 * spent / whole:7.3f} % of a step")
    own = statistics.median(
        step[DRAFT] + step[OBSERVE] - step.get(PROPOSE, 0.0) - step.get(LEARN, 0.0) for step in steps
    )
    verdict = "holds" if own < MOST * whole else "EXCEEDED"
    print(f"{'controller alone':20} {1e6 * own:8.1f} µs {100 * own / whole:7.3f} % of a step   under 1 %: {verdict}")


if __name__ == "__main__":
    main()
