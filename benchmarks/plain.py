"""Plain decoding, prompts and runs of several rows, beside llama.cpp's own benchmark and the machine's limits.

    python benchmarks/plain.py [--model smollm2-135m] [--dtype int4] [--threads 2] [--rounds 5] [--no-exact]
        [--llama-bench PATH] [--publish]

Foredraft runs in a process of its own, and llama-bench in another: while one is measured, the other sleeps or is gone.
A round is one run of llama-bench and then all figures of Foredraft; figures are medians of rounds, and a ratio is taken
within each round. Without --llama-bench it is looked for where `make bench-plain` builds it, for this very CPU.

    plain     128 tokens after a prompt of one, greedy; Foredraft through its engine, sampling and Python included
    prompt    512 tokens, to the first token
    rows      a run of the target with its sampling after 256 tokens of context: one known token and draft tokens
    memory    the most that the process of Foredraft has held, its Python and torch included

The read bandwidth is that of summing half a gigabyte; a step's own is the packed weights' bytes over its time.
`--publish` writes the figures to docs/results/ and renews docs/benchmarks.md.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import resource
import statistics
import subprocess
import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from importlib.metadata import version
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from pages import write_pages
from published import PREFILL_TOKENS, Prompts, Record, new_record, publish, say

from foredraft import LLM, SamplingParams, __version__
from foredraft.backends.base import Linear
from foredraft.batch import pack
from foredraft.models.catalog import resolve
from foredraft.proposers.registry import parse_spec
from foredraft.reports.facts import cpu_name
from foredraft.sampling.verify import verify
from foredraft.types import Draft, Sequence, Work

LLAMA_BENCH = Path(__file__).parent.parent / ".peers/llama-bench/build/bin/llama-bench"
PLAIN_TOKENS = 128
CONTEXT = 256
ROWS = (1, 2, 4, 8, 16, 32)
REPEATS = 5  # of every number of rows, interleaved
OFF = "off"


@dataclass(frozen=True)
class Settings:
    """What is measured: a model as Foredraft runs it."""

    model: Path
    dtype: str
    threads: int
    exact: bool = True


@dataclass(frozen=True)
class Round:
    """What one engine gives in one round."""

    plain: float  # tokens per second
    prompt: float  # tokens per second
    rows: dict[int, float]  # number of rows -> seconds of a step; empty for llama.cpp


class Steps:
    """An LLM, and a sequence of its cache that single steps can be run on. All times are in seconds."""

    def __init__(self, settings: Settings) -> None:
        self.llm = LLM(
            str(settings.model),
            spec=OFF,
            dtype=settings.dtype,
            exact=settings.exact,
            device="cpu",
            threads=settings.threads,
            max_model_len=1024,
            kv_cache_tokens=2048,
            prefix_caching=False,
        )
        self.prompts = Prompts(self.llm.engine.runner.decoder.config.vocab_size)
        tokens = self.prompts.prompt("rows", CONTEXT + max(ROWS))
        self.sequence = Sequence(-1, "", 0, tokens, len(tokens), SamplingParams(temperature=0).resolved({}), 0, 1)
        assert self.llm.engine.scheduler.pool.reserve(self.sequence, len(tokens))
        self._run(Work(self.sequence, CONTEXT))
        self.rows()

    def plain(self, number: int, tokens: int) -> float:
        """So many tokens after a prompt of one and the token behind it."""
        arrivals = self._generate(self.prompts.prompt(f"plain {number}", 1), tokens + 1)
        return arrivals[-1] - arrivals[1]

    def prompt(self, number: int) -> float:
        started, first = self._generate(self.prompts.prompt(f"prompt {number}", PREFILL_TOKENS), 1)
        return first - started

    def rows(self) -> dict[int, float]:
        """A step by its number of rows."""
        times: dict[int, list[float]] = {rows: [] for rows in ROWS}
        for _ in range(REPEATS):
            for rows, seconds in times.items():
                seconds.append(self._step(rows))
        return {rows: statistics.median(seconds) for rows, seconds in times.items()}

    def packed_bytes(self) -> int:
        decoder = self.llm.engine.runner.decoder
        return sum(part.memory.numel() for linear in _linears(decoder) for part in linear.parts)

    def memory_bytes(self) -> int:
        return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

    def read_bandwidth(self) -> float:
        """Bytes per second of summing what no cache holds."""
        memory = torch.ones(128 * 2**20)
        times = []
        for _ in range(7):
            started = time.perf_counter()
            memory.sum()
            times.append(time.perf_counter() - started)
        return 4 * memory.numel() / min(times)

    def _generate(self, prompt: list[int], max_tokens: int) -> list[float]:
        """When the request came, and each of its tokens."""
        engine, arrivals = self.llm.engine, [time.perf_counter()]
        params = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
        engine.add("0", prompt, params, parse_spec(OFF))
        while engine.has_work:
            arrivals += [time.perf_counter() for event in engine.step() if event.token_id is not None]
        assert len(arrivals) == max_tokens + 1
        return arrivals

    def _step(self, rows: int) -> float:
        """One known token and a chain of draft tokens."""
        tokens = self.sequence.token_ids
        known = Sequence(-1, "", 0, tokens[: CONTEXT + 1], CONTEXT + 1, self.sequence.params, seed=0, max_tokens=99)
        known.num_computed_tokens, known.block_table = CONTEXT, self.sequence.block_table
        drafted = tuple(tokens[CONTEXT + 1 : CONTEXT + rows])
        count = len(drafted)
        draft = Draft(drafted, tuple(range(-1, count - 1)), (1.0,) * count, ("chain",) * count)
        return self._run(Work(known, 1, draft=draft))

    def _run(self, work: Work) -> float:
        runner = self.llm.engine.runner
        started = time.perf_counter()
        output = runner.forward(pack([work], self.llm.engine.kv.block_size))
        with torch.inference_mode():
            verify(output.logits, [work], runner.backend.sample)
        seconds = time.perf_counter() - started
        assert len(output.logits) == (work.num_rows if work.reaches_end else 0)
        return seconds


def _linears(owner: object) -> Iterator[Linear]:
    """Every linear layer of a decoder once, wherever it is kept."""
    seen: set[int] = set()
    waiting = [owner]
    while waiting:
        one = waiting.pop()
        if isinstance(one, Linear):
            if id(one) not in seen:
                seen.add(id(one))
                yield one
        elif isinstance(one, tuple | list):
            waiting += one
        elif hasattr(one, "__dataclass_fields__"):
            waiting += [getattr(one, name) for name in one.__dataclass_fields__]


class Foredraft:
    """The process that holds Foredraft."""

    def __init__(self, settings: Settings) -> None:
        context = multiprocessing.get_context("spawn")
        self.connection, theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(theirs, settings), daemon=True)
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


def _serve(connection: Connection, settings: Settings) -> None:
    steps = Steps(settings)
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


def plain_record(
    settings: Settings, ours: list[Round], theirs: list[Round], bandwidth: float, weights: int, memory: int
) -> Record:
    """What is published: medians of rounds, and ratios within rounds."""

    def rates(rounds: list[Round], name: str) -> float | None:
        return round(statistics.median(getattr(each, name) for each in rounds), 1) if rounds else None

    def ratio(name: str) -> float | None:
        pairs = zip(ours, theirs, strict=True)
        found = [getattr(our, name) / getattr(their, name) for our, their in pairs] if theirs else []
        return round(statistics.median(found), 2) if found else None

    options = f"--model {settings.model.name} --dtype {settings.dtype} --threads {settings.threads}"
    options += f" --rounds {len(ours)}" + ("" if settings.exact else " --no-exact")
    return new_record(
        "plain",
        cpu_name(),
        settings.threads,
        {"foredraft": __version__, "torch": version("torch")},
        f'make bench-plain ARGS="{options}"',
        model=settings.model.name,
        dtype=settings.dtype,
        exact=settings.exact,
        rounds=len(ours),
        **{
            name: {"foredraft": rates(ours, name), "llama.cpp": rates(theirs, name), "ratio": ratio(name)}
            for name in ("plain", "prompt")
        },
        rows_ms={str(n): round(1000 * statistics.median(each.rows[n] for each in ours), 2) for n in ours[0].rows},
        floor_ms=round(1000 * weights / bandwidth, 2),
        memory_mb=memory // 10**6,
    )


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
    parser.add_argument("--no-exact", dest="exact", action="store_false", help="with `exact=False`")
    parser.add_argument("--llama-bench", type=Path, help="a llama-bench that was built for this machine")
    parser.add_argument("--out", type=Path, help="write all rounds to this file")
    parser.add_argument("--publish", action="store_true", help="write docs/results/ and renew the page")
    options = parser.parse_args()
    settings = Settings(resolve(options.model), options.dtype, options.threads, options.exact)
    program: Path | None = options.llama_bench or (LLAMA_BENCH if LLAMA_BENCH.exists() else None)
    if program and not program.exists():
        parser.error(f"--llama-bench: there is no {program}")
    if program and settings.model.suffix != ".gguf":
        parser.error("--model must be a GGUF file, which both engines read")
    theirs = LlamaBench(program, settings.model, settings.threads) if program else None
    if theirs is None:
        say("llama.cpp is left out: there is no llama-bench; `make bench-plain` builds it, --llama-bench names one")
    ours = Foredraft(settings)
    memory, weights = ours.ask("memory_bytes"), ours.ask("packed_bytes")  # before the bandwidth takes memory of its own
    bandwidth = ours.ask("read_bandwidth")
    rounds = measure(ours, theirs, options.rounds)
    ours.close()
    exact = "" if settings.exact else ", not exact"
    print(f"{settings.model.name} {settings.dtype}{exact}, {settings.threads} threads, {options.rounds} rounds in turn")
    print("\n".join(report(*rounds, bandwidth, weights)), f"\nmemory {memory / 1e6:.0f} MB")
    if options.out:
        by_engine = {name: [asdict(each) for each in some] for name, some in zip(("foredraft", "llama.cpp"), rounds)}
        options.out.write_text(json.dumps({"settings": asdict(settings), **by_engine}, indent=1, default=str) + "\n")
    if options.publish:
        record = plain_record(settings, *rounds, bandwidth, weights, memory)
        publish(record, f"plain {settings.model.stem} {settings.dtype} {settings.threads} threads {cpu_name()}")
        write_pages()


if __name__ == "__main__":
    main()
