"""A fuzz over heads: random requests in a busy engine, with aborts and a pool that is too small. Nothing may differ.

`make fuzz WHAT=heads`, or `python -m tests.fuzz_heads --requests 1000 --seed 7 --kernels avx2`.

Under `match` an answer must be that of an idle engine without speculation, to the last log probability. Under
`rejection` and `block` it follows from the drafts, so every draft must be the one that a fresh engine makes of the same
tokens, to the last bit of q.
"""

from __future__ import annotations

import argparse
import logging
import random
import sys
import tempfile
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from foredraft.backends.native import library
from foredraft.batch import pack
from foredraft.errors import ForedraftError
from foredraft.heads.base import CORRECTIONS
from foredraft.llm import LLM
from foredraft.outputs import CompletionOutput
from foredraft.params import SamplingParams
from foredraft.proposers.registry import parse_spec
from foredraft.types import Draft, Sequence, Work
from tests.backends import levels_of
from tests.tiny_heads import random_head, save_head, tiny_config
from tests.tiny_models import VOCAB, random_model, save_model

TREES = ("", ":tree=chain", ":tree=static", ":nodes=24,width=6", ":k=2,width=3", ":dtype=int4", ":nodes=1")
MERGED = (
    "suffix+eagle",
    "ngram+dflash+grammar",
    "eagle+medusa",
    "auto(suffix+eagle)",
    "auto(eagle+dflash+medusa)",
    "suffix+mtp",
)
GRAMMARS: list[dict[str, Any]] = [
    {"regex": "[a-z ]{3,30}"},
    {"choice": ["yes", "no", "maybe so", "yes indeed"]},
    {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "boolean"}}, "required": ["a", "b"]},
]
FEW = dict.fromkeys(range(6), 9.0)  # so that a head that knows nothing is sometimes right
Called = tuple[str, Sequence, int, Draft]  # the spec, and what one query of its proposer was about


class Fresh:
    """An engine that drafts for a sequence as if nothing had come before."""

    def __init__(self, llm: LLM) -> None:
        self._llm, self._proposers = llm, dict[str, Any]()

    def draft(self, spec: str, sequence: Sequence, budget: int) -> Draft:
        engine = self._llm.engine
        if spec not in self._proposers:
            self._proposers[spec] = engine.speculation.assignments.make_proposer(parse_spec(spec).choices[0])
        proposer = self._proposers[spec]
        fresh = replace(sequence, num_computed_tokens=0, block_table=[])
        assert engine.scheduler.pool.reserve(fresh, fresh.num_tokens + 64)
        engine.runner.forward(pack([Work(fresh, fresh.num_tokens - 1)], engine.kv.block_size))
        fresh.num_computed_tokens = fresh.num_tokens - 1
        (draft,) = proposer.propose([fresh], [budget], 0.0)
        proposer.release([fresh.id])
        engine.scheduler.pool.free(fresh)
        return draft  # type: ignore[no-any-return]


def random_params(rng: random.Random, can_sample: bool) -> SamplingParams:
    fields: dict[str, Any] = {
        "max_tokens": rng.choice([1, 3, 8, 20]),
        "temperature": rng.choice([0, 0.7, 1.0, 3.0]),
        "seed": rng.randrange(2**63),
        "ignore_eos": rng.random() < 0.7,
        "top_p": rng.choice([None, None, 0.5, 0.95]),
        "top_k": rng.choice([None, None, 1, 5, 40]),
        "min_p": rng.choice([None, None, None, 0.05]),
        "repetition_penalty": rng.choice([None, None, None, 1.3]),
        "presence_penalty": rng.choice([0.0, 0.0, 0.7]),
        "logit_bias": rng.choice([FEW, FEW, None]),
        "logprobs": rng.choice([None, None, 0, 3]),
        "n": rng.choice([1, 1, 1, 2]),
        "stop_token_ids": rng.choice([None, None, [4, 77]]),
    }
    if can_sample and rng.random() < 0.5:
        return SamplingParams(**fields, acceptance=rng.choice(["rejection", "block"]))
    return SamplingParams(**fields, grammar=rng.choice([None, None, None, *GRAMMARS]))


def random_prompt(rng: random.Random) -> list[int]:
    shared = [(7 * place) % VOCAB for place in range(rng.randrange(1, 36))]
    return [*shared, *(rng.randrange(VOCAB) for _ in range(rng.randrange(12)))]


def comparable(output: CompletionOutput) -> tuple[Any, ...]:
    return output.token_ids, output.text, output.finish_reason, output.stop_reason, output.logprobs, output.error


