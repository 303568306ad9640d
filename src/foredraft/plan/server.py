"""What the counters of a running server say to a person: what its speculation earns, and how long its drafts should
be."""

from __future__ import annotations

from dataclasses import asdict
from math import ceil
from typing import TYPE_CHECKING

from foredraft.control.economics import Length, VerifyCurve, best_length, break_even_alpha, flat, lengths
from foredraft.plan.words import SMALL_GAIN, length_table, percent, requests, tokens
from foredraft.reports.answer import Answer

if TYPE_CHECKING:
    from foredraft.integrations.vllm_metrics import ServerSpeculation

ASSUMED_COST = 0.05  # of a draft token in plain steps: one small layer and an output head, about


def advise_server(
    seen: ServerSpeculation, url: str, cost: float | None, curve: VerifyCurve | None, k_max: int
) -> Answer:
    """Deeper than the server drafts, acceptance is taken to stay what it is at the last depth that was reached."""
    batch = max(1, round(seen.running))
    verify = flat if curve is None else curve.at_batch(batch)
    drafted = ASSUMED_COST if cost is None else cost
    measured = seen.acceptances
    reached = [rate for rate in measured if rate > 0] or [0.0]
    acceptances = [*measured, *[reached[-1]] * k_max][:k_max]
    table, best = lengths(acceptances, drafted, verify), best_length(acceptances, drafted, verify)
    now = seen.tokens_per_draft / (seen.draft_length * drafted + verify(ceil(seen.draft_length) + 1))
    sentences = [*_earnings(seen, now), *_advice(seen, best, now, k_max)]
    record = {
        "best_k": best.k,
        "speedup": best.speedup,
        "expected_tokens": best.expected_tokens,
        "break_even_alpha": break_even_alpha(drafted, k_max, verify),
        "table": [asdict(each) for each in table],
        "server": {
            "k": seen.k,
            "draft_length": seen.draft_length,
            "tokens_per_draft": seen.tokens_per_draft,
            "acceptance_per_depth": measured,
            "speedup": now,
            "running": seen.running,
        },
        "cost": drafted,
        "recommendation": " ".join(sentences),
    }
    return Answer(record, _premise(seen, url, cost, drafted, curve, batch), [length_table(table, best)], sentences)


def _premise(
    seen: ServerSpeculation, url: str, cost: float | None, drafted: float, curve: VerifyCurve | None, batch: int
) -> str:
    rates = " ".join(f"{rate:.2f}" for rate in seen.acceptances)
    whence = "an assumption: give --cost" if cost is None else "as given"
    runs = (
        "one plain step at any size (give --verify-cost)"
        if curve is None
        else f"what was measured, for {requests(batch)}"
    )
    return (
        f"Counted by {url} over {seen.drafts:,.0f} drafts: acceptance by depth {rates}.\n"
        f"A draft token costs {drafted:.4g} plain steps ({whence}); a verify run costs {runs}."
    )


def _earnings(seen: ServerSpeculation, now: float) -> list[str]:
    sentences = [
        f"A run with a draft gives {seen.tokens_per_draft:.2f} tokens for {seen.draft_length:.1f} draft tokens of at "
        f"most {seen.k}: {now:.2f} times as fast as plain decoding."
    ]
    if seen.generated_tokens:
        share = min(1.0, seen.accepted_tokens / seen.generated_tokens)
        sentences.append(f"Of all generated tokens, {percent(share)} were draft tokens.")
    return sentences


def _advice(seen: ServerSpeculation, best: Length, now: float, k_max: int) -> list[str]:
    if best.k == 0:
        return ["Turn it off: at these costs no draft length is faster than plain decoding."]
    if best.k == seen.k:
        sentences = [f"Keep num_speculative_tokens={best.k}."]
    else:
        what = f"Set num_speculative_tokens={best.k}: {best.speedup:.2f} times as fast as plain decoding"
        small = best.speedup / now - 1 < SMALL_GAIN
        sentences = [f"{what}, only {percent(best.speedup / now - 1)} more than now." if small else f"{what}."]
    if best.k > seen.k:
        sentences.append(
            f"Draft tokens behind the first {tokens(seen.k)} were not counted; their acceptance is assumed."
        )
    if best.k == k_max:
        sentences.append("Longer drafts may gain more: try a larger --k-max.")
    return sentences
