"""The sections of docs/benchmarks.md, one function per kind of result: records in, Markdown out."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from peer_report import peers_section
from plain_report import plain_section
from published import Record

import foredraft


def machine_title(record: Record) -> str:
    machine = record["machine"]
    return f"{machine['name']}, {machine['threads']} threads"


def where(record: Record) -> str:
    """Machine, date and versions, in one sentence each."""
    machine = record["machine"]
    about = f" ({machine['about']})" if machine["about"] else ""
    versions = ", ".join(f"{name} {version}" for name, version in record["versions"].items())
    return (
        f"Machine: {machine['threads']} threads of {machine['name']}{about}. Date: {record['date']}. "
        f"Versions: {versions}{' (an older version)' if older_version(record) else ''}. Command: `{record['command']}`."
    )


def older_version(record: Record) -> str | None:
    """The version of Foredraft that a record was measured with, if it is not this one."""
    measured = next(version for name, version in record["versions"].items() if name.lower().startswith("foredraft"))
    return None if measured == foredraft.__version__ else str(measured)


def bullets(sentences: Iterable[str]) -> str:
    return "\n".join(f"* {sentence}" for sentence in sentences)


def auto_section(records: list[Record]) -> str:
    """All measurements of `auto` side by side, one column each."""
    first = records[0]
    kinds = [kind for kind in first["ratios_to_off"] if kind != "all"]
    titles = [f"{r['machine']['name']}, {r['dtype']}, batch {r['batch']}" for r in records]
    lines = [f"| kind | {' | '.join(titles)} |", "|---|" + "---|" * len(records)]
    for kind in [*kinds, "all"]:
        cells = [r["ratios_to_off"][kind] for r in records]
        lines.append(f"| {kind} | {' | '.join(map(_auto_cell, cells))} |")
    same = "Every text was the same in all settings." if all(r["same_text"] for r in records) else "TEXTS DIFFERED."
    parts = [
        "## `auto` by kind of prompt",
        f"{first['prompts']} prompts of {len(kinds)} kinds, {first['model']}, greedy, {first['max_tokens']} tokens, "
        "cold stores, one interleaved run, the prompt's time included. Each cell is the speed of `auto` in units of "
        f"`off`, and in brackets that of the best fixed setting. {same}",
        "The prompts are a development file in Spec-Bench's format. It is not part of this repository. Any file of "
        "that format works, and without `--suite` the built-in prompts are used.",
        "\n".join(lines),
    ]
    for record, title in zip(records, titles):
        report = f" [Full report]({record['report']})." if record["report"] else ""
        parts.append(f"**{title}.**{report} {where(record)}")
        if record["notes"]:
            parts.append(bullets(record["notes"]))
    return "\n\n".join(parts)


def _auto_cell(cell: dict[str, Any]) -> str:
    best = f" ({cell['best_fixed']:.3f} {cell['best_fixed_spec']})" if "best_fixed" in cell else ""
    return f"{cell['auto']:.3f}{best}"


def mixed_section(records: list[Record]) -> str:
    parts = [
        "## Mixed traffic",
        "70 % code editing and 30 % chat, eight requests in flight. Each figure is the speed of `auto` in units of one "
        "setting for all requests; the median over the rounds.",
    ]
    settings = list(records[0]["auto_to"])
    lines = [
        f"| machine | dtype | requests | rounds | {' | '.join(f'`auto` to `{setting}`' for setting in settings)} |",
        "|---|---|--:|--:|" + "--:|" * len(settings),
    ]
    for record in records:
        ratios = " | ".join(f"{record['auto_to'][setting]:.2f}×" for setting in settings)
        lines.append(
            f"| {machine_title(record)} | {record['dtype']} | {record['requests']} | {record['rounds']} | {ratios} |"
        )
    parts.append("\n".join(lines))
    for record in records:
        parts.append(f"**{record['machine']['name']}.** {where(record)} {' '.join(record['notes'])}".strip())
    return "\n\n".join(parts)


def proposers_section(records: list[Record]) -> str:
    parts = ["## Proposers, one by one"]
    for record in records:
        kinds = list(next(iter(record["specs"].values())))
        lines = [f"| spec | {' | '.join(kinds)} |", "|---|" + "---|" * len(kinds)]
        for spec, cells in record["specs"].items():
            shown = [f"{cells[kind]['tokens_per_run']:.2f}, {cells[kind]['speedup']:.2f}×" for kind in kinds]
            lines.append(f"| `{spec}` | {' | '.join(shown)} |")
        parts += [
            f"Tokens per run of the target, and the speed-up of the whole request, its prompt included. "
            f"{record['model']} in {record['dtype']}, greedy, batch {record['batch']}, {record['max_tokens']} tokens, "
            f"two prompts of each kind, cold stores, one interleaved run. "
            + ("All texts were the same." if record["same_text"] else "TEXTS DIFFERED."),
            "\n".join(lines),
            where(record),
            bullets(record["notes"]),
        ]
    return "\n\n".join(filter(None, parts))


def acceptance_section(records: list[Record]) -> str:
    parts = ["## Acceptance rules"]
    for record in records:
        lines = ["| rule | tokens per run | Σ min(p, q) |", "|---|--:|--:|"]
        lines += [f"| {r['rule']} | {r['tokens_per_run']:.2f} | {r['overlap']:.2f} |" for r in record["rules"]]
        parts += [
            f"A sampled draft model at temperature {record['temperature']:g} with chains of {record['k']}: "
            f"{record['model']} with {record['draft_model']}, {record['prompts']} prompts of {record['max_tokens']} "
            "tokens.",
            "\n".join(lines),
            where(record),
            bullets(record["notes"]),
        ]
    return "\n\n".join(filter(None, parts))


SECTIONS: dict[str, Callable[[list[Record]], str]] = {
    "auto": auto_section,
    "mixed": mixed_section,
    "peers": lambda records: peers_section(records, where, bullets),
    "plain": lambda records: plain_section(records, where, bullets),
    "proposers": proposers_section,
    "acceptance": acceptance_section,
}
