"""What follows from a proposer's acceptance and costs: the best draft length, break-evens, and where to turn it off."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from foredraft.control.economics import Outlook
from foredraft.plan.results import Comparison
from foredraft.plan.words import SMALL_GAIN, length_table, percent, requests, tokens
from foredraft.reports.answer import Answer, Table


def advise(figures: Outlook, source: str, compared: Comparison | None) -> Answer:
    """What follows from figures of this source; after what was compared in a benchmark, where they come from one."""
    edge = figures.flip_batch or 0
    shown = [each for each in figures.batches if each.batch & (each.batch - 1) == 0 or each.batch in (edge - 1, edge)]
    verify = "one plain step at any size" if figures.curve is None else "what was measured"
    premise = (
        f"Acceptance {figures.alpha:.4g}; a draft token costs {figures.cost:.4g} plain steps, a verify run {verify}."
    )
    tables, sentences = [length_table(figures.table, figures.best)], _length_advice(figures)
    if shown:  # where runs were measured
        batch_rows = [(str(each.batch), str(each.best_k), f"{each.speedup:.2f}x") for each in shown]
        tables.append(Table(("batch", "best k", "speed-up"), batch_rows))
    if compared is None or not compared.several_batches:
        sentences += _batch_advice(figures)
    extras: dict[str, Any] = {}
    if compared is not None:
        tables = [compared.table, *tables]
        sentences = [*compared.sentences, compared.measured, *sentences]
        if compared.is_off_best and figures.best.k:
            sentences.append(
                "None of the settings that were measured gained that: bench that length before you rely on it."
            )
        extras = compared.record
    record = {
        "best_k": figures.best.k,
        "speedup": figures.best.speedup,
        "expected_tokens": figures.best.expected_tokens,
        "break_even_alpha": figures.break_even_alpha,
        "break_even_cost": figures.break_even_cost,
        "flip_batch": figures.flip_batch,
        "table": [asdict(each) for each in figures.table],
        "batches": [asdict(each) for each in shown],
        **extras,
        "recommendation": " ".join(sentences),
    }
    return Answer(record, source + premise, tables, sentences)


def _length_advice(figures: Outlook) -> list[str]:
    best, least, most = figures.best, figures.break_even_alpha, figures.break_even_cost
    longest = figures.table[-1].k
    if best.k == 0:
        sentences = [f"Leave it off: no draft of up to {tokens(longest)} is faster than plain decoding."]
        if least is None:
            sentences.append("At this cost it would not pay even if every draft token were accepted.")
        else:
            sentences.append(f"At this cost it pays once more than {percent(least)} of the draft tokens are accepted.")
        if most is not None:
            sentences.append(f"At this acceptance it pays once a draft token costs less than {most:.3g} plain steps.")
        return sentences
    assert least is not None and most is not None, "a draft that pays has both"
    if best.speedup - 1 < SMALL_GAIN:
        sentences = [
            f"Draft {tokens(best.k)} per run: it gains only {percent(best.speedup - 1)}, so leave it off unless "
            f"these figures are certain: it loses when fewer than {percent(least)} of the draft tokens are accepted."
        ]
    else:
        sentences = [
            f"Draft {tokens(best.k)} per run: {best.speedup:.2f} times as fast as plain decoding.",
            f"At this cost it pays while more than {percent(least)} of the draft tokens are accepted.",
            f"At this acceptance it pays while a draft token costs less than {most:.3g} plain steps.",
        ]
    if best.k == longest and figures.longer_gain > 0:
        sentences.append("Longer drafts gain more: try a larger --k-max.")
    return sentences


def _batch_advice(figures: Outlook) -> list[str]:
    if figures.curve is None:
        return []
    flip = figures.flip_batch
    again = next((each.batch for each in figures.batches if flip and each.batch > flip and each.best_k), None)
    if flip is None:
        sentences = [f"It still pays at {requests(len(figures.batches))}, the largest batch considered."]
    elif flip > 1:
        sentences = [f"Turn it off above {requests(flip - 1)}."]
    else:
        sentences = []
    if again is not None:
        sentences.append(f"At {requests(again)} it pays again.")
    measured = figures.curve.rows[-1]
    if 2 * (again or flip or len(figures.batches)) > measured:  # the shortest draft makes two rows of each request
        sentences.append(f"Runs of more than {measured} rows were not measured; their cost is extrapolated.")
    return sentences
