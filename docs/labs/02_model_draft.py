"""Lab 2: a model drafts for a model.

Copying (lab 1) drafts well only where a text repeats itself. A second, cheaper model can draft anywhere. It runs once
for every draft token, so it must be much cheaper than the target, and it must agree with the target often.

The drafter here is the target itself with its weights rounded to 4 bits (`quantised`): nothing to train, nothing to
download, and it agrees often because it is nearly the same model. It is cheaper because it reads fewer bytes, so the
target is held in float32 here (--dtype). It is not very cheap, because it has as many layers as the target. A trained
head goes here when you have one: --spec.

The weights of the default model's file have 4 bits to begin with, so its quantised copy has the very same weights, and
nearly every draft token is accepted. That is the most that a drafter of this cost can do. A drafter that errs is
--spec early_exit:k=2,layers=24; and --dtype auto makes the target as cheap as its quantised copy.
"""

from __future__ import annotations

from itertools import pairwise

from lab import arguments, check, heading, say, table

from foredraft import LLM, SamplingParams
from foredraft.control.economics import best_length, expected_tokens_by_depth
from foredraft.types import RequestOutput

PROMPTS = {
    "story": "The old lighthouse keeper climbed the stairs one last time, and",
    "facts": "Water boils at 100 degrees Celsius at sea level. On a mountain it boils",
    "code": "def is_prime(n):\n    if n < 2:\n        return False\n    for",
}
K_MAX = 8


def conditional(survivals: list[float]) -> list[float]:
    """The acceptance at each depth among the runs that got there, from how often it was reached and accepted."""
    return [min(1.0, now / before) if before else 0.0 for before, now in pairwise([1.0, *survivals])]


def compare(llm: LLM, spec: str, count: int, temperature: float) -> list[tuple[str, RequestOutput, RequestOutput]]:
    """Every prompt, plain and drafted, one at a time: latency is that of a single user."""
    params = SamplingParams(max_tokens=count, temperature=temperature, seed=3, ignore_eos=True)
    results = []
    for name, prompt in PROMPTS.items():
        plain, drafted = (llm.generate(prompt, params, spec=each)[0] for each in ("off", spec))
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
        cost = metrics.draft_time_s / metrics.drafted_tokens / plain.metrics.inter_token_latency_s
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
        bits already, 4 bits save nothing: c is near 1, and the drafter loses time even if it is always right.""")


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--model", default="smollm2-135m", help="a catalogue name, a file or a folder")
    parser.add_argument("--spec", default="quantised:k=4", help="who drafts, for instance early_exit:k=3 or a head")
    parser.add_argument("--dtype", default="float32", help="what the target's weights are held in")
    options = parser.parse_args()
    count = 24 if options.small else 96
    llm = LLM(options.model, spec="off", dtype=options.dtype)
    print(__doc__)
    llm.generate("Hello", SamplingParams(max_tokens=8, ignore_eos=True), spec=options.spec)  # makes the drafter

    heading(f"1. Greedy: {options.spec} against plain decoding")
    say("""Latency is the mean time between two tokens. A run gives one token and all accepted draft tokens. The last
        column is the share of drafts that were accepted down to each depth.""")
    greedy = compare(llm, options.spec, count, temperature=0.0)
    show(greedy)
    same_text(greedy, "greedy")

    heading("2. Sampled: the same text for the same seed")
    say("""With temperature, the target's token at a place is drawn with noise that depends on the seed and the place
        alone. The drafter uses the same noise, so the two agree more often than two dice would (lab 3). A draft
        token stays if it is the token that the target draws itself: the text cannot depend on the drafter.""")
    sampled = compare(llm, options.spec, count, temperature=0.8)
    show(sampled)
    same_text(sampled, "sampled")

    economics(greedy)


if __name__ == "__main__":
    main()
