"""What trained heads reach: tokens per run of the target over a file of questions, by kind of question, and whether
every text is the one of plain decoding.

    python benchmarks/heads.py --suite questions.jsonl [--head FOLDER] [--dtype bfloat16] [--device cuda]
        [--temperature 0.8] [--json results.json] [SPEC ...]
"""

from __future__ import annotations

import argparse
import json
import time
from collections import defaultdict

from foredraft import LLM, SamplingParams
from foredraft.bench.suite import load_suite
from foredraft.types import RequestOutput

SPECS = (
    "eagle:tree=chain,k=5",
    "eagle:nodes=16",
    "dflash:tree=chain,k=7",
    "dflash:nodes=15",
    "medusa:nodes=16",
    "draft_model:k=4",
    "suffix+eagle:nodes=16",
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("specs", nargs="*", default=SPECS, metavar="SPEC")
    parser.add_argument("--suite", required=True)
    parser.add_argument("--limit", type=int)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--head", default="auto")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--max-tokens", type=int, default=192)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--json")
    arguments = parser.parse_args()
    questions = load_suite(arguments.suite, arguments.limit)
    llm = LLM(
        arguments.model,
        head=arguments.head,
        dtype=arguments.dtype,
        device=arguments.device,
        threads=arguments.threads,
        max_num_seqs=arguments.batch,
        spec="off",
    )
    prompts = [[{"role": "user", "content": question.text}] for question in questions]
    params = [
        SamplingParams(max_tokens=arguments.max_tokens, temperature=arguments.temperature, seed=seed)
        for seed in range(len(questions))
    ]
    plain = [output.token_ids for output in llm.chat(prompts, params, spec="off")]
    kinds = [question.category for question in questions]
    found = {}
    for spec in arguments.specs:
        started = time.monotonic()
        outputs = llm.chat(prompts, params, spec=spec)
        same = sum(output.token_ids == text for output, text in zip(outputs, plain, strict=True))
        by_kind: dict[str, list[RequestOutput]] = defaultdict(list)
        for kind, output in zip(kinds, outputs, strict=True):
            by_kind[kind].append(output)
        found[spec] = {
            "tokens_per_run": tokens_per_run(outputs),
            "acceptance": by_depth(outputs),
            "same_text": f"{same}/{len(outputs)}",
            "kinds": {kind: tokens_per_run(some) for kind, some in by_kind.items()},
        }
        print(f"{spec:36} {tokens_per_run(outputs):.3f}  same text {same}/{len(outputs)}", end="  ")
        drafts, runs = (sum(getattr(o.metrics, name) for o in outputs) for name in ("drafts", "target_runs"))
        print(f"drafts in {drafts / runs:.0%} of runs, {time.monotonic() - started:.0f} s", end="  ")
        print(" ".join(f"{rate:.2f}" for rate in by_depth(outputs)), flush=True)
        print("   ", ", ".join(f"{kind} {tokens_per_run(some):.2f}" for kind, some in by_kind.items()), flush=True)
    if arguments.json:
        with open(arguments.json, "w", encoding="utf-8") as file:
            json.dump(found, file, indent=1)


def tokens_per_run(outputs: list[RequestOutput]) -> float:
    """Of runs with a draft: accepted tokens and the target's own. Other runs are those of prompts, and in a batch those
    of sequences whose prompt the head has yet to read."""
    accepted = sum(output.metrics.accepted_tokens for output in outputs)
    return 1 + accepted / max(1, sum(output.metrics.drafts for output in outputs))


def by_depth(outputs: list[RequestOutput]) -> list[float]:
    """The share of drafts with a token at each depth that had it accepted."""
    depth = max((len(output.metrics.drafted_per_depth) for output in outputs), default=0)

    def total(counts: list[list[int]], place: int) -> int:
        return sum(count[place] for count in counts if place < len(count))

    drafted = [output.metrics.drafted_per_depth for output in outputs]
    accepted = [output.metrics.accepted_per_depth for output in outputs]
    return [total(accepted, place) / max(1, total(drafted, place)) for place in range(depth)]


if __name__ == "__main__":
    main()
