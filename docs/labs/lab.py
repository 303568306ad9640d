"""What the labs share: headings, paragraphs, tables, and checks that end a lab when a claim does not hold."""

from __future__ import annotations

import argparse
import textwrap
from collections.abc import Iterable
from collections.abc import Sequence as Items

WIDTH = 100


def arguments(description: str | None) -> argparse.ArgumentParser:
    """The options of every lab; a lab adds its own."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true", help="fewer tokens and samples")
    return parser


def heading(text: str) -> None:
    print(f"\n{text}\n{'-' * len(text)}")


def say(text: str) -> None:
    """A paragraph, wrapped; line breaks in `text` do not matter."""
    print(f"\n{textwrap.fill(' '.join(text.split()), WIDTH)}")


def table(columns: Items[str], rows: Iterable[Items[object]]) -> None:
    """Columns of text: the first to the left, the others to the right."""
    cells = [[str(cell) for cell in row] for row in (columns, *rows)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(columns))]
    print()
    for row in cells:
        first, *others = (
            cell.rjust(width) if column else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        print("  " + "   ".join([first, *others]).rstrip())


def check(condition: object, sentence: str) -> None:
    """Say that a claim holds, or end the lab with exit code 1 and the claim that does not."""
    if not condition:
        raise SystemExit(f"This does not hold: {sentence}")
    print(f"  checked: {sentence}")
