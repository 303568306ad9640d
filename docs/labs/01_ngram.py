"""Lab 1: draft by copying, verify in one run.

A language model emits one token per run. Most of a run's time goes into reading the weights, which is the same work for
one token as for seven. So draft the next few tokens by any means, let one run verify all of them, and keep those that
the model would have emitted itself. The text stays the same; only the number of runs changes.

The cheapest draft needs no model: find the last few tokens earlier in the text, and copy what followed them there.
"""

from __future__ import annotations

from collections.abc import Callable

from lab import arguments, check, heading, say, table

from foredraft import LLM, SamplingParams

NextTokens = Callable[[list[list[int]]], list[int]]  # the model: contexts in, the next token of each out

RECORDS = """{"name": "Anna", "age": 31, "city": "Oslo", "member": true}
{"name": "Bert", "age": 45, "city": "Rome", "member": true}
{"name": "Cleo", "age": 27, "city": "Bern", "member": true}
{"name": "Dora", "age": 38, "city": "Lyon", "member": true}
"""
STORY = "The old lighthouse keeper climbed the stairs one last time, and"
K = 6


def propose(tokens: list[int], k: int, shortest: int = 2, longest: int = 4) -> list[int]:
    """Up to k tokens that followed the latest earlier occurrence of the text's last few tokens."""
    for n in range(longest, shortest - 1, -1):
        for place in range(len(tokens) - n - 1, -1, -1):
            if tokens[place : place + n] == tokens[-n:]:
                start, period = place + n, len(tokens) - place - n
                return [tokens[start + offset % period] for offset in range(k)]  # at the end of the text: go round
    return []


def verify(tokens: list[int], draft: list[int], model: NextTokens) -> list[int]:
    """One run of the model: its token after the text, after the first draft token, after the second, and so on."""
    target_argmax = model([tokens + draft[:length] for length in range(len(draft) + 1)])
    kept = 0
    while kept < len(draft) and draft[kept] == target_argmax[kept]:
        kept += 1
    return [*draft[:kept], target_argmax[kept]]  # where the draft was wrong, the run already has the right token


def write(prompt: list[int], count: int, k: int, model: NextTokens, tell: bool = False) -> tuple[list[int], int]:
    """`count` tokens after a prompt, and how many runs they took."""
    tokens, end, runs = list(prompt), len(prompt) + count, 0
    while len(tokens) < end:
        draft = propose(tokens, min(k, end - len(tokens) - 1))
        new = verify(tokens, draft, model)
        if tell:
            shown = "".join(map(chr, draft))
            print(f"  drafted {shown!r:10} kept {len(new) - 1} of {len(draft)}, emitted {''.join(map(chr, new))!r}")
        tokens += new
        runs += 1
    return tokens[len(prompt) :], runs


def recite(contexts: list[list[int]]) -> list[int]:
    """A toy model that knows one text by heart and goes on from wherever it is."""
    text = "she sells sea shells, she sees sea shells; "
    return [ord(text[len(context) % len(text)]) for context in contexts]


def greedy_model(llm: LLM) -> NextTokens:
    """The real model as a function: every context is a row of one batch."""
    params = SamplingParams(max_tokens=1, temperature=0, ignore_eos=True)
    return lambda contexts: [output.token_ids[0] for output in llm.generate(contexts, params, spec="off")]


def by_hand(llm: LLM, count: int) -> None:
    heading("1. By hand: a toy model that recites")
    say("""propose() looks for the last two to four letters earlier in the text. verify() runs the model on all draft
        tokens at once. Drafts fail while the text is new, and are accepted when it repeats.""")
    print()
    plain, plain_runs = write(list(map(ord, "she")), 64, 0, recite)
    text, runs = write(list(map(ord, "she")), 64, K, recite, tell=True)
    check(text == plain, "the recited text is the same with drafts and without")
    check(runs < plain_runs, f"the recital took {runs} runs instead of {plain_runs}")

    heading("2. By hand: a language model")
    say("The same two functions, with a language model's greedy next token in place of the toy.")
    prompt = llm.encode(RECORDS)
    text, runs = write(prompt, count, K, greedy_model(llm))
    params = SamplingParams(max_tokens=count, temperature=0, ignore_eos=True)
    off, on = (llm.generate(prompt, params, spec=spec)[0] for spec in ("off", f"ngram:k={K}"))
    rows = [
        ("plain", off.metrics.target_runs, f"{off.metrics.tokens_per_run:.2f}"),
        ("by hand", runs, f"{count / runs:.2f}"),
        (f"the engine, ngram:k={K}", on.metrics.target_runs, f"{on.metrics.tokens_per_run:.2f}"),
    ]
    table(("", "runs", "tokens per run"), rows)
    check(text == off.token_ids, "the text written by hand is that of plain decoding")
    check(on.token_ids == off.token_ids, "the engine's text with drafts is that of plain decoding")
    check(on.metrics.target_runs == runs, "the engine needs exactly as many runs as the lines above")


