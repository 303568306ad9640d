"""Plain decoding beside transformers: the same model file, the same prompts, the same threads, rounds interleaved.

Every figure is the median over the rounds. Prompts are distinct, and nothing is cached between them. The two engines
live in two processes, so that neither's thread pool disturbs the other; while one is measured, the other waits.

    python benchmarks/plain.py [--out results.json] [--publish]

`--publish` writes the figures to docs/results/ and renews docs/benchmarks.md and the table in README.md.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import time
import warnings
from collections import defaultdict
from dataclasses import asdict, dataclass
from importlib.metadata import version
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Protocol

from common import PREFILL_TOKENS, Prompts, say
from pages import write_pages
from plain_report import introduction, table
from published import new_record, publish

PROMPT_TOKENS = 32  # of the prompts whose decoding is timed
DECODE_TOKENS = 64
BATCH = 8
BATCH_DTYPE = "bfloat16"
SLOW_S_PER_TOKEN = 0.5  # beyond this a contender gets one round of a small sample
SLOW_PREFILL_TOKENS = 16
SLOW_PROMPT_TOKENS = 2
SLOW_DECODE_TOKENS = 8


@dataclass(frozen=True)
class Contender:
    """One row of the table."""

    engine: str
    dtype: str
    exact: bool | None = None  # a Foredraft option

    @property
    def title(self) -> str:
        if self.exact is None:
            return f"{self.engine} {self.dtype}"
        return f"{self.engine} {self.dtype}" + ("" if self.exact else ", `exact=False`")


THEIRS = (Contender("transformers", "float32"), Contender("transformers", "bfloat16"))
OURS = tuple(
    Contender("Foredraft", dtype, exact) for dtype in ("float32", "bfloat16", "int4") for exact in (True, False)
)


class Engine(Protocol):
    """What is measured, for either engine. Times are in seconds."""

    def prefill(self, prompt: list[int]) -> float:
        """The time from the prompt to its first token."""

    def decode(self, prompts: list[list[int]], tokens: int) -> float:
        """The time per token after the first, of all prompts together."""


class ForedraftEngine:
    def __init__(self, model: str, contender: Contender, threads: int) -> None:
        from foredraft import LLM

        self.llm = LLM(
            model,
            spec="off",
            dtype=contender.dtype,
            device="cpu",
            exact=bool(contender.exact),
            threads=threads,
            prefix_caching=False,
        )

    def prefill(self, prompt: list[int]) -> float:
        return self._run([prompt], 1)[0].time_to_first_token_s

    def decode(self, prompts: list[list[int]], tokens: int) -> float:
        metrics = self._run(prompts, tokens)
        seconds = max(m.total_time_s for m in metrics) - min(m.time_to_first_token_s for m in metrics)
        return seconds / sum(m.emitted_tokens - 1 for m in metrics)

    def _run(self, prompts: list[list[int]], tokens: int) -> list[Any]:
        from foredraft import SamplingParams

        params = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True)
        metrics = [output.metrics for output in self.llm.generate(prompts, params)]
        assert all(m.emitted_tokens == tokens for m in metrics), "every text must have its full length"
        return metrics


class TransformersEngine:
    """transformers with its fastest ordinary settings: inference mode, fused attention, its own KV cache."""

    def __init__(self, model_file: Path, contender: Contender, threads: int) -> None:
        os.environ["TQDM_DISABLE"] = "1"
        warnings.simplefilter("ignore")  # without bfloat16 instructions torch says so, at length
        import torch
        from transformers import AutoModelForCausalLM
        from transformers.utils import logging

        logging.set_verbosity_error()
        torch.set_num_threads(threads)
        is_gguf = model_file.suffix == ".gguf"
        self.torch = torch
        self.model = AutoModelForCausalLM.from_pretrained(
            model_file.parent if is_gguf else model_file,
            dtype=getattr(torch, contender.dtype),
            attn_implementation="sdpa",
            **({"gguf_file": model_file.name} if is_gguf else {}),
        ).eval()

    def prefill(self, prompt: list[int]) -> float:
        ids = self.torch.tensor([prompt])
        with self.torch.inference_mode():
            started = time.perf_counter()
            self.model(ids, use_cache=True, logits_to_keep=1).logits.argmax(-1).item()
            return time.perf_counter() - started

    def decode(self, prompts: list[list[int]], tokens: int) -> float:
        ids = self.torch.tensor(prompts)
        clock = TokenClock()
        with self.torch.inference_mode():
            self.model.generate(
                ids,
                attention_mask=self.torch.ones_like(ids),
                do_sample=False,
                min_new_tokens=tokens,
                max_new_tokens=tokens,
                pad_token_id=0,
                streamer=clock,
            )
        _, first, *_, last = clock.times
        assert len(clock.times) == tokens + 1, "every text must have its full length"
        return (last - first) / (tokens - 1)


class TokenClock:
    """A streamer for transformers that notes when each token comes; the first note is the prompt's."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, value: Any) -> None:
        self.times.append(time.perf_counter())

    def end(self) -> None:
        """Nothing is left to note."""


