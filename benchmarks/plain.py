"""Plain decoding, prompts and runs of several rows, beside llama.cpp's own benchmark and the machine's limits.

    python benchmarks/plain.py [--model smollm2-135m] [--dtype int4] [--threads 2] [--rounds 5] [--no-exact]
        [--device cuda] [--llama-bench PATH]

Foredraft runs in a process of its own, and llama-bench in another: while one is measured, the other sleeps or is gone.
A round is one run of llama-bench and then all figures of Foredraft; figures are medians of rounds, and a ratio is taken
within each round. Without --llama-bench it is looked for where `make bench-plain` builds it, for this very CPU.

    plain     128 tokens after a prompt of one, greedy; Foredraft through its engine, sampling and Python included
    prompt    512 tokens, to the first token
    rows      a run of the target with its sampling after 256 tokens of context: one known token and draft tokens
    memory    the most that the process of Foredraft has held, its Python and torch included; on a GPU, of the device's

The read bandwidth is that of summing what no cache holds; a step's own is the packed weights' bytes over its time.
`machine.py` publishes these figures, and with them what `exact=True` costs.
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
from dataclasses import asdict, dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from published import PREFILL_TOKENS, Figures, Prompts, say

from foredraft import LLM, SamplingParams
from foredraft.backends.layers import Experts, Linear
from foredraft.batch import pack
from foredraft.config import EngineConfig
from foredraft.models.catalog import resolve
from foredraft.proposers.registry import parse_spec
from foredraft.sampling.verify import verify
from foredraft.types import Draft, Sequence, Work

LLAMA_BENCH = Path(__file__).parent.parent / ".peers/llama-bench/build/bin/llama-bench"
PLAIN_TOKENS = 128
CONTEXT = 256
ROWS = (1, 2, 4, 8, 16, 32)
LEAST_TOKENS, MOST_TOKENS = 12, 128  # of each sequence, where several decode at once: as many as fit into AT_ONCE_S
AT_ONCE_S = 4.0
KV_TOKENS = 2048  # more only where several sequences need it
REPEATS = 5  # of every number of rows, interleaved
OFF = "off"


@dataclass(frozen=True)
class Settings:
    """What is measured: a model as Foredraft runs it."""

    model: Path
    dtype: str
    threads: int
    exact: bool = True
    device: str = "cpu"
    sequences: int = 1  # that may decode at once

    @property
    def is_on_gpu(self) -> bool:
        return self.device.startswith("cuda")


@dataclass(frozen=True)
class Round:
    """What one engine gives in one round."""

    plain: float  # tokens per second
    prompt: float  # tokens per second
    rows: dict[int, float]  # number of rows -> seconds of a step; empty for llama.cpp


class Steps:
    """An LLM, and a sequence of its cache that single steps can be run on. All times are in seconds."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.llm = LLM(
            str(settings.model),
            spec=OFF,
            dtype=settings.dtype,
            exact=settings.exact,
            device=settings.device,
            threads=settings.threads,
            max_model_len=1024,
            max_num_seqs=max(EngineConfig.max_num_seqs, settings.sequences),
            kv_cache_tokens=max(KV_TOKENS, 2 * MOST_TOKENS * settings.sequences),
            prefix_caching=False,
        )
        self.prompts = Prompts(self.llm.engine.runner.decoder.config.vocab_size)
        tokens = self.prompts.prompt("rows", CONTEXT + max(ROWS))
        self.sequence = Sequence(-1, "", 0, tokens, len(tokens), SamplingParams(temperature=0).resolved({}), 0, 1)
        assert self.llm.engine.scheduler.pool.reserve(self.sequence, len(tokens))
        self._run(Work(self.sequence, CONTEXT))
        self.rows()

    def plain(self, number: int, tokens: int, sequences: int = 1) -> float:
        """So many tokens of each of so many sequences, after a prompt of one and the token behind it."""
        prompts = [self.prompts.prompt(f"plain {number} {index}", 1) for index in range(sequences)]
        arrivals = self._generate(prompts, tokens + 1)
        return arrivals[-1] - arrivals[sequences]

    def prompt(self, number: int) -> float:
        started, first = self._generate([self.prompts.prompt(f"prompt {number}", PREFILL_TOKENS)], 1)
        return first - started

    def rows(self) -> dict[int, float]:
        """A step by its number of rows."""
        times: dict[int, list[float]] = {rows: [] for rows in ROWS}
        for _ in range(REPEATS):
            for rows, seconds in times.items():
                seconds.append(self._step(rows))
        return {rows: statistics.median(seconds) for rows, seconds in times.items()}

    def packed_bytes(self) -> int:
        parts = (part for linear in _linears(self.llm.engine.runner.decoder) for part in linear.parts)
        return sum(tensor.nbytes for part in parts for tensor in _tensors(part))

    def memory_bytes(self) -> int:
        if self.settings.is_on_gpu:
            return torch.cuda.max_memory_reserved(self.settings.device)
        return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

    def read_bandwidth(self) -> float:
        """Bytes per second of summing what no cache holds."""
        memory = torch.ones((512 if self.settings.is_on_gpu else 128) * 2**20, device=self.settings.device)
        times = []
        for _ in range(7):
            started = time.perf_counter()
            memory.sum().item()  # a number on the host: the device is done
            times.append(time.perf_counter() - started)
        return memory.nbytes / min(times)

    def _generate(self, prompts: list[list[int]], max_tokens: int) -> list[float]:
        """When the requests came, and each of their tokens."""
        engine, arrivals = self.llm.engine, [time.perf_counter()]
        params = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
        for index, prompt in enumerate(prompts):
            engine.add(str(index), prompt, params, parse_spec(OFF))
        while engine.has_work:
            arrivals += [time.perf_counter() for event in engine.step() if event.token_id is not None]
        assert len(arrivals) == len(prompts) * max_tokens + 1
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
            verify(output.logits, [work], runner.sampler(output))
        seconds = time.perf_counter() - started
        assert len(output.logits) == (work.num_rows if work.reaches_end else 0)
        return seconds


