"""What drafts reach: tokens per run of the target by kind of prompt, acceptance by depth, and whether every text is the
one of plain decoding. No clock changes these figures.

    python benchmarks/acceptance.py --suite questions.jsonl [--head FOLDER] [--device cuda] [--temperature 0.8] [SPEC …]
    python benchmarks/acceptance.py --suite benchmarks/data/grammars.jsonl --batch 1 suffix suffix+grammar
    python benchmarks/acceptance.py --overlap --temperature 1 --rule match --rule rejection --rule block SPEC

Without specs, all trained heads of the model are compared. A line of the suite may have a `grammar`, a JSON schema that
its answer follows. `--rule` may be repeated; only `match` promises the same text. `--overlap` prints the sum over
tokens of min(p, q) beside it, averaged over the very texts that were written: no rule that judges single tokens can
accept tokens of a draft model more often than that.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from foredraft import LLM, SamplingParams
from foredraft.batch import pack
from foredraft.bench.suite import BUILT_IN_NAME, load_suite
from foredraft.outputs import RequestOutput
from foredraft.proposers.model.whole_model import ModelDrafter
from foredraft.reports.prompts import Question
from foredraft.runtime.runner import Runner
from foredraft.types import Sequence, Work

SPECS = (
    "eagle:tree=chain,k=5",
    "eagle:nodes=16",
    "dflash:tree=chain,k=7",
    "dflash:nodes=15",
    "draft_model:k=4",
    "suffix+eagle:nodes=16",
)
MATCH = "match"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("specs", nargs="*", default=SPECS, metavar="SPEC")
    parser.add_argument("--suite", default=BUILT_IN_NAME)
    parser.add_argument("--limit", type=int)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--head", default="auto")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--max-tokens", type=int, default=192)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--rule", action="append", choices=(MATCH, "rejection", "block"))
    parser.add_argument("--overlap", action="store_true", help="of a spec with one draft model, at temperature 1")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    questions, grammars = load_suite(arguments.suite, arguments.limit), grammars_of(arguments.suite)
    llm = LLM(
        arguments.model,
        head=arguments.head,
        dtype=arguments.dtype,
        device=arguments.device,
        threads=arguments.threads,
        max_num_seqs=arguments.batch,
        spec="off",
    )
    options: dict[str, Any] = {"max_tokens": arguments.max_tokens, "temperature": arguments.temperature}
    params = [
        SamplingParams(**options, seed=seed, grammar=grammars.get(question.text))
        for seed, question in enumerate(questions)
    ]
    found: dict[str, Any] = {}
    for spec, rule, figures in reached(llm, questions, params, arguments.specs, arguments.rule or (MATCH,)):
        rate, share = figures["tokens_per_run"], figures["runs_with_a_draft"]
        line = f"{spec:36} {rule:9} {rate:.3f} tokens per run, drafts in {share:.0%}"
        if rule == MATCH:
            line += f", same text {figures['same_text']}/{len(questions)}"
        if arguments.overlap:
            figures["overlap"] = float(torch.cat([overlaps(llm, output) for output in figures["outputs"]]).mean())
            line += f", Σ min(p, q) {figures['overlap']:.3f}"
        print(line, " by depth", " ".join(f"{rate:.2f}" for rate in figures["acceptance"]))
        print("   ", ", ".join(f"{kind} {rate:.2f}" for kind, rate in figures["kinds"].items()), flush=True)
        del figures["outputs"]
        found[f"{spec} {rule}"] = figures
    if arguments.json:
        arguments.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


def reached(
    llm: LLM, questions: list[Question], params: list[SamplingParams], specs: Iterable[str], rules: Iterable[str]
) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Every spec under every rule: what its drafts reach, and how many of its texts are those of plain decoding."""
    prompts = [question.encoded(llm) for question in questions]
    plain = [output.token_ids for output in llm.generate(prompts, params, spec="off")]
    for spec, rule in product(specs, rules):
        llm.engine.speculation.clear()
        outputs = llm.generate(prompts, [replace(each, acceptance=rule) for each in params], spec=spec)
        by_kind: dict[str, list[RequestOutput]] = defaultdict(list)
        for question, output in zip(questions, outputs, strict=True):
            by_kind[question.category].append(output)
        drafts, runs = (sum(getattr(o.metrics, name) for o in outputs) for name in ("drafts", "target_runs"))
        figures = {
            "tokens_per_run": tokens_per_run(outputs),
            "runs_with_a_draft": drafts / runs,
            "acceptance": by_depth(outputs),
            "kinds": {kind: tokens_per_run(some) for kind, some in by_kind.items()},
            "same_text": sum(output.token_ids == text for output, text in zip(outputs, plain, strict=True)),
            "outputs": outputs,
        }
        yield spec, rule, figures


def grammars_of(suite: str) -> dict[str, Any]:
    """Of a suite's lines with a `grammar`: the grammar by the question's text."""
    if suite == BUILT_IN_NAME:
        return {}
    lines = Path(suite).read_text(encoding="utf-8").splitlines()
    records = [json.loads(line) for line in lines if line.strip()]
    return {record["turns"][0]: record["grammar"] for record in records if "grammar" in record}


def tokens_per_run(outputs: list[RequestOutput]) -> float:
    """Of runs with a draft: accepted tokens and the target's own. Other runs are those of prompts, and in a batch those
    of sequences whose prompt the head has yet to compute."""
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


@torch.inference_mode()
def overlaps(llm: LLM, output: RequestOutput) -> Tensor:
    """Σ min(p, q) at every token of an answer."""
    (guarded,) = llm.engine.speculation.assignments.proposers.values()
    proposer = guarded.proposer
    assert isinstance(proposer, ModelDrafter), "only a draft model has a distribution of its own at every token"
    tokens = [*output.prompt_token_ids, *output.token_ids[:-1]]
    p, q = (_probabilities(llm, runner, tokens) for runner in (llm.engine.runner, proposer.runner.runner))
    first = len(output.prompt_token_ids) - 1
    width = min(p.shape[1], q.shape[1])
    return torch.minimum(p[first:, :width], q[first:, :width]).sum(-1)


def _probabilities(llm: LLM, runner: Runner, tokens: list[int]) -> Tensor:
    """The distribution after every token of a text: [tokens, vocab]."""
    pool = llm.engine.scheduler.pool
    text = Sequence(-1, "", 0, tokens, len(tokens), SamplingParams(prompt_logprobs=0).resolved({}), 0, 1)
    assert pool.reserve(text, len(tokens))
    try:
        logits = runner.forward(pack([Work(text, len(tokens))], pool.block_size)).logits
    finally:
        pool.free(text, forget=True)
    return logits.softmax(-1)


if __name__ == "__main__":
    main()
