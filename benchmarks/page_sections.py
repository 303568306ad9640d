"""The sections of docs/benchmarks.md, one function per kind of result: records in, Markdown out."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from published import Record

import foredraft

PLAIN = "plain"
COPY, CHAT = "copying", "open chat"  # the kinds of prompts that engines are compared with


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
        parts.append(f"**{title}.** {where(record)}")
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


def plain_section(records: list[Record]) -> str:
    rates = [
        "| machine | model | weights | plain, tok/s | llama.cpp | ratio | prompt, tok/s | llama.cpp | ratio | memory |",
        "|---|---|---|--:|--:|--:|--:|--:|--:|--:|",
    ]
    counts = list(records[0]["rows_ms"])
    titles = " | ".join(f"{count} rows" for count in counts[1:])
    rows = [
        f"| machine | model | weights | floor, ms | 1 row, ms | {titles} |",
        "|---|---|---|--:|--:|" + "--:|" * (len(counts) - 1),
    ]
    for record in records:
        weights = record["dtype"] + ("" if record["exact"] else ", `exact=False`")
        head = f"| {machine_title(record)} | {record['model']} | {weights} |"
        cells = []
        for measure in (record["plain"], record["prompt"]):
            rate, ratio = measure["llama.cpp"], measure["ratio"]
            cells += [_figure(measure["foredraft"]), *([_figure(rate), f"{ratio:.2f}×"] if rate else ["", ""])]
        rates.append(f"{head} {' | '.join(cells)} | {record['memory_mb']:,} MB |")
        one = record["rows_ms"]["1"]
        more = " | ".join(f"{record['rows_ms'][count] / one:.2f}×" for count in counts[1:])
        rows.append(f"{head} {record['floor_ms']:.2f} | {one:.2f} | {more} |")
    return "\n\n".join(
        [
            "## Plain decoding",
            "One sequence, greedy, without drafts: 128 tokens after a prompt of one, and a prompt of 512 tokens to its "
            "first token. llama.cpp is its own `llama-bench`, built for the same CPU; the two engines take turns.",
            "\n".join(rates),
            "A run of several rows in units of one row, which is what verifying a draft costs. The floor is the "
            "time to read all weights once.",
            "\n".join(rows),
            *(f"**{record['machine']['name']}, {record['model']}.** {where(record)}" for record in records),
            bullets(note for record in records for note in record["notes"]),
        ]
    ).rstrip()


def peers_section(records: list[Record]) -> str:
    parts = [
        "## Beside other engines",
        "All engines read the same file and decode the same tokens, greedy, one prompt at a time. All prompts are "
        "distinct, and nothing is remembered between them. The copying prompts are code with one name changed and a "
        "list to repeat; they were taken because the default model does copy them.",
    ]
    for record in _by_size(records):
        parts += [f"### {record['model']}, {record['machine']['name']}", peers_body(record), where(record)]
        parts.append(bullets(record["notes"]))
    return "\n\n".join(filter(None, parts))


def _by_size(records: Iterable[Record]) -> list[Record]:
    """The comparisons among these results, those with the most prompts first."""
    return sorted((r for r in records if r["kind"] == "peers"), key=lambda r: -sum(r["prompts"].values()))


def peers_body(record: Record) -> str:
    """The table and the sentences of one comparison."""
    counts = record["prompts"]
    introduction = (
        f"Prompts: {counts[COPY]} for {COPY}, {counts[CHAT]} of {CHAT}. At most {record['max_tokens']} tokens each. "
        f"Medians of {record['rounds']} interleaved rounds. The prefill of {record['prefill_tokens']} tokens is timed "
        "apart."
    )
    return "\n\n".join([introduction, _peers_table(record), *_to_llama(record), *_failures(record)])


def _peers_table(record: Record) -> str:
    lines = [
        f"| | {COPY}, tok/s | to its own plain | {CHAT}, tok/s | to its own plain | same text as its own plain "
        f"| prefill of {record['prefill_tokens']}, tok/s |",
        "|---|--:|--:|--:|--:|---|--:|",
    ]
    for row in record["rows"]:
        plain = row["mode"] == PLAIN
        cells = [f"{row['engine']}, {_mode(row['mode'])}"]
        for kind in (COPY, CHAT):
            ratio = row[kind]["ratio_to_plain"]
            cells += [_figure(row[kind]["tokens_per_s"]), "" if plain else "–" if ratio is None else f"{ratio:.2f}×"]
        same = {True: "yes", False: f"no: {row['difference']}", None: "" if plain else "–"}[row["same_text"]]
        cells += [same, _figure(row["prefill_tokens_per_s"]) if plain else ""]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _to_llama(record: Record) -> list[str]:
    ratios = record["to_llama_cpp"]
    if ratios is None:
        return []
    plain = ratios["plain"]
    sentences = [
        f"Foredraft to llama.cpp, both plain: {plain[COPY]:.2f}× on {COPY}, {plain[CHAT]:.2f}× on {CHAT}, "
        f"{plain['prefill']:.2f}× in prefill."
    ]
    for kind in (COPY, CHAT):
        fastest = dict(ratios["fastest"][kind])
        best = fastest.pop("mode")
        ours = ", ".join(f"`{mode}` {ratio:.2f}×" for mode, ratio in fastest.items())
        sentences.append(f"Foredraft to llama.cpp's fastest mode on {kind} ({_mode(best)}): {ours}.")
    return [" ".join(sentences)]


def _failures(record: Record) -> list[str]:
    return [
        f"{failure['engine']} ({'; '.join(map(_mode, failure['modes']))}) gave no figure: {failure['reason']}."
        for failure in record["failed"]
    ]


def _mode(mode: str) -> str:
    return mode.replace("lookup-", "prompt lookup, ") + (" draft tokens" if mode.startswith("lookup") else "")


def _figure(rate: float | None) -> str:
    return "no figure" if rate is None else f"{rate:.1f}" if rate < 100 else f"{rate:.0f}"


SECTIONS: dict[str, Callable[[list[Record]], str]] = {
    "auto": auto_section,
    "mixed": mixed_section,
    "plain": plain_section,
    "peers": peers_section,
    "proposers": proposers_section,
    "acceptance": acceptance_section,
}
