"""Writes docs/benchmarks.md and the figures in README.md from the published results in docs/results/.

    python benchmarks/pages.py [--check]

`--check` writes nothing and exits 1 where a page is not what the results say. A result of another version is an error.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable
from pathlib import Path

from page_sections import (
    ALL,
    AUTO,
    NONE,
    SECTIONS,
    machine_title,
    peers_section,
    percent,
    sources_section,
    table,
    with_part,
)
from published import ROOT, Figures, Record, read_records

import foredraft

PAGE, README = ROOT / "docs" / "benchmarks.md", ROOT / "README.md"
BEGIN, END = "<!-- figures:begin -->", "<!-- figures:end -->"

INTRODUCTION = f"""\
# Benchmarks

`make figures` writes this page from the files in [results/](results/), and `make figures-machine` measures them. Do not
edit it: change a figure by measuring it again. All figures are of version {foredraft.__version__}.

The speed of a setting is given as a ratio to `off`. `off` is plain decoding with the same engine, so above 1 is faster.
Tokens per run are the tokens that one run of the target gives on average; papers call this figure the mean acceptance
length, or τ. [benchmarking.md](benchmarking.md) explains how to measure and which traps there are.

A model at the cost of an 8B is a small one written into the shape of an 8B ([how](benchmarking.md#narrower-questions)):
its texts and its acceptance are those of the small one, and its runs and drafts take the time of an 8B's."""


def benchmarks_page(records: Iterable[Record]) -> str:
    records = list(records)
    parts = [INTRODUCTION]
    for part, section in SECTIONS.items():
        if chosen := with_part(records, part):
            parts.append(section(chosen))
    if peers := [record for record in records if record["kind"] == "peers"]:
        parts.append(peers_section(peers))
    return "\n\n".join([*parts, sources_section(records)]) + "\n"


def headline(records: Iterable[Record]) -> str:
    """README's table, one row per machine and model, and the price of exactness."""
    records = list(records)
    rows = []
    for record in with_part(with_part(records, "plain"), "auto"):
        plain, suites = record["plain"]["plain"], record["auto"]["suites"]
        beside = f"{plain['llama.cpp']:,.0f}" if plain["llama.cpp"] else NONE
        same = "yes" if all(suite["same_text"] for suite in suites.values()) else "NO"
        model = f"{record['model']['name']} {record['model']['dtype']}"
        speeds = [_auto_speed(suites[name]) if name in suites else NONE for name in ("suite", "functions")]
        rows.append([machine_title(record), model, beside, f"{plain['foredraft']:,.0f}", *speeds, same])
    headers = ["machine", "model", "llama.cpp plain, tok/s", "Foredraft plain, tok/s"]
    headers += ["`auto`, prompts of many kinds", "`auto`, writing functions", "same text"]
    largest: dict[str, Record] = {}  # by machine: the model that takes longest
    for record in sorted(with_part(records, "exactness"), key=lambda each: each["exactness"]["exact"]["ms_per_token"]):
        largest[machine_title(record)] = record
    prices = [f"{name}, {_price(record)}" for name, record in sorted(largest.items())]
    price = f"The price of exactness, `exact=True` / `False`, per cent as medians of rounds: {'; '.join(prices)}."
    return "\n\n".join([table(headers, rows), price])


def _price(record: Record) -> str:
    figures = record["exactness"]
    one, other, price = figures["exact"], figures["not_exact"], figures["price"]
    return (
        f"{record['model']['name']} {record['model']['dtype']}: {one['ms_per_token']:.2f} / "
        f"{other['ms_per_token']:.2f} ms a token for one request ({percent(price['latency'])} time), "
        f"{one['tokens_per_s']:,.0f} / {other['tokens_per_s']:,.0f} tok/s for {figures['sequences']} at once "
        f"({percent(price['throughput'])} time)"
    )


def _auto_speed(suite: Figures) -> str:
    """With the number of prompts: a short run has few."""
    count = suite["prompts"]
    return f"{suite['kinds'][ALL]['specs'][AUTO]['ratio_to_off']:.2f}× ({count} prompt{'s' if count != 1 else ''})"


def with_figures(readme: str, figures: str) -> str:
    before, rest = readme.split(BEGIN)
    return f"{before}{BEGIN}\n{figures}\n{END}{rest.split(END)[1]}"


def pages(records: list[Record]) -> dict[Path, str]:
    return {
        PAGE: benchmarks_page(records),
        README: with_figures(README.read_text(encoding="utf-8"), headline(records)),
    }


def stale_pages() -> list[Path]:
    """The pages that are not what the results say."""
    return [
        page
        for page, text in pages(read_records()).items()
        if not page.exists() or page.read_text(encoding="utf-8") != text
    ]


def write_pages() -> None:
    for page, text in pages(read_records()).items():
        page.write_text(text, encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 where a page is stale")
    options = parser.parse_args()
    if options.check:
        stale = stale_pages()
        for page in stale:
            print(f"{page.relative_to(ROOT)} is not what docs/results/ says; run: make figures")
        sys.exit(bool(stale))
    write_pages()


if __name__ == "__main__":
    main()
