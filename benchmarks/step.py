"""Whole steps of the default model beside the machine's limits and beside torch's kernels, interleaved in one run.

    python benchmarks/step.py [--model smollm2-135m] [--dtype int4] [--threads 2] [--rounds 7]

A step is a run of the target with its sampling, after 256 tokens of context, by its number of rows. The read bandwidth
is that of summing half a gigabyte; a step's own is the packed weights' bytes over its time.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Iterator

import torch

from foredraft import LLM, SamplingParams
from foredraft.backends.base import Linear
from foredraft.batch import pack
from foredraft.sampling.verify import verify
from foredraft.types import Draft, Sequence, Work

ROWS = (1, 2, 4, 8, 16, 32)
CONTEXT, PROMPT = 256, 512


class Steps:
    """One backend, and a sequence that it can run steps on."""

    def __init__(self, model: str, dtype: str, backend: str, threads: int) -> None:
        self.llm = LLM(model, dtype=dtype, backend=backend, threads=threads, max_model_len=1024, kv_cache_tokens=2048)
        engine = self.llm.engine
        tokens = [1 + 7 * place % 5000 for place in range(PROMPT + 1)]
        self.sequence = Sequence(-1, "", 0, tokens, len(tokens), SamplingParams(temperature=0).resolved({}), 0, 1)
        assert engine.scheduler.pool.reserve(self.sequence, len(tokens) + max(ROWS))
        self.prompt()

    def prompt(self) -> float:
        """Seconds for a prompt of 512 tokens."""
        return self._seconds(Work(self.sequence, PROMPT))

    def step(self, rows: int) -> float:
        """Seconds for a step of so many rows: one known token and a chain of draft tokens."""
        tokens = self.sequence.token_ids
        known = Sequence(-1, "", 0, tokens[: CONTEXT + 1], CONTEXT + 1, self.sequence.params, 0, 99, CONTEXT)
        known.block_table = self.sequence.block_table
        drafted = tuple(tokens[CONTEXT + 1 : CONTEXT + rows])
        count = len(drafted)
        draft = Draft(drafted, tuple(range(-1, count - 1)), (1.0,) * count, ("chain",) * count)
        return self._seconds(Work(known, 1, draft=draft))

    def packed_bytes(self) -> int:
        decoder = self.llm.engine.runner.decoder
        return sum(part.memory.numel() for linear in _linears(decoder) for part in linear.parts)

    def _seconds(self, work: Work) -> float:
        runner = self.llm.engine.runner
        started = time.perf_counter()
        output = runner.forward(pack([work], self.llm.engine.kv.block_size))
        with torch.inference_mode():
            verify(output.logits, [work], runner.backend.sample)
        return time.perf_counter() - started


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


def read_bandwidth() -> float:
    """Bytes per second of summing what no cache holds."""
    memory = torch.ones(128 * 2**20)
    times = []
    for _ in range(7):
        started = time.perf_counter()
        memory.sum()
        times.append(time.perf_counter() - started)
    return 4 * memory.numel() / min(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--dtype", default="int4")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=7)
    arguments = parser.parse_args()
    engines = {name: Steps(arguments.model, arguments.dtype, name, arguments.threads) for name in ("native", "torch")}
    times: dict[tuple[str, int], list[float]] = {}
    prompts: dict[str, list[float]] = {name: [] for name in engines}
    for turn in range(arguments.rounds + 1):
        for name, steps in engines.items():
            for rows in ROWS if name == "native" else (1, 16):
                seconds = steps.step(rows)
                if turn:
                    times.setdefault((name, rows), []).append(seconds)
            if turn and (name == "native" or turn == 1):
                prompts[name].append(steps.prompt())
    median = {key: statistics.median(values) for key, values in times.items()}
    one = median["native", 1]
    bandwidth, size = read_bandwidth(), engines["native"].packed_bytes()
    print(f"{arguments.model} {arguments.dtype}, {arguments.threads} threads, {arguments.rounds} interleaved rounds")
    floor = 1000 * size / bandwidth
    print(f"read bandwidth {bandwidth / 1e9:.1f} GB/s; weights {size / 1e6:.0f} MB, so a floor of {floor:.1f} ms")
    for (name, rows), seconds in median.items():
        line = f"{name:7} {rows:3} rows {1000 * seconds:8.1f} ms   {seconds / one:5.2f}x of one native row"
        print(line + (f"   {size / seconds / 1e9:5.1f} GB/s" if name == "native" and rows == 1 else ""))
    for name, seconds in prompts.items():
        print(f"{name:7} prompt of {PROMPT}: {PROMPT / statistics.median(seconds):8.0f} tokens/s")


if __name__ == "__main__":
    main()