def _linears(owner: object) -> Iterator[Linear]:
    """Every linear layer of a decoder that a row meets, once, wherever it is kept; of experts as many as it chooses."""
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
        elif isinstance(one, Experts):
            waiting += [one.router, one.each[: one.num_chosen]]
        elif hasattr(one, "__dataclass_fields__"):
            waiting += [getattr(one, name) for name in one.__dataclass_fields__]


def _tensors(part: object) -> list[torch.Tensor]:
    """What a backend has packed a weight into."""
    return [value for value in (part, *getattr(part, "__dict__", {}).values()) if isinstance(value, torch.Tensor)]


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

    def __enter__(self) -> Foredraft:
        return self

    def __exit__(self, *exception: object) -> None:
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


@dataclass(frozen=True)
class Measured:
    """All rounds of one model. `theirs` is empty where there was no llama-bench."""

    ours: list[Round]
    theirs: list[Round]
    bandwidth: float  # bytes per second
    weights: int  # bytes that a run reads
    memory: int  # bytes

    def ratios(self, name: str) -> list[float]:
        """Of Foredraft to llama.cpp, within each round."""
        pairs = zip(self.ours, self.theirs, strict=True) if self.theirs else ()
        return [getattr(our, name) / getattr(their, name) for our, their in pairs]

    def figures(self) -> Figures:
        """What is published: medians of rounds, and ratios within rounds."""
        rounds = {"foredraft": self.ours, "llama.cpp": self.theirs}
        rates: Figures = {
            rate: {name: _median((getattr(each, rate) for each in some), 1) for name, some in rounds.items()}
            | {"ratio": _median(self.ratios(rate), 2)}
            for rate in ("plain", "prompt")
        }
        return {
            "rounds": len(self.ours),
            **rates,
            "rows_ms": {str(n): _median((1000 * each.rows[n] for each in self.ours), 3) for n in self.ours[0].rows},
            "floor_ms": round(1000 * self.weights / self.bandwidth, 3),
            "memory_mb": self.memory // 10**6,
        }


def _median(values: Iterable[float], digits: int) -> float | None:
    """None of nothing."""
    found = list(values)
    return round(statistics.median(found), digits) if found else None


def report(found: Measured) -> list[str]:
    """The lines of the report."""
    one = statistics.median(round.rows[1] for round in found.ours)
    lines = [
        f"read bandwidth {found.bandwidth / 1e9:.1f} GB/s; weights {found.weights / 1e6:.0f} MB, so a floor of "
        f"{1000 * found.weights / found.bandwidth:.1f} ms; one row reads {found.weights / one / 1e9:.1f} GB/s",
        "",
        f"{'':14}{'Foredraft':>16}{'llama.cpp':>16}{'ratio':>8}{'of rounds':>16}",
    ]
    for title, name in ((f"plain, {PLAIN_TOKENS}", "plain"), (f"prompt, {PREFILL_TOKENS}", "prompt")):
        line = f"{title:14}{_rate(getattr(each, name) for each in found.ours)}"
        if ratios := found.ratios(name):
            line += _rate(getattr(each, name) for each in found.theirs)
            line += f"{statistics.median(ratios):>7.2f}x{_range(ratios)}"
        lines.append(line)
    lines += ["", f"{'rows':14}{'step':>16}{'of one row':>16}{'':8}{'of rounds':>16}"]
    for rows in found.ours[0].rows:
        seconds = statistics.median(round.rows[rows] for round in found.ours)
        ratios = [round.rows[rows] / round.rows[1] for round in found.ours]
        lines.append(f"{rows:<14}{1000 * seconds:>13.2f} ms{statistics.median(ratios):>15.2f}x{'':8}{_range(ratios)}")
    return [*lines, "", f"memory {found.memory / 1e6:.0f} MB"]


