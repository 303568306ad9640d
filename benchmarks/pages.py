"""Writes docs/benchmarks.md and the table of figures in README.md from the published results in docs/results/.

    python benchmarks/pages.py [--check] [--add results.json]

`--check` writes nothing and exits 1 where a page is not what the results say. `--add` first publishes the `auto` cells
of a `results.json` that `foredraft bench` wrote.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from page_sections import SECTIONS, machine_title, older_version
from published import ROOT, Record, new_record, publish, read_records

PAGE, README = ROOT / "docs" / "benchmarks.md", ROOT / "README.md"
BEGIN, END = "<!-- figures:begin -->", "<!-- figures:end -->"

INTRODUCTION = """\
# Benchmarks

`make figures` writes this page from the files in [results/](results/). Do not edit it: change a result by measuring it
again. Every section names its machine, date, versions and command. Figures of an older version say so.

The speed of a setting is given as a ratio to `off`. `off` is plain decoding with the same engine, so above 1 is faster.
Tokens per run are the tokens that one run of the target gives on average; papers call this figure the mean acceptance
length, or τ. [benchmarking.md](benchmarking.md) explains how to measure and which traps there are."""


def benchmarks_page(records: Iterable[Record]) -> str:
    records = list(records)
    parts = [INTRODUCTION]
    for kind, section in SECTIONS.items():
        chosen = [record for record in records if record["kind"] == kind]
        if chosen:
            parts.append(section(chosen))
    return "\n\n".join(parts) + "\n"


def headline_table(records: Iterable[Record]) -> str:
    """One row per machine, dtype and batch size: what `auto` gains."""
    records = list(records)
    lines = [
        "| machine | weights | requests at once | `auto`, all prompts | best kind of prompt | worst kind of prompt |",
        "|---|---|--:|--:|--:|--:|",
    ]
    autos = [record for record in records if record["kind"] == "auto"]
    for record in sorted(autos, key=lambda r: -r["ratios_to_off"]["all"]["auto"]):
        ratios = {kind: cell["auto"] for kind, cell in record["ratios_to_off"].items()}
        overall = ratios.pop("all")
        best, worst = max(ratios, key=lambda kind: ratios[kind]), min(ratios, key=lambda kind: ratios[kind])
        lines.append(
            f"| {machine_title(record)}{' *' if older_version(record) else ''} | {record['dtype']} | {record['batch']} "
            f"| {overall:.2f}× "
            f"| {ratios[best]:.2f}× ({best}) | {ratios[worst]:.3f}× ({worst}) |"
        )
    older = sorted({version for record in autos if (version := older_version(record))})
    marks = [f"Rows with * were measured with version {version}." for version in older]
    return "\n".join([*lines, *(["", *marks] if marks else [])])


def with_table(readme: str, table: str) -> str:
    before, rest = readme.split(BEGIN)
    return f"{before}{BEGIN}\n{table}\n{END}{rest.split(END)[1]}"


def pages(records: list[Record]) -> dict[Path, str]:
    return {
        PAGE: benchmarks_page(records),
        README: with_table(README.read_text(encoding="utf-8"), headline_table(records)),
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


def auto_record(results: dict[str, Any]) -> Record:
    """The `auto` cells of a benchmark, each beside the fastest fixed setting of its category, if there is one."""
    settings, cells = results["settings"], results["cells"]
    (batch,) = settings["batches"]
    ratios: dict[str, dict[str, Any]] = {}
    for cell in cells:
        if cell["spec"] == "auto":
            fixed = [c for c in cells if c["category"] == cell["category"] and c["spec"] not in ("off", "auto")]
            ratios[cell["category"]] = {"auto": round(cell["ratio_to_off"], 3)}
            if fixed:
                best = max(fixed, key=lambda c: c["ratio_to_off"])
                ratios[cell["category"]] |= {
                    "best_fixed": round(best["ratio_to_off"], 3),
                    "best_fixed_spec": best["spec"],
                }
    specs = " ".join(f"--spec {spec}" for spec in settings["specs"] if spec != "off")
    command = (
        f"foredraft bench --suite {settings['suite']} --limit {settings['prompts']} --batch {batch} "
        f"--dtype {results['model']['dtype']} --threads {results['machine']['threads']} "
        f"--max-tokens {settings['max_tokens']} --repeats {settings['repeats']} {specs} --out report"
    )
    record = new_record(
        "auto",
        results["machine"]["cpu"],
        results["machine"]["threads"],
        results["versions"],
        command,
        model=results["model"]["name"],
        dtype=results["model"]["dtype"],
        batch=batch,
        prompts=settings["prompts"],
        max_tokens=settings["max_tokens"],
        same_text=all(cell["same_text"] for cell in cells),
        ratios_to_off=ratios,
    )
    measured_there = {key: results["machine"][key] for key in ("system", "cores")}  # maybe not on this machine
    return record | {"date": settings["measured_on"][:10], "machine": record["machine"] | measured_there}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 where a page is stale")
    parser.add_argument("--add", type=Path, help="publish the auto cells of this results.json of foredraft bench")
    options = parser.parse_args()
    if options.check:
        stale = stale_pages()
        for page in stale:
            print(f"{page.relative_to(ROOT)} is not what docs/results/ says; run: make figures")
        sys.exit(bool(stale))
    if options.add:
        record = auto_record(json.loads(options.add.read_text(encoding="utf-8")))
        publish(record, f"auto {record['machine']['cpu']} {record['dtype']} batch {record['batch']}")
    write_pages()


if __name__ == "__main__":
    main()
