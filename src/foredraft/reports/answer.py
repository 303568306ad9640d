"""What a command answers: an object for scripts, and tables and sentences for a person."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

NUMERIC_COLUMNS = ("k", "tokens per run", "speed-up", "batch", "best k")


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
            if live:
                _print_rich(table)
            else:
                print()
                print_aligned([table.headers, *table.rows], [header in NUMERIC_COLUMNS for header in table.headers])
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


def print_aligned(rows: Sequence[tuple[str, ...]], to_the_right: Sequence[bool]) -> None:
    """Rows as lines, their columns below each other."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = zip(row, to_the_right, widths, strict=True)
        print("  ".join(cell.rjust(width) if right else cell.ljust(width) for cell, right, width in cells).rstrip())
