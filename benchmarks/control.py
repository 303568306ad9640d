"""What speculation costs where it is hard: mixed traffic, and proposers that do their worst.

    python benchmarks/control.py mixed [--dtype bfloat16] [--rounds 5] [--max-tokens 96] [--requests 24] [--threads 2]
    python benchmarks/control.py adversaries [--dtype bfloat16] [--rounds 5] [--max-tokens 256] [--threads 2]

`mixed`: 70 % code editing and 30 % chat, eight requests in flight, `auto` beside `off` and fixed "on for all". A round
decodes all requests once with every setting, and the settings take turns in being the first. Nothing is remembered from
an earlier round, neither texts nor acceptance. Within a round stores work as in service: each piece of code comes with
several tasks, so an earlier answer may help a later one.

`adversaries`: each is the only proposer that `auto` may choose, and `auto` must stay within 2 % and 50 ms of `off`.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Callable
from collections.abc import Sequence as Items
from functools import partial

from foredraft import LLM, SamplingParams
from foredraft.bench.measure import OFF, Learnt, Plan, in_turn, timed, warm_up
from foredraft.bench.suite import built_in
from foredraft.outputs import CompletionOutput, RequestOutput
from foredraft.proposers.base import Proposer
from foredraft.proposers.registry import ProposerChoice, Spec
from foredraft.reports.prompts import Question
from foredraft.types import Draft, Sequence

IN_FLIGHT = 8
CODE_SHARE = 0.7
FIXED = ("suffix:k=4", "ngram:k=3")
AUTO = "auto"
FURTHER_TASKS = ("Add one comment line at the top.", "Append an empty line and the word END as a comment.")


def traffic(count: int) -> list[Question]:
    """So many requests, all distinct, in an order that is the same every time."""
    edits = [question.text for question in built_in() if question.category == "code-editing"]
    samples = [text.rpartition("\n\n")[0] for text in edits]
    edits += [f"{sample}\n\n{task} Print the whole code." for task in FURTHER_TASKS for sample in samples]
    code = [Question("code", text) for text in edits]
    chat = [Question("chat", each.text) for each in built_in() if each.category in ("chat", "question-answering")]
    num_code = round(CODE_SHARE * count)
    if num_code > len(code) or count - num_code > len(chat):
        raise SystemExit(f"There are {len(code)} requests for code and {len(chat)} for chat; ask for fewer.")
    requests = [*code[:num_code], *chat[: count - num_code]]
    random.Random(1).shuffle(requests)
    return requests


def spread(ratios: list[float]) -> str:
    return f"{statistics.median(ratios):5.3f}x ({min(ratios):.3f} – {max(ratios):.3f})"


def mixed(arguments: argparse.Namespace) -> None:
    options = {"dtype": arguments.dtype, "threads": arguments.threads}
    llm = LLM(arguments.model, max_num_seqs=IN_FLIGHT, prefix_caching=False, **options)
    prompts = [question.encoded(llm) for question in traffic(arguments.requests)]
    params = SamplingParams(max_tokens=arguments.max_tokens, temperature=0)
    settings = (OFF, *FIXED, AUTO)
    warm_up(llm, prompts, Plan((*FIXED, AUTO), (IN_FLIGHT,), max_tokens=arguments.max_tokens))
    learnt = Learnt(llm.engine)
    seconds: dict[str, list[float]] = {setting: [] for setting in settings}
    outputs: dict[str, list[RequestOutput]] = {}
    texts: list[list[int]] = []
    differing: set[str] = set()
    for turn in range(arguments.rounds):
        for setting in in_turn(settings, turn):
            learnt.back_to(llm.engine)
            took, outputs[setting] = timed(llm, prompts, params, setting)
            seconds[setting].append(took)
            written = [output.token_ids for output in outputs[setting]]
            texts = texts or written
            if written != texts:
                differing.add(setting)
    num_tokens = sum(map(len, texts))
    print(
        f"{arguments.model} {arguments.dtype}, {len(prompts)} requests, {IN_FLIGHT} in flight, {num_tokens} tokens, "
        f"{arguments.threads} threads, {arguments.rounds} interleaved rounds"
    )
    for setting in settings:
        rate = num_tokens / statistics.median(seconds[setting])
        ratios = [off / mine for off, mine in zip(seconds[OFF], seconds[setting], strict=True)]
        runs = sum(output.metrics.target_runs for output in outputs[setting])
        line = f"{setting:12} {rate:7.1f} tok/s   {spread(ratios)} of off   {num_tokens / runs:.2f} tokens per run"
        print(line + ("   OTHER TEXTS" if setting in differing else ""))
    for setting in (OFF, *FIXED):
        ratios = [theirs / mine for theirs, mine in zip(seconds[setting], seconds[AUTO], strict=True)]
        verdict = "holds" if statistics.median(ratios) >= 1 else "SLOWER"
        print(f"{AUTO} to {setting:12} {spread(ratios)}   {verdict}")
    print("same text everywhere" if not differing else f"texts differ: {', '.join(sorted(differing))}")
    if differing:
        raise SystemExit(1)


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


def beside_adversaries(arguments: argparse.Namespace) -> None:
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("question", choices=("mixed", "adversaries"))
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--requests", type=int, default=24)
    parser.add_argument("--max-tokens", type=int, help="96 of mixed traffic, 256 beside adversaries")
    arguments = parser.parse_args()
    arguments.max_tokens = arguments.max_tokens or {"mixed": 96, "adversaries": 256}[arguments.question]
    (mixed if arguments.question == "mixed" else beside_adversaries)(arguments)


if __name__ == "__main__":
    main()
