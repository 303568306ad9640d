"""The runs of Foredraft that step.py times, in the process that is measured."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from common import PREFILL_TOKENS, Prompts

from foredraft import LLM, SamplingParams
from foredraft.backends.base import Linear
from foredraft.batch import pack
from foredraft.proposers.registry import parse_spec
from foredraft.sampling.verify import verify
from foredraft.types import Draft, Sequence, Work

CONTEXT = 256
ROWS = (1, 2, 4, 8, 16, 32)
REPEATS = 5  # of every number of rows, interleaved
OFF = "off"


class Steps:
    """An LLM, and a sequence of its cache that single steps can be run on. All times are in seconds."""

    def __init__(self, model: Path, dtype: str, threads: int) -> None:
        self.llm = LLM(
            str(model),
            spec=OFF,
            dtype=dtype,
            device="cpu",
            threads=threads,
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
            verify(output.logits, [work], runner.sampler(output))
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
