"""The figures of plain.py as Markdown: the printed report, and the section of docs/benchmarks.md."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from published import Record

Cell = dict[str, Any]
THEIRS, OURS = "transformers", "Foredraft"


def plain_section(
    records: list[Record], where: Callable[[Record], str], bullets: Callable[[Iterable[str]], str]
) -> str:
    parts = ["## Plain decoding beside transformers"]
    for record in records:
        parts += [introduction(record), table(record), where(record), bullets(record["notes"])]
    return "\n\n".join(filter(None, parts))


def introduction(record: Record) -> str:
    return (
        f"{record['model']}, greedy, batch 1, {record['decode_tokens']} tokens after a prompt of "
        f"{record['prompt_tokens']}; prefill of {record['prefill_tokens']} tokens; median of {record['rounds']} "
        "interleaved rounds. A figure with its own number of tokens comes from one small sample, because a full one "
        "would take minutes; ratios to it are rough."
    )


def table(record: Record) -> str:
    """The ratio that counts is the one to the best of transformers' dtypes."""
    cells: list[Cell] = record["cells"]
    alone = [cell for cell in cells if cell["batch"] == 1]
    best = {
        measure: max(c["tokens_per_s"] for c in alone if c["engine"] == THEIRS and c["measure"] == measure)
        for measure in ("decode", "prefill")
    }
    lines = [
        "| | decode, tok/s | to best transformers | prefill, tok/s | to best transformers |",
        "|---|--:|--:|--:|--:|",
    ]
    for title in dict.fromkeys(_title(cell) for cell in alone):
        row = [title]
        for measure, full in (("decode", record["decode_tokens"]), ("prefill", record["prefill_tokens"])):
            cell = next(c for c in alone if _title(c) == title and c["measure"] == measure)
            note = "" if cell["tokens"] == full else f" ({cell['tokens']} tokens)"
            row += [f"{cell['tokens_per_s']:.3g}{note}", f"{cell['tokens_per_s'] / best[measure]:.2f}×"]
        lines.append(f"| {' | '.join(row)} |")
    for many in (cell for cell in cells if cell["batch"] > 1):
        one = next(c for c in alone if _title(c) == _title(many) and c["measure"] == many["measure"])
        ratio = many["tokens_per_s"] / one["tokens_per_s"]
        lines += [
            "",
            f"{many['batch']} prompts at once, {many['dtype']}: {many['tokens_per_s']:.1f} tok/s in all, "
            f"{ratio:.2f}× of one prompt alone.",
        ]
    return "\n".join(lines)


def _title(cell: Cell) -> str:
    return f"{cell['engine']} {cell['dtype']}" + (", `exact=False`" if cell["exact"] is False else "")
