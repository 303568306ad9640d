"""Mixed traffic: 70 % code editing and 30 % chat, eight requests in flight. `auto` beside `off` and fixed "on for all".

    python benchmarks/mixed.py [--model smollm2-135m] [--dtype bfloat16] [--rounds 5] [--max-tokens 96] [--threads 2]

A round decodes all requests once with every setting; the settings take turns in being the first. Nothing is remembered
from an earlier round, neither texts nor acceptance. Within a round stores work as in service: the six
pieces of code that come with the benchmark are each asked for with several tasks, so an earlier answer may help a later
one. Printed are medians over the rounds, and the least and the most of the ratios.
"""

from __future__ import annotations

import argparse
import random
import statistics

from foredraft import LLM, SamplingParams
from foredraft.bench.code_samples import EDITS
from foredraft.bench.measure import OFF, Learnt, Plan, in_turn, timed, warm_up
from foredraft.bench.suite import CHAT, QUESTIONS
from foredraft.reports.prompts import Question
from foredraft.types import RequestOutput

IN_FLIGHT = 8
CODE_SHARE = 0.7
FIXED = ("suffix:k=4", "ngram:k=3")
AUTO = "auto"
FURTHER_TASKS = ("Add one comment line at the top.", "Append an empty line and the word END as a comment.")


def traffic(count: int) -> list[Question]:
    """So many requests, all distinct, in an order that is the same every time."""
    edits = [
        *((task, kind, code) for task, kind, code in EDITS),
        *((task, kind, code) for task in FURTHER_TASKS for _, kind, code in EDITS),
    ]
    code = [Question("code", f"```{kind}\n{text}```\n\n{task} Print the whole code.") for task, kind, text in edits]
    chat = [Question("chat", text) for text in (*CHAT, *QUESTIONS)]
    num_code = round(CODE_SHARE * count)
    if num_code > len(code) or count - num_code > len(chat):
        raise SystemExit(f"There are {len(code)} requests for code and {len(chat)} for chat; ask for fewer.")
    requests = [*code[:num_code], *chat[: count - num_code]]
    random.Random(1).shuffle(requests)
    return requests


def spread(ratios: list[float]) -> str:
    return f"{statistics.median(ratios):5.3f}x ({min(ratios):.3f} – {max(ratios):.3f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--requests", type=int, default=24)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
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


if __name__ == "__main__":
    main()