class Fuzz:
    """One model, its heads, and counts of what was compared."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.rng, self.seen = random.Random(seed), Counter[str]()
        self.model = str(save_model(random_model("llama"), folder / "model"))
        self.correction = self.rng.choice(CORRECTIONS)
        for kind in ("eagle", "medusa", "dflash", "mtp"):
            correction = self.correction if kind == "dflash" else "none"
            save_head(random_head(tiny_config(kind, Path(self.model), correction)), folder / "heads" / kind)
        self.heads = str(folder / "heads")
        self.plain = self.llm(kv_cache_tokens=4096, prefix_caching=False)
        self.fresh = Fresh(self.llm(kv_cache_tokens=4096, prefix_caching=False))

    def llm(self, **options: Any) -> LLM:
        return LLM(self.model, head=self.heads, spec="off", threads=1, **options)

    def busy_engine(self) -> tuple[Any, list[Called]]:
        """An engine that is short of everything, and a list that grows with every query of its proposers."""
        rng, calls = self.rng, list[Called]()
        llm = self.llm(
            kv_cache_tokens=rng.choice([96, 128, 256]),
            max_num_seqs=rng.choice([2, 5, 9]),
            max_num_batched_tokens=rng.choice([16, 33, 60, 200]),
            block_size=rng.choice([4, 16]),
            prefix_caching=rng.random() < 0.8,
        )
        assignments = llm.engine.speculation.assignments
        make = assignments.make_proposer

        def recording(choice: Any) -> Any:
            proposer: Any = make(choice)
            propose = proposer.propose

            def recorded(sequences: list[Sequence], budgets: list[int], min_score: float) -> list[Draft]:
                drafts = propose(sequences, budgets, min_score)
                for sequence, budget, draft in zip(sequences, budgets, drafts, strict=True):
                    if draft.q is not None:
                        copy = replace(sequence, token_ids=list(sequence.token_ids))
                        calls.append((str(choice), copy, budget, draft))
                return drafts

            proposer.propose = recorded
            return proposer

        assignments.make_proposer = recording
        return llm.engine, calls

    def round(self) -> list[str]:
        """A few requests at once; returns what differed."""
        rng, wrong = self.rng, list[str]()
        engine, calls = self.busy_engine()
        requests: dict[str, tuple[list[int], SamplingParams, str]] = {}
        found: dict[tuple[str, int], CompletionOutput] = {}

        def step() -> None:
            for event in engine.step() if engine.has_work else ():
                if event.output is not None:
                    found[event.request_id, event.index] = event.output

        for number in range(rng.randrange(8, 25)):
            spec = rng.choice(["eagle", "medusa", "dflash", "mtp"]) + rng.choice(TREES)
            if is_merged := rng.random() < 0.3:
                spec = rng.choice(MERGED)
            request = random_prompt(rng), random_params(rng, can_sample=not is_merged), spec
            try:
                engine.add(str(number), request[0], request[1], parse_spec(spec), is_followed=rng.random() < 0.5)
            except ForedraftError as error:
                assert "KV cache" in str(error), error
                continue
            requests[str(number)] = request
            for _ in range(rng.randrange(4)):
                step()
            if rng.random() < 0.08:
                aborted = rng.choice(list(requests))
                engine.abort(aborted)
                del requests[aborted]
                self.seen["aborted"] += 1
        while engine.has_work:
            step()
        engine.scheduler.check_integrity()
        for name, (prompt, params, spec) in requests.items():
            outputs = [found[name, index] for index in range(params.n)]
            self.seen["requests"] += 1
            self.seen["preempted"] += sum(bool(output.metrics.preemptions) for output in outputs)
            self.seen["accepted tokens"] += sum(output.metrics.accepted_tokens for output in outputs)
            if params.acceptance == "match":
                wanted = self.plain.generate([prompt], params)[0].outputs
                if list(map(comparable, outputs)) != list(map(comparable, wanted)):
                    wrong.append(f"the answer of {spec} {params} differs")
        for spec, sequence, budget, draft in calls:
            self.seen["sampled drafts"] += 1
            again = self.fresh.draft(spec, sequence, budget)
            if draft.tokens != again.tokens or not torch.equal(draft.q, again.q):
                wrong.append(f"a draft of {spec} for {sequence.params} differs")
        return wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--kernels", help="torch, or a level of the native kernels; the best one when not given")
    options = parser.parse_args()
    if options.kernels:
        vars(library)["usable_levels"] = lambda: levels_of(options.kernels)
    logging.disable(logging.WARNING)
    seen, differ = Counter[str](), 0
    while seen["requests"] < options.requests:
        seen["models"] += 1
        with tempfile.TemporaryDirectory() as folder:
            fuzz = Fuzz(Path(folder), options.seed * 1000 + seen["models"])
            for _ in range(4):
                for difference in fuzz.round():
                    differ += 1
                    print(f"seed {options.seed}, model {seen['models']}: {difference}", flush=True)
            seen += fuzz.seen
    shown = ", ".join(f"{count} {what}" for what, count in sorted(seen.items()))
    print(f"kernels {options.kernels or 'best'}: {shown}; {differ} differ")
    return 1 if differ else 0


if __name__ == "__main__":
    sys.exit(main())