def _rate(rates: Iterable[float]) -> str:
    return f"{statistics.median(rates):>10.1f} tok/s"


def _range(ratios: list[float]) -> str:
    return f"{f'{min(ratios):.2f}-{max(ratios):.2f}':>16}"


def find_llama_bench(settings: Settings, given: Path | None) -> LlamaBench | None:
    """The one that was named, or on a CPU the one that make builds; None where there is none for this model."""
    program = given or (LLAMA_BENCH if LLAMA_BENCH.exists() and not settings.is_on_gpu else None)
    if program is None or settings.model.suffix != ".gguf":
        return None
    if not program.exists():
        raise SystemExit(f"--llama-bench: there is no {program}.")
    return LlamaBench(program, settings.model, settings.threads)


def measure(settings: Settings, theirs: LlamaBench | None, rounds: int) -> Measured:
    our_rounds, their_rounds = [], []
    with Foredraft(settings) as ours:
        # Before the bandwidth takes memory of its own.
        memory, weights = ours.ask("memory_bytes"), ours.ask("packed_bytes")
        bandwidth = ours.ask("read_bandwidth")
        for number in range(rounds):
            say(f"round {number + 1} of {rounds}")
            if theirs:
                their_rounds.append(theirs.round())
            our_rounds.append(ours.round(number))
    return Measured(our_rounds, their_rounds, bandwidth, weights, memory)


def price_of_exactness(settings: Settings, rounds: int) -> Figures:
    """One sequence alone, and `settings.sequences` at once, with `exact=True` and without. A round is exact, not, not,
    exact; figures are medians of rounds, and the price is that of the ratios within rounds: 1.02 is two per cent more
    time."""
    many = settings.sequences
    taken: dict[bool, list[tuple[float, float]]] = {True: [], False: []}  # seconds of a token alone, and at once
    with Foredraft(settings) as exact, Foredraft(replace(settings, exact=False)) as not_exact:
        processes = {True: exact, False: not_exact}
        step = max(process.ask("plain", -1, 4, many) / 4 for process in processes.values())
        tokens = max(LEAST_TOKENS, min(MOST_TOKENS, int(AT_ONCE_S / step)))
        for number in range(rounds):
            for is_exact in (True, False, False, True):
                process = processes[is_exact]
                process.ask("plain", -1, 8)  # the first runs after a pause are slow
                alone = process.ask("plain", number, PLAIN_TOKENS) / PLAIN_TOKENS
                taken[is_exact].append((alone, process.ask("plain", number, tokens, many) / tokens / many))

    def by_round(is_exact: bool, place: int) -> list[float]:
        pairs = zip(taken[is_exact][::2], taken[is_exact][1::2], strict=True)
        return [(one[place] + other[place]) / 2 for one, other in pairs]

    def of(is_exact: bool) -> Figures:
        return {
            "ms_per_token": _median((1000 * seconds for seconds in by_round(is_exact, 0)), 3),
            "tokens_per_s": _median((1 / seconds for seconds in by_round(is_exact, 1)), 1),
        }

    price = {
        name: _median((one / other for one, other in zip(by_round(True, place), by_round(False, place))), 3)
        for place, name in enumerate(("latency", "throughput"))
    }
    return {"rounds": rounds, "sequences": many, "exact": of(True), "not_exact": of(False), "price": price}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m", help="a catalogue name or a GGUF file")
    parser.add_argument("--dtype", default="int4")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--no-exact", dest="exact", action="store_false", help="with `exact=False`")
    parser.add_argument("--llama-bench", type=Path, help="a llama-bench that was built for this machine")
    parser.add_argument("--out", type=Path, help="write all rounds to this file")
    options = parser.parse_args()
    settings = Settings(resolve(options.model), options.dtype, options.threads, options.exact, options.device)
    theirs = find_llama_bench(settings, options.llama_bench)
    if theirs is None:
        say("llama.cpp is left out: it needs a llama-bench (`make bench-plain` builds one) and a GGUF file")
    found = measure(settings, theirs, options.rounds)
    exact = "" if settings.exact else ", not exact"
    print(f"{settings.model.name} {settings.dtype}{exact}, {settings.threads} threads, {options.rounds} rounds in turn")
    print("\n".join(report(found)))
    if options.out:
        record = {"settings": asdict(settings), **asdict(found)}
        options.out.write_text(json.dumps(record, indent=1, default=str) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
