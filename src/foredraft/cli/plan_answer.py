"""What `foredraft plan` says: an object for scripts, and tables and sentences for a person."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

SMALL_GAIN = 0.1  # below this the advice warns that the gain may not be worth it
NUMERIC_COLUMNS = ("k", "tokens per run", "speed-up", "batch", "best k")
BAR_CELLS = 24
EIGHTHS = " ▏▎▍▌▋▊▉"


@dataclass(frozen=True)
class Table:
    """Cells as text. The rows in `chosen` are what is recommended."""

    headers: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]
    chosen: frozenset[int] = frozenset()


@dataclass(frozen=True)
class Answer:
    """What the command says: the object of `--json`, and tables and sentences for a person."""

    record: dict[str, Any]
    premise: str
    tables: list[Table]
    sentences: list[str]

    def print(self) -> None:
        live = sys.stdout.isatty()
        print(self.premise)
        for table in self.tables:
            (_print_rich if live else _print_plain)(table)
        if not live:
            print()
        for sentence in self.sentences:
            print(sentence)


def _print_rich(table: Table) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table as RichTable
    from rich.text import Text

    shown = RichTable(box=SIMPLE_HEAD, pad_edge=False)
    for header in table.headers:
        shown.add_column(header, justify="right" if header in NUMERIC_COLUMNS else "left")
    for place, row in enumerate(table.rows):
        shown.add_row(*map(Text, row), style="bold green" if place in table.chosen else None)
    Console().print(shown)


def _print_plain(table: Table) -> None:
    widths = [max(map(len, column)) for column in zip(table.headers, *table.rows)]
    print()
    for row in (table.headers, *table.rows):
        cells = zip(row, table.headers, widths)
        print("  ".join(c.rjust(w) if h in NUMERIC_COLUMNS else c.ljust(w) for c, h, w in cells).rstrip())


def bar(value: float, largest: float) -> str:
    eighths = round(8 * BAR_CELLS * value / largest)
    return ("█" * (eighths // 8) + EIGHTHS[eighths % 8]).rstrip()


def tokens(count: int) -> str:
    return f"{count} token" + ("s" if count != 1 else "")


def requests(count: int) -> str:
    return f"{count} concurrent request" + ("s" if count != 1 else "")


def percent(share: float) -> str:
    return f"{100 * share:.1f} %"
