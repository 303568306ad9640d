"""Lab 2: a model drafts for a model.

Copying (lab 1) drafts well only where a text repeats itself. A second, cheaper model can draft anywhere. It must be
much cheaper than the target, and it must agree with the target often.

The drafter here is an EAGLE head: one layer that was trained on the target's own hidden states, and that runs once for
every draft token. It comes with Foredraft for the default model, and so do three other trained drafters, which part 4
sets side by side. For a model without heads the drafter is the model itself with its weights rounded to 4 bits
(`quantised`): nothing to train, but it has as many layers as the target, so it is not very cheap. --spec takes another.

A drafter is cheap in comparison with its target, so the target is held in bfloat16 here. With --dtype auto, which is 4
bits for the default model's file, the same drafts cost a larger share of a plain step.
"""

from __future__ import annotations

from itertools import pairwise
from statistics import mean

from lab import arguments, check, heading, say, table

from foredraft import LLM, SamplingParams
from foredraft.control.economics import best_length, expected_tokens_by_depth
from foredraft.errors import InvalidPrompt
from foredraft.heads.catalog import shipped_heads
from foredraft.models.catalog import open_checkpoint, resolve
from foredraft.outputs import RequestOutput

PROMPTS = {
    "story": "Write a story about an old lighthouse keeper.",
    "facts": "Explain why water boils earlier on a mountain than at sea level.",
    "code": "Write a Python function that says whether a number is prime, and explain it step by step.",
}
K_MAX = 8
HEADS = {
    "eagle": "eagle:tree=chain,k=4",
    "draft_model": "draft_model:k=4",
    "dflash": "dflash:tree=chain,k=4",
    "medusa": "medusa:tree=chain,k=4",
}
WITHOUT_HEADS = "quantised:k=4"


def encoded(llm: LLM, question: str) -> list[int]:
    """Heads are trained on answers, so a model that can be asked is asked; others continue the text."""
    try:
        return llm.tokenizer.encode_chat([{"role": "user", "content": question}])
    except InvalidPrompt:  # it has no chat template
        return llm.tokenizer.encode(question)


def conditional(survivals: list[float]) -> list[float]:
    """The acceptance at each depth among the runs that got there, from how often it was reached and accepted."""
    return [min(1.0, now / before) if before else 0.0 for before, now in pairwise([1.0, *survivals])]


def compare(llm: LLM, spec: str, count: int, temperature: float) -> list[tuple[str, RequestOutput, RequestOutput]]:
    """Every prompt, plain and drafted, one at a time: latency is that of a single user."""
    params = SamplingParams(max_tokens=count, temperature=temperature, seed=3, ignore_eos=True)
    results = []
    for name, prompt in PROMPTS.items():
        plain, drafted = (llm.generate([encoded(llm, prompt)], params, spec=each)[0] for each in ("off", spec))
        results.append((name, plain, drafted))
    return results


def milliseconds(seconds: float) -> str:
    return f"{1000 * seconds:.1f} ms"


def show(results: list[tuple[str, RequestOutput, RequestOutput]]) -> None:
    rows = []
    for name, plain, drafted in results:
        metrics = drafted.metrics
        rows.append((
            name,
            milliseconds(plain.metrics.inter_token_latency_s),
            milliseconds(metrics.inter_token_latency_s),
            f"{metrics.tokens_per_run:.2f}",
            "  ".join(f"{share:4.0%}" for share in metrics.acceptance_per_depth),
        ))  # fmt: skip
    table(("text", "latency, plain", "drafted", "tokens per run", "reached and accepted at depth 1, 2, ..."), rows)


def same_text(results: list[tuple[str, RequestOutput, RequestOutput]], how: str) -> None:
    for name, plain, drafted in results:
        check(drafted.token_ids == plain.token_ids, f"{name}, {how}: the drafted text is the plain text")
        check(drafted.metrics.drafted_tokens > 0, f"{name}, {how}: something was drafted")
        check(
            drafted.metrics.target_runs + drafted.metrics.accepted_tokens == len(drafted.token_ids),
            f"{name}, {how}: every token is an accepted draft token or the one token that a run adds",
        )


