"""What a competitor costs: the median step of plain decoding alone, and beside a process that keeps one core busy.

    python benchmarks/busy.py [--model smollm2-135m] [--dtype int4] [--threads 2] [--rounds 5] [--tokens 64]

The rounds alternate. The competitor is pinned to one of the cores that the engine may use and does nothing but spin, so
one of the threads has half a core, or moves. At most three times the step alone is asked for.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from foredraft import LLM, SamplingParams
from foredraft.proposers.registry import Spec

MOST = 3.0
SETTLING_S = 0.5  # until the competitor has started, and the scheduler has noticed
SPIN = "import os, sys\nos.sched_setaffinity(0, {int(sys.argv[1])})\nwhile True: pass"


@contextmanager
def competitor(core: int) -> Iterator[None]:
    process = subprocess.Popen([sys.executable, "-c", SPIN, str(core)])
    try:
        time.sleep(SETTLING_S)
        if process.poll() is not None:
            raise SystemExit("The competitor ended by itself.")
        yield
    finally:
        process.kill()
        process.wait()


def steps(llm: LLM, prompt: list[int], tokens: int) -> list[float]:
    """Seconds of every step but the first, which has the prompt."""
    llm.engine.add("0", prompt, SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True), Spec())
    times: list[float] = []
    while llm.engine.has_work:
        started = time.perf_counter()
        llm.engine.step()
        times.append(time.perf_counter() - started)
    return times[1:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--dtype", default="int4")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=64)
    arguments = parser.parse_args()
    if not hasattr(os, "sched_setaffinity"):
        raise SystemExit("A process cannot be pinned to a core on this system.")
    core = min(os.sched_getaffinity(0))
    llm = LLM(arguments.model, dtype=arguments.dtype, threads=arguments.threads, prefix_caching=False)
    prompt = llm.encode("The clockmaker and her apprentice")
    steps(llm, prompt, 8)
    times: dict[str, list[float]] = {"alone": [], "busy": []}
    for _ in range(arguments.rounds):
        times["alone"].append(statistics.median(steps(llm, prompt, arguments.tokens)))
        with competitor(core):
            times["busy"].append(statistics.median(steps(llm, prompt, arguments.tokens)))
    ratios = [busy / alone for alone, busy in zip(times["alone"], times["busy"], strict=True)]
    ratio = statistics.median(ratios)
    print(
        f"{arguments.model} {arguments.dtype}, {arguments.threads} threads, {arguments.rounds} rounds, core {core} busy"
    )
    for name, medians in times.items():
        print(f"{name:6} {1000 * statistics.median(medians):7.2f} ms a step")
    verdict = "holds" if ratio <= MOST else "EXCEEDED"
    print(f"ratio  {ratio:7.2f}x ({min(ratios):.2f} – {max(ratios):.2f})   at most {MOST:g}x: {verdict}")


if __name__ == "__main__":
    main()