def texts(llm: LLM, count: int) -> None:
    heading("3. Repetitive text against random text")
    say("""Copying works where a text repeats itself. Records repeat their keys; a story told greedily repeats its
        phrases; a story told at temperature 1 (each token is drawn by chance, here with a fixed seed) repeats
        little.""")
    cases = {"records": (RECORDS, 0.0), "story, greedy": (STORY, 0.0), "story, temperature 1": (STORY, 1.0)}
    rows, measured = [], {}
    for name, (prompt, temperature) in cases.items():
        params = SamplingParams(max_tokens=count, temperature=temperature, seed=1, ignore_eos=True)
        off, on = (llm.generate(prompt, params, spec=spec)[0] for spec in ("off", f"ngram:k={K}"))
        check(on.token_ids == off.token_ids, f"{name}: the same text with drafts and without")
        measured[name] = on.metrics
        rows.append((name, on.metrics.drafted_tokens, on.metrics.accepted_tokens, f"{on.metrics.tokens_per_run:.2f}"))
    table(("text", "drafted", "accepted", "tokens per run"), rows)
    repetitive, random = measured["records"], measured["story, temperature 1"]
    check(repetitive.tokens_per_run > 1.2, "records take clearly fewer runs than tokens")
    check(
        repetitive.acceptance_rate > random.acceptance_rate and repetitive.tokens_per_run > random.tokens_per_run,
        "more is accepted, and a run brings more, on repetitive text than on random text",
    )


def lengths(llm: LLM, count: int) -> None:
    heading("4. How long a draft should be")
    say("""A draft token counts only if all draft tokens before it were accepted, so each further one is worth less
        than the one before. Tokens per run level off, while every draft token is one more row to compute.""")
    params = SamplingParams(max_tokens=count, temperature=0, ignore_eos=True)
    rows, per_run = [], {}
    for k in (1, 2, 4, 8, 16, 32):
        metrics = llm.generate(RECORDS, params, spec=f"ngram:k={k}")[0].metrics
        per_run[k] = metrics.tokens_per_run
        computed = metrics.target_runs + metrics.drafted_tokens
        rows.append((k, f"{per_run[k]:.2f}", f"{metrics.acceptance_rate:.0%}", f"{computed / count:.2f}"))
    table(("k", "tokens per run", "accepted", "rows per token"), rows)
    first, last = per_run[2] - per_run[1], (per_run[32] - per_run[16]) / 16
    check(per_run[8] > per_run[1], "eight draft tokens bring more tokens per run than one")
    check(last < first, f"a plateau: one more draft token brings {first:.2f} at k = 1, and {last:.3f} beyond k = 16")


def hurts(llm: LLM, count: int) -> None:
    heading("5. Where it hurts")
    say("""Take the random story, and let a single repeated token count as a match (min_n=1). Every comma now looks
        familiar, so there is often something to copy, and it is nearly always wrong.""")
    params = SamplingParams(max_tokens=count, temperature=1.0, seed=1, ignore_eos=True)
    off, on = (llm.generate(STORY, params, spec=spec)[0] for spec in ("off", f"ngram:k={K},min_n=1"))
    metrics = on.metrics
    computed = metrics.target_runs + metrics.drafted_tokens
    rows = [
        ("off", off.metrics.target_runs, 0, 0, count),
        ("ngram", metrics.target_runs, metrics.drafted_tokens, metrics.accepted_tokens, computed),
    ]
    table(("", "runs", "drafted", "accepted", "rows computed"), rows)
    check(on.token_ids == off.token_ids, "even bad drafts leave the text as it is")
    check(metrics.tokens_per_run < 1.2, f"a run brings hardly more than one token ({metrics.tokens_per_run:.2f})")
    check(computed > 1.5 * count, f"{computed} rows were computed for {count} tokens")
    say("""Whether those rows cost time depends on the machine and on how many requests share a run: lab 4. The right
        answer to this input is no draft, and only a measurement tells.""")


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--model", default="smollm2-135m", help="a catalogue name, a file or a folder")
    options = parser.parse_args()
    llm = LLM(options.model, spec="off")
    print(__doc__)
    by_hand(llm, 24 if options.small else 96)
    texts(llm, 64 if options.small else 160)
    lengths(llm, 128 if options.small else 256)
    hurts(llm, 64 if options.small else 160)


if __name__ == "__main__":
    main()
