"""The controller against proposers that do their worst: `auto` beside `off`, interleaved, on the real model.

    python benchmarks/adversaries.py [--model smollm2-135m] [--dtype bfloat16] [--max-tokens 256] [--rounds 5]

Each adversary is the only proposer that `auto` may choose. Printed is the median time of both and whether `auto` stays
within 2 % and 50 ms of `off`.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from collections.abc import Sequence as Items
from functools import partial

from foredraft import LLM, SamplingParams
from foredraft.proposers.base import Proposer
from foredraft.proposers.registry import ProposerChoice, Spec
from foredraft.types import CompletionOutput, Draft, Sequence

Continuation = Callable[[Sequence, int], list[int]]


class Adversary(Proposer):
    """Very sure of draft tokens that are right or wrong, as `continuation` makes them."""

    num_lookahead_tokens = 16

    def __init__(self, name: str, continuation: Continuation, free: bool = True) -> None:
        self.name = name
        self.free = free
        self._continuation = continuation

    def propose(self, sequences: Items[Sequence], budgets: Items[int], min_score: float) -> list[Draft]:
        return [self._chain(self._continuation(one, budget)) for one, budget in zip(sequences, budgets, strict=True)]

    def _chain(self, tokens: list[int]) -> Draft:
        scores = tuple(0.99**depth for depth in range(1, len(tokens) + 1))
        return Draft(tuple(tokens), tuple(range(-1, len(tokens) - 1)), scores, (self.name,) * len(tokens))


def adversaries(text: list[int]) -> list[Adversary]:
    """`text` is what plain decoding writes."""

    def right(sequence: Sequence, budget: int) -> list[int]:
        return text[sequence.num_output_tokens :][:budget]

    def wrong(sequence: Sequence, budget: int) -> list[int]:
        return [token + 1 for token in right(sequence, budget)]

    def turncoat(sequence: Sequence, budget: int) -> list[int]:
        return (right if sequence.num_output_tokens < 50 else wrong)(sequence, budget)

    def slow(sequence: Sequence, budget: int) -> list[int]:
        time.sleep(0.04)
        return right(sequence, budget)

    def costly(sequence: Sequence, budget: int) -> list[int]:
        time.sleep(0.002 * budget)
        return wrong(sequence, budget)

    def failing(sequence: Sequence, budget: int) -> list[int]:
        if sequence.num_output_tokens > 10:
            raise RuntimeError("this proposer fails on purpose")
        return wrong(sequence, budget)

    return [
        Adversary("always wrong", wrong),
        Adversary("right for 50 tokens, then wrong", turncoat),
        Adversary("slow, and right", slow, free=False),
        Adversary("always wrong, and not free", wrong, free=False),
        Adversary("always wrong, and costly", costly, free=False),
        Adversary("raises", failing),
    ]


def run(llm: LLM, prompt: list[int], params: SamplingParams, spec: Spec) -> tuple[float, CompletionOutput]:
    started = time.perf_counter()
    llm.engine.add("0", prompt, params, spec)
    output: CompletionOutput | None = None
    while llm.engine.has_work:
        for event in llm.engine.step():
            output = event.output or output
    assert output is not None
    return time.perf_counter() - started, output


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--max-tokens", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    llm = LLM(arguments.model, dtype=arguments.dtype, threads=arguments.threads, prefix_caching=False)
    prompt = llm.encode([{"role": "user", "content": "Tell me a long story about a clockmaker and her apprentice."}])
    params = SamplingParams(max_tokens=arguments.max_tokens, temperature=0, ignore_eos=True)
    decode = partial(run, llm, prompt, params)
    _, plain = decode(Spec())
    decode(Spec((ProposerChoice("ngram"),), adaptive=True))  # the first run of a proposer is the slowest
    print(f"{arguments.model} {arguments.dtype}, {arguments.max_tokens} tokens, median of {arguments.rounds} rounds")
    for adversary in adversaries(plain.token_ids):
        llm.engine.speculation.assignments.install(ProposerChoice(adversary.name), adversary)
        spec = Spec((ProposerChoice(adversary.name),), adaptive=True)
        times: dict[str, list[float]] = {"off": [], "auto": []}
        decisions: dict[str, int] = {}
        for turn in range(arguments.rounds):
            for name in ("off", "auto") if turn % 2 else ("auto", "off"):
                seconds, output = decode(Spec() if name == "off" else spec)
                assert output.token_ids == plain.token_ids
                times[name].append(seconds)
                decisions = output.metrics.decisions if name == "auto" else decisions
        off, auto = (statistics.median(times[name]) for name in ("off", "auto"))
        verdict = "holds" if auto <= 1.02 * off + 0.05 else "EXCEEDED"
        print(f"{adversary.name:32} off {off:6.3f} s  auto {auto:6.3f} s  {auto / off:5.3f}  {verdict}  {decisions}")


if __name__ == "__main__":
    main()