def economics(results: list[tuple[str, RequestOutput, RequestOutput]]) -> None:
    heading("3. What it is worth")
    say("""Two figures decide: how often a draft token is accepted, and c, the cost of one draft token in units of a
        plain step. From the acceptance at each depth follow the tokens per run, E = 1 + a1 + a1·a2 + ...; lab 4 has the
        rest. The last column is the draft length that these figures ask for, if verifying cost no more than a plain
        step; 0 means off. All of it rests on this machine's clock, so nothing here is checked.""")
    rows = []
    for name, plain, drafted in results:
        metrics = drafted.metrics
        acceptances = conditional(metrics.acceptance_per_depth)
        cost = draft_cost(plain, drafted)
        constant = (acceptances[:1] or [0.0]) * K_MAX
        rows.append((
            name,
            f"{expected_tokens_by_depth(acceptances):.2f}",
            f"{metrics.tokens_per_run:.2f}",
            f"{cost:.2f}",
            f"{plain.metrics.inter_token_latency_s / metrics.inter_token_latency_s:.2f}x",
            best_length(constant, cost).k,
        ))  # fmt: skip
    table(("text", "E by the formula", "tokens per run", "c", "speed-up, measured", "k to use"), rows)
    say("""Acceptance alone says nothing. On a very small model, or with --dtype auto on one whose weights have few
        bits already, c is large, and the drafter loses time even if it is often right. And where every row of a verify
        run costs time, as on most CPUs, the speed-up is less than these two figures promise.""")


def draft_cost(plain: RequestOutput, drafted: RequestOutput) -> float:
    """What a draft token takes, in plain steps."""
    return drafted.metrics.draft_time_s / drafted.metrics.drafted_tokens / plain.metrics.inter_token_latency_s


def side_by_side(llm: LLM, specs: list[str], count: int) -> None:
    heading("4. Drafters side by side")
    say("""An EAGLE head and a distilled draft model run once for every draft token, and each run knows the token
        before it. DFlash drafts a whole block in one run and corrects it token by token. Medusa foresees all tokens
        from one hidden state, none of them knowing the one before it: the cheapest draft, and the one that is wrong
        the soonest. Means over the texts; c is the cost of a draft token in plain steps.""")
    found = {}
    for spec in specs:
        llm.generate("Hello", SamplingParams(max_tokens=8, ignore_eos=True), spec=spec)  # makes the drafter
        found[spec] = compare(llm, spec, count, temperature=0.0)
    rows = []
    for spec, results in found.items():
        depths = zip(*(drafted.metrics.acceptance_per_depth for _, _, drafted in results))
        plain_s, drafted_s = (mean(each[place].metrics.inter_token_latency_s for each in results) for place in (1, 2))
        rows.append((
            spec,
            f"{mean(drafted.metrics.tokens_per_run for _, _, drafted in results):.2f}",
            "  ".join(f"{mean(shares):4.0%}" for shares in depths),
            f"{mean(draft_cost(plain, drafted) for _, plain, drafted in results):.2f}",
            f"{plain_s / drafted_s:.2f}x",
        ))  # fmt: skip
    table(("drafter", "tokens per run", "reached and accepted at depth 1, 2, ...", "c", "speed-up, measured"), rows)
    for spec, results in found.items():
        same_text(results, spec)


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--model", default="smollm2-135m", help="a catalogue name, a file or a folder")
    parser.add_argument("--spec", help="who drafts, for instance early_exit:k=3; a trained head when not given")
    parser.add_argument("--dtype", default="bfloat16", help="what the target's weights are held in")
    options = parser.parse_args()
    count = 24 if options.small else 64
    trained = shipped_heads(open_checkpoint(resolve(options.model)))
    specs = [spec for kind, spec in HEADS.items() if kind in trained] or [WITHOUT_HEADS]
    spec = options.spec or specs[0]
    llm = LLM(options.model, spec="off", dtype=options.dtype)
    print(__doc__)
    llm.generate("Hello", SamplingParams(max_tokens=8, ignore_eos=True), spec=spec)  # makes the drafter

    heading(f"1. Greedy: {spec} against plain decoding")
    say("""Latency is the mean time between two tokens. A run gives one token and all accepted draft tokens. The last
        column is the share of drafts that were accepted down to each depth.""")
    greedy = compare(llm, spec, count, temperature=0.0)
    show(greedy)
    same_text(greedy, "greedy")

    heading("2. Sampled: the same text for the same seed")
    say("""With temperature, the target's token at a place is drawn with noise that depends on the seed and the place
        alone. The drafter uses the same noise, so the two agree more often than two dice would (lab 3). A draft
        token stays if it is the token that the target draws itself: the text cannot depend on the drafter.""")
    sampled = compare(llm, spec, count, temperature=0.8)
    show(sampled)
    same_text(sampled, "sampled")

    economics(greedy)
    side_by_side(llm, specs, count)


if __name__ == "__main__":
    main()
