"""What all advice shares: its words, and the table of draft lengths."""

from __future__ import annotations

from collections.abc import Sequence

from foredraft.control.economics import Length, VerifyCurve
from foredraft.reports.answer import Table

SMALL_GAIN = 0.1  # below this the advice warns that the gain may not be worth it
_BAR_CELLS = 24
_EIGHTHS = " ▏▎▍▌▋▊▉"


def length_table(lengths: Sequence[Length], best: Length) -> Table:
    """Every length with its speed-up, the best one chosen."""
    fastest = max(length.speedup for length in lengths)
    rows = [
        (str(each.k), f"{each.expected_tokens:.2f}", f"{each.speedup:.2f}x", _bar(each.speedup, fastest))
        for each in lengths
    ]
    return Table(("k", "tokens per run", "speed-up", ""), rows, frozenset({best.k}))


def _bar(value: float, largest: float) -> str:
    eighths = round(8 * _BAR_CELLS * value / largest)
    return ("█" * (eighths // 8) + _EIGHTHS[eighths % 8]).rstrip()


def rows_cost(curve: VerifyCurve, has_experts: bool) -> str:
    """What the first rows of drafts cost on a model."""
    why = ": further rows wake further experts" if has_experts else ""
    return f"On this model 2 rows cost {curve.relative(2):.2f} and 8 rows {curve.relative(8):.2f} plain steps{why}."


def tokens(count: int) -> str:
    return f"{count} token" + ("s" if count != 1 else "")


def requests(count: int) -> str:
    return f"{count} concurrent request" + ("s" if count != 1 else "")


def percent(share: float) -> str:
    return f"{100 * share:.1f} %"
