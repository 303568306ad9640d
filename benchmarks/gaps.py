"""What a long prompt does to a stream beside it: the stream's slowest gap, and how much longer the prompt takes.

    python benchmarks/gaps.py [--model smollm2-135m] [--dtype bfloat16] [--threads 2] [--prompt 1600] [--rounds 5]

In a round the prompt runs alone, and then beside a stream that decodes; rounds of both alternate. Every round has a
fresh engine limit, so that its first chunk is that of an engine that has measured nothing. Gaps are between the tokens
of the stream while the prompt is computed. At most 0.15 s and 1.35 times as long are asked for.
"""

from __future__ import annotations

import argparse
import statistics
import time

from common import Prompts

from foredraft import LLM, SamplingParams
from foredraft.engine.chunks import ChunkLimit
from foredraft.proposers.registry import Spec

MOST_GAP_S = 0.15
MOST_RATIO = 1.35
STREAM = SamplingParams(max_tokens=2000, temperature=0, ignore_eos=True)
FIRST = SamplingParams(max_tokens=1, temperature=0, ignore_eos=True)


def first_token_s(llm: LLM, prompt: list[int]) -> tuple[float, list[float]]:
    """Seconds until the prompt's first token, and the times of the steps until then."""
    llm.engine.add("prompt", prompt, FIRST, Spec())
    started = time.perf_counter()
    steps: list[float] = []
    while llm.engine.is_live("prompt"):
        before = time.perf_counter()
        llm.engine.step()
        steps.append(time.perf_counter() - before)
    return time.perf_counter() - started, steps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--prompt", type=int, default=1600, help="tokens of the long prompt")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--max-chunk-s", type=float, default=0.1)
    arguments = parser.parse_args()
    llm = LLM(
        arguments.model,
        dtype=arguments.dtype,
        threads=arguments.threads,
        spec="off",
        prefix_caching=False,
        kv_cache_tokens=2 * arguments.prompt + 2048,
    )
    prompts = Prompts(llm.model_config.vocab_size)
    prompt = prompts.prompt("long", arguments.prompt)
    first_token_s(llm, prompt)  # the first run of a model is the slowest
    alone: list[float] = []
    beside: list[float] = []
    gaps: list[float] = []
    for number in range(arguments.rounds):
        alone.append(first_token_s(llm, prompt)[0])
        llm.engine.chunk_limit = ChunkLimit(arguments.max_chunk_s)
        llm.engine.add("stream", prompts.prompt(f"stream {number}", 16), STREAM, Spec())
        for _ in range(8):
            llm.engine.step()
        seconds, steps = first_token_s(llm, prompt)
        llm.engine.abort("stream")
        beside.append(seconds)
        gaps.append(max(steps))
        ratio = seconds / alone[-1]
        print(
            f"round {number}: alone {alone[-1]:.2f} s, beside {seconds:.2f} s ({ratio:.2f}x) in {len(steps)} steps, "
            f"slowest gap {1000 * gaps[-1]:.0f} ms"
        )
    ratio = statistics.median(beside) / statistics.median(alone)
    print(f"{arguments.model} {arguments.dtype}, {arguments.threads} threads, {arguments.prompt} tokens")
    for what, median, best, limit in (
        ("slowest gap in s", statistics.median(gaps), min(gaps), MOST_GAP_S),
        ("ratio to alone", ratio, min(b / a for a, b in zip(alone, beside, strict=True)), MOST_RATIO),
    ):
        verdict = "holds" if median <= limit else "EXCEEDED"
        print(f"{what:16} {median:6.3f} (best round {best:.3f})   at most {limit:g}: {verdict}")


if __name__ == "__main__":
    main()
