"""What drafts of `ngram` and `suffix` would have been worth, replayed over answers that are written once, plainly.

A greedy answer does not depend on drafts, so any setting can be judged by it afterwards, in seconds and without the
model. Prompts come one after the other, and `suffix` remembers the answers before, as in a server.

    python benchmarks/replay.py --suite questions.jsonl [--limit 120] [--without 20] [--max-tokens 96] [SPEC ...]

`--without 20` leaves out the 20 questions that `make check-vllm` decodes, so that settings are not chosen by them.

`ngram:k=5,which=earliest` drafts as vLLM's n-gram lookup does with prompt_lookup_min=2 and prompt_lookup_max=4.
"""

from __future__ import annotations

import argparse

from foredraft import LLM, SamplingParams
from foredraft.bench.suite import load_suite
from foredraft.proposers.base import Proposer
from foredraft.proposers.registry import parse_spec, proposer_class, read_options
from foredraft.types import Commit, RequestOutput, Sequence

SPECS = (
    "ngram:k=5,which=earliest",
    "ngram:k=5,which=earliest,min_n=5,max_n=5",
    *(f"suffix:k=5,tree=chain,min_score={score}" for score in (0.1, 0.25, 0.39, 0.5)),
    *(f"suffix:k=5,tree=chain,min_n=1,min_score={score},store_doubt=2" for score in (0.25, 0.3, 0.39, 0.5)),
)


def token_proposer(spec: str) -> Proposer:
    """Of a spec with one proposer that looks at tokens only."""
    (choice,) = parse_spec(spec).choices
    made: Proposer = proposer_class(choice.name)(read_options(choice))
    return made


def replay(proposer: Proposer, answers: list[RequestOutput], max_tokens: int) -> dict[str, float]:
    """As the engine would count them: no draft is longer than what the answer may still need."""
    drafts = drafted = accepted = runs = tokens = 0
    for index, answer in enumerate(answers):
        prompt, text = list(answer.prompt_token_ids), list(answer.token_ids)
        sequence = Sequence(index, "", 0, prompt.copy(), len(prompt), SamplingParams(), seed=0, max_tokens=max_tokens)
        while (place := sequence.num_output_tokens) < len(text):
            (draft,) = proposer.propose([sequence], [min(proposer.num_lookahead_tokens, max_tokens - place - 1)], 0.0)
            node, right = -1, 0
            while place + right < len(text) and (node := draft.child(node, text[place + right])) >= 0:
                right += 1
            added = text[place : place + right + 1]
            sequence.token_ids.extend(added)
            drafts, drafted, accepted = drafts + bool(draft), drafted + len(draft), accepted + right
            runs, tokens = runs + 1, tokens + len(added)
        proposer.observe([Commit(sequence, (), (), (), "stop")])
        proposer.release([index])
    return {
        "mean acceptance length": 1 + accepted / drafts if drafts else 1.0,
        "acceptance rate": accepted / drafted if drafted else 0.0,
        "tokens per run": tokens / runs,
        "runs with a draft": drafts / runs,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("specs", nargs="*", default=SPECS, metavar="SPEC")
    parser.add_argument("--suite", default="builtin")
    parser.add_argument("--limit", type=int, default=120)
    parser.add_argument("--without", type=int, default=0, help="leave out the questions that this limit would give")
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--dtype", default="int4")
    arguments = parser.parse_args()
    llm = LLM(arguments.model, dtype=arguments.dtype, head=None, spec="off", max_num_seqs=16)
    left_out = load_suite(arguments.suite, arguments.without) if arguments.without else []
    questions = load_suite(arguments.suite, arguments.limit + len(left_out))
    questions = [question for question in questions if question not in left_out][: arguments.limit]
    prompts = [question.encoded(llm) for question in questions]
    answers = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=arguments.max_tokens))
    print(f"{len(answers)} answers, {sum(len(answer.token_ids) for answer in answers)} tokens")
    for spec in arguments.specs:
        found = replay(token_proposer(spec), answers, arguments.max_tokens)
        print(f"{spec:62} " + ", ".join(f"{name} {value:.3f}" for name, value in found.items()), flush=True)


if __name__ == "__main__":
    main()
