"""The acceptance rules side by side: how many tokens of a sampled draft model each accepts, beside what is possible.

At temperature 1 with chains of 4. `rejection` and `block` judge tokens that the draft model samples with noise of its
own; `match` lets it draw with the target's noise. The reference is the sum over tokens of min(p, q), averaged over the
very texts that were written: no rule for single tokens can accept more often than that.

    python benchmarks/acceptance.py --model TARGET --draft DRAFT [--prompts 8] [--max-tokens 48] [--k 4]
"""

from __future__ import annotations

import argparse
from dataclasses import replace

import torch
from torch import Tensor

from foredraft import LLM, SamplingParams
from foredraft.batch import pack
from foredraft.bench.suite import built_in
from foredraft.proposers.model.whole_model import ModelDrafter
from foredraft.runtime.runner import Runner
from foredraft.types import RequestOutput, Sequence, Work


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--draft", default="early_exit:layers=24", help="a model's path, or a speculation string")
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--max-tokens", type=int, default=48)
    parser.add_argument("--k", type=int, default=4)
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    llm = LLM(arguments.model, threads=arguments.threads, max_model_len=2048, kv_cache_tokens=8192)
    draft = arguments.draft
    spec = f"{draft},k={arguments.k}" if ":" in draft else f"draft_model:model={draft},k={arguments.k}"
    questions = [question for question in built_in() if question.category in ("code-editing", "chat")]
    step = max(1, len(questions) // arguments.prompts)
    prompts = [[{"role": "user", "content": q.text}] for q in questions[::step][: arguments.prompts]]
    params = SamplingParams(max_tokens=arguments.max_tokens, temperature=1.0, seed=1, ignore_eos=True)

    print(f"{arguments.model}, {spec}, temperature 1, {len(prompts)} prompts of {arguments.max_tokens} tokens")
    print("rule        share of drafts accepted down to depth 1, 2, …      tokens per run   Σ min(p, q)")
    for rule in ("rejection", "block", "match"):
        outputs = [llm.chat([prompt], replace(params, acceptance=rule), spec=spec)[0] for prompt in prompts]
        runs = sum(output.metrics.target_runs for output in outputs)
        kept = ([o.metrics.target_runs * rate for rate in o.metrics.acceptance_per_depth] for o in outputs)
        by_depth = "  ".join(f"{sum(column) / runs:.3f}" for column in zip(*kept, strict=False))
        tokens = sum(o.metrics.emitted_tokens for o in outputs)
        overlap = torch.cat([overlaps(llm, output) for output in outputs]).mean()
        print(f"{rule:10}  {by_depth:44}  {tokens / runs:14.2f}   {overlap:11.3f}", flush=True)


@torch.inference_mode()
def overlaps(llm: LLM, output: RequestOutput) -> Tensor:
    """Σ min(p, q) at every token of an answer."""
    (guarded,) = llm.engine.speculation.assignments.proposers.values()
    proposer = guarded.proposer
    assert isinstance(proposer, ModelDrafter)
    tokens = [*output.prompt_token_ids, *output.token_ids[:-1]]
    p, q = (_probabilities(llm, runner, tokens) for runner in (llm.engine.runner, proposer.runner.runner))
    first = len(output.prompt_token_ids) - 1
    width = min(p.shape[1], q.shape[1])
    return torch.minimum(p[first:, :width], q[first:, :width]).sum(-1)


def _probabilities(llm: LLM, runner: Runner, tokens: list[int]) -> Tensor:
    """What a model says after every token of a text: [tokens, vocab]."""
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
