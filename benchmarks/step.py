"""Whole steps of Foredraft by their number of rows, beside llama.cpp's own benchmark and the machine's limits.

    python benchmarks/step.py [--model smollm2-135m] [--dtype int4] [--threads 2] [--rounds 5] [--llama-bench PATH]

Foredraft runs in a process of its own, and llama-bench in another: while one is measured, the other sleeps or is gone.
A round is one run of llama-bench and then all figures of Foredraft; figures are medians of rounds, and a ratio is taken
within each round. Without --llama-bench it is looked for where `make bench-kernels` builds it, for this very CPU.

    plain     128 tokens after a prompt of one, greedy; Foredraft through its engine, sampling and Python included
    prompt    512 tokens, to the first token
    rows      a run of the target with its sampling after 256 tokens of context: one known token and draft tokens

The read bandwidth is that of summing half a gigabyte; a step's own is the packed weights' bytes over its time.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
import subprocess
from collections.abc import Iterable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from common import PREFILL_TOKENS, say

LLAMA_BENCH = Path(__file__).parent.parent / ".peers/llama-bench/build/bin/llama-bench"
PLAIN_TOKENS = 128


@dataclass(frozen=True)
class Round:
    """What one engine gives in one round."""

    plain: float  # tokens per second
    prompt: float  # tokens per second
    rows: dict[int, float]  # number of rows -> seconds of a step; empty for llama.cpp


class Foredraft:
    """The process that holds Foredraft."""

    def __init__(self, model: Path, dtype: str, threads: int) -> None:
        context = multiprocessing.get_context("spawn")
        self.connection, theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(theirs, model, dtype, threads), daemon=True)
        self.process.start()
        theirs.close()

    def ask(self, method: str, *arguments: Any) -> Any:
        """What a method of `Steps` gives."""
        self.connection.send((method, arguments))
        return self.connection.recv()

    def round(self, number: int) -> Round:
        self.ask("plain", -1, 8)  # the first runs after a pause are slow; llama-bench warms up as well
        plain = PLAIN_TOKENS / self.ask("plain", number, PLAIN_TOKENS)
        prompt = PREFILL_TOKENS / self.ask("prompt", number)
        return Round(plain, prompt, self.ask("rows"))

    def close(self) -> None:
        self.connection.close()
        self.process.join(timeout=10)


def _serve(connection: Connection, model: Path, dtype: str, threads: int) -> None:
    from steps import Steps

    steps = Steps(model, dtype, threads)
    while True:
        try:
            method, arguments = connection.recv()
        except EOFError:
            return
        connection.send(getattr(steps, method)(*arguments))


@dataclass(frozen=True)
class LlamaBench:
    """llama.cpp's own benchmark: a new process in each round, which warms up by itself."""

    program: Path
    model: Path
    threads: int

    def round(self) -> Round:
        sizes = ["-p", str(PREFILL_TOKENS), "-n", str(PLAIN_TOKENS), "-r", "1"]
        command = [self.program, "-m", self.model, "-t", str(self.threads), *sizes, "-o", "json"]
        done = subprocess.run(list(map(str, command)), capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(f"llama-bench ended with status {done.returncode}: {done.stderr.strip()[-500:]}")
        tests = json.loads(done.stdout)
        (prompt,) = (test["avg_ts"] for test in tests if test["n_prompt"])
        (plain,) = (test["avg_ts"] for test in tests if test["n_gen"])
        return Round(plain, prompt, {})


def report(ours: list[Round], theirs: list[Round], bandwidth: float, weights: int) -> list[str]:
    """The lines of the report; `theirs` is empty where there was no llama-bench."""
    one = statistics.median(round.rows[1] for round in ours)
    lines = [
        f"read bandwidth {bandwidth / 1e9:.1f} GB/s; weights {weights / 1e6:.0f} MB, so a floor of "
        f"{1000 * weights / bandwidth:.1f} ms; one row reads {weights / one / 1e9:.1f} GB/s",
        "",
        f"{'':14}{'Foredraft':>16}{'llama.cpp':>16}{'ratio':>8}{'of rounds':>16}",
    ]
    for title, name in ((f"plain, {PLAIN_TOKENS}", "plain"), (f"prompt, {PREFILL_TOKENS}", "prompt")):
        our_rates, their_rates = ([getattr(round, name) for round in rounds] for rounds in (ours, theirs))
        line = f"{title:14}{_rate(our_rates)}"
        if theirs:
            ratios = [our / their for our, their in zip(our_rates, their_rates, strict=True)]
            line += f"{_rate(their_rates)}{statistics.median(ratios):>7.2f}x{_range(ratios)}"
        lines.append(line)
    lines += ["", f"{'rows':14}{'step':>16}{'of one row':>16}{'':8}{'of rounds':>16}"]
    for rows in ours[0].rows:
        seconds = statistics.median(round.rows[rows] for round in ours)
        ratios = [round.rows[rows] / round.rows[1] for round in ours]
        lines.append(f"{rows:<14}{1000 * seconds:>13.2f} ms{statistics.median(ratios):>15.2f}x{'':8}{_range(ratios)}")
    return lines


def _rate(rates: Iterable[float]) -> str:
    return f"{statistics.median(rates):>10.1f} tok/s"


def _range(ratios: list[float]) -> str:
    return f"{f'{min(ratios):.2f}-{max(ratios):.2f}':>16}"


def measure(ours: Foredraft, theirs: LlamaBench | None, rounds: int) -> tuple[list[Round], list[Round]]:
    our_rounds, their_rounds = [], []
    for number in range(rounds):
        say(f"round {number + 1} of {rounds}")
        if theirs:
            their_rounds.append(theirs.round())
        our_rounds.append(ours.round(number))
    return our_rounds, their_rounds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m", help="a catalogue name or a GGUF file")
    parser.add_argument("--dtype", default="int4")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--llama-bench", type=Path, help="a llama-bench that was built for this machine")
    parser.add_argument("--out", type=Path, help="write all rounds to this file")
    options = parser.parse_args()

    from foredraft.models.catalog import resolve

    model = resolve(options.model)
    program: Path | None = options.llama_bench or (LLAMA_BENCH if LLAMA_BENCH.exists() else None)
    if program and not program.exists():
        parser.error(f"--llama-bench: there is no {program}")
    if program and model.suffix != ".gguf":
        parser.error("--model must be a GGUF file, which both engines read")
    theirs = LlamaBench(program, model, options.threads) if program else None
    if theirs is None:
        say("llama.cpp is left out: there is no llama-bench; `make bench-kernels` builds it, --llama-bench names one")
    ours = Foredraft(model, options.dtype, options.threads)
    bandwidth, weights = ours.ask("read_bandwidth"), ours.ask("packed_bytes")
    our_rounds, their_rounds = measure(ours, theirs, options.rounds)
    ours.close()
    print(f"{model.name} {options.dtype}, {options.threads} threads, {options.rounds} interleaved rounds")
    print("\n".join(report(our_rounds, their_rounds, bandwidth, weights)))
    if options.out:
        rounds = {"foredraft": [vars(each) for each in our_rounds], "llama.cpp": [vars(each) for each in their_rounds]}
        options.out.write_text(json.dumps({"settings": vars(options), **rounds}, indent=1, default=str) + "\n")


if __name__ == "__main__":
    main()