class Worker:
    """A process that holds engines, each loaded when first asked for, and measures one thing at a time."""

    def __init__(self, model: str, threads: int) -> None:
        context = multiprocessing.get_context("spawn")
        self.connection, theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(theirs, model, threads), daemon=True)
        self.process.start()
        theirs.close()

    def measure(self, contender: Contender, method: str, *arguments: Any) -> float:
        self.connection.send((contender, method, arguments))
        return float(self.connection.recv())

    def close(self) -> None:
        self.connection.close()
        self.process.join(timeout=10)


def _serve(connection: Connection, model: str, threads: int) -> None:
    engines: dict[Contender, Engine] = {}
    while True:
        try:
            contender, method, arguments = connection.recv()
        except EOFError:
            return
        if contender not in engines:
            engines[contender] = _load(contender, model, threads)
        connection.send(getattr(engines[contender], method)(*arguments))


def _load(contender: Contender, model: str, threads: int) -> Engine:
    if contender.engine == "Foredraft":
        return ForedraftEngine(model, contender, threads)
    from foredraft.models.catalog import resolve

    return TransformersEngine(resolve(model), contender, threads)


@dataclass(frozen=True)
class Cell:
    """One measured figure."""

    engine: str
    dtype: str
    exact: bool | None
    measure: str  # "decode" or "prefill"
    batch: int
    tokens: int  # of the prompt for prefill, decoded per prompt for decode
    tokens_per_s: float
    samples: list[float]  # tokens per second, one per round


def measure_all(model: str, threads: int, rounds: int, vocab_size: int) -> list[Cell]:
    """Every contender once per round, one after another; the slow ones in the first round only."""
    prompts = Prompts(vocab_size)
    workers = {"Foredraft": Worker(model, threads), "transformers": Worker(model, threads)}
    rates: dict[tuple[Contender, str, int, int], list[float]] = defaultdict(list)
    slow = _warm_up(workers, prompts)
    for number in range(rounds):
        say(f"round {number + 1} of {rounds}")
        for contender in (*THEIRS, *OURS):
            if contender in slow and number > 0:
                continue
            worker = workers[contender.engine]
            length = SLOW_PREFILL_TOKENS if contender in slow else PREFILL_TOKENS
            tokens = SLOW_DECODE_TOKENS if contender in slow else DECODE_TOKENS
            seconds = worker.measure(contender, "prefill", prompts.prompt(f"prefill {number}", length))
            rates[contender, "prefill", 1, length].append(length / seconds)
            prompt = prompts.prompt(f"decode {number}", SLOW_PROMPT_TOKENS if contender in slow else PROMPT_TOKENS)
            seconds = worker.measure(contender, "decode", [prompt], tokens)
            rates[contender, "decode", 1, tokens].append(1 / seconds)
            if contender == Contender("Foredraft", BATCH_DTYPE, True):
                batch = [prompts.prompt(f"batch {number} {row}", PROMPT_TOKENS) for row in range(BATCH)]
                seconds = worker.measure(contender, "decode", batch, tokens)
                rates[contender, "decode", BATCH, tokens].append(1 / seconds)
    for worker in workers.values():
        worker.close()
    return [
        Cell(who.engine, who.dtype, who.exact, measure, batch, tokens, statistics.median(samples), samples)
        for (who, measure, batch, tokens), samples in rates.items()
    ]


def _warm_up(workers: dict[str, Worker], prompts: Prompts) -> set[Contender]:
    """Loads everything, runs it twice, and says who is too slow for full samples."""
    slow = set()
    for contender in (*THEIRS, *OURS):
        for name in ("first run", "second run"):
            prompt = prompts.prompt(name, SLOW_PROMPT_TOKENS)
            seconds = workers[contender.engine].measure(contender, "decode", [prompt], 3)
        say(f"{contender.title.replace('`', '')}: ready, about {1 / seconds:.1f} tok/s")
        if seconds > SLOW_S_PER_TOKEN:
            slow.add(contender)
    return slow


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, help="write all figures to this file")
    parser.add_argument("--publish", action="store_true", help="write docs/results/ and renew the pages")
    options = parser.parse_args()

    from foredraft import __version__
    from foredraft.models.catalog import open_checkpoint, resolve
    from foredraft.reports.facts import cpu_name

    versions = {"foredraft": __version__, **{name: version(name) for name in ("torch", "transformers")}}
    vocab_size = open_checkpoint(resolve(options.model)).config.vocab_size
    cells = measure_all(options.model, options.threads, options.rounds, vocab_size)
    record = new_record(
        "plain",
        cpu_name(),
        options.threads,
        versions,
        "make bench-plain",
        model=options.model,
        rounds=options.rounds,
        prompt_tokens=PROMPT_TOKENS,
        decode_tokens=DECODE_TOKENS,
        prefill_tokens=PREFILL_TOKENS,
        cells=[asdict(cell) for cell in cells],
    )
    print(f"{introduction(record)}\n\n{table(record)}")
    if options.out:
        options.out.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    if options.publish:
        publish(record, f"plain {options.model} {cpu_name()}")
        write_pages()


if __name__ == "__main__":
    main()
