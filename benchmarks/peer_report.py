"""The figures of peers.py: the record that is published, the printed report, and the section of docs/benchmarks.md."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from common import PREFILL_TOKENS
from peer_results import CHAT, COPY, FOREDRAFT, LLAMA, PEERS, PLAIN, Peer, Results
from published import Record, new_record

KINDS = (COPY, CHAT)


def peers_record(results: Results, settings: dict[str, Any], cpu: str) -> Record:
    """What is published of a comparison: medians, ratios, and which texts differ."""
    return new_record(
        "peers",
        cpu,
        settings["threads"],
        _versions(results),
        _command(settings),
        model=settings["file"],
        prompts=settings["prompts"],
        rounds=settings["rounds"],
        max_tokens=settings["max_tokens"],
        prefill_tokens=PREFILL_TOKENS,
        rows=[_row(results, peer, mode) for peer in PEERS for mode in peer.modes],
        to_llama_cpp=_to_llama(results),
        failed=_failures(results),
    )


def _row(results: Results, peer: Peer, mode: str) -> dict[str, Any]:
    difference = None if mode == PLAIN or not results.runs(peer, mode) else _difference(results, peer, mode)
    row: dict[str, Any] = {"engine": peer.name, "mode": mode}
    for kind in KINDS:
        rate, plain = results.rate(peer, mode, kind), results.rate(peer, PLAIN, kind)
        row[kind] = {
            "tokens_per_s": _rounded(rate, 1),
            "ratio_to_plain": None if mode == PLAIN else _ratio(rate, plain),
        }
    return row | {
        "same_text": None if mode == PLAIN or not results.runs(peer, mode) else difference is None,
        "difference": difference,
        "prefill_tokens_per_s": _rounded(results.prefill_rate(peer), 1) if mode == PLAIN else None,
    }


def _difference(results: Results, peer: Peer, mode: str) -> str | None:
    differences = results.differences(peer, mode)
    places = [place for place in differences if place is not None]
    if not places:
        return None
    return f"{len(places)} of {len(differences)} texts differ, the earliest at token {min(places)}"


def _to_llama(results: Results) -> dict[str, Any] | None:
    if not (results.runs(FOREDRAFT, PLAIN) and results.runs(LLAMA, PLAIN)):
        return None
    plain = {kind: _ratio(results.rate(FOREDRAFT, PLAIN, kind), results.rate(LLAMA, PLAIN, kind)) for kind in KINDS}
    fastest: dict[str, dict[str, Any]] = {}
    for kind in KINDS:
        best = results.best_mode(LLAMA, kind)
        rate = results.rate(LLAMA, best, kind)
        ours = {mode: _ratio(results.rate(FOREDRAFT, mode, kind), rate) for mode in FOREDRAFT.modes[1:]}
        fastest[kind] = {"mode": best, **ours}
    prefill = _ratio(results.prefill_rate(FOREDRAFT), results.prefill_rate(LLAMA))
    return {"plain": {**plain, "prefill": prefill}, "fastest": fastest}


def _failures(results: Results) -> list[dict[str, Any]]:
    reasons: dict[tuple[str, str], list[str]] = {}
    for (name, mode), reason in results.failed.items():
        reasons.setdefault((name, reason), []).append(mode)
    return [{"engine": name, "modes": modes, "reason": reason} for (name, reason), modes in reasons.items()]


def _versions(results: Results) -> dict[str, str]:
    return {
        name: about["version"] + (f" ({about['settings']})" if "settings" in about else "")
        for name, about in results.about.items()
    }


def _command(settings: dict[str, Any]) -> str:
    named = {"model": Path(settings["model"]).name, "prompts": settings["prompts"][CHAT]}
    options = named | {
        "threads": settings["threads"],
        "rounds": settings["rounds"],
        "max-tokens": settings["max_tokens"],
    }
    arguments = " ".join(f"--{name} {value}" for name, value in options.items())
    arguments += "".join(f" --leave-out {shlex.quote(name)}" for name in settings["leave_out"])
    return f'make bench-peers ARGS="{arguments}"'


def peers_section(
    records: list[Record], where: Callable[[Record], str], bullets: Callable[[Iterable[str]], str]
) -> str:
    parts = [
        "## Beside other engines",
        "All engines read the same file and decode the same tokens, greedy, one prompt at a time. All prompts are "
        "distinct, and nothing is remembered between them. The copying prompts are code with one name changed and a "
        "list to repeat; they were taken because the default model does copy them.",
    ]
    for record in by_size(records):
        parts += [f"### {record['model']}, {record['machine']['name']}", body(record), where(record)]
        parts.append(bullets(record["notes"]))
    return "\n\n".join(filter(None, parts))


def by_size(records: Iterable[Record]) -> list[Record]:
    """The comparisons among these results, those with the most prompts first."""
    return sorted((r for r in records if r["kind"] == "peers"), key=lambda r: -sum(r["prompts"].values()))


def body(record: Record) -> str:
    """The table and the sentences of one comparison."""
    counts = record["prompts"]
    introduction = (
        f"Prompts: {counts[COPY]} for {COPY}, {counts[CHAT]} of {CHAT}. At most {record['max_tokens']} tokens each. "
        f"Medians of {record['rounds']} interleaved rounds. The prefill of {record['prefill_tokens']} tokens is timed "
        "apart."
    )
    return "\n\n".join([introduction, _table(record), *_comparison(record), *_reasons(record)])


def _table(record: Record) -> str:
    lines = [
        f"| | {COPY}, tok/s | to its own plain | {CHAT}, tok/s | to its own plain | same text as its own plain "
        f"| prefill of {record['prefill_tokens']}, tok/s |",
        "|---|--:|--:|--:|--:|---|--:|",
    ]
    for row in record["rows"]:
        plain = row["mode"] == PLAIN
        cells = [f"{row['engine']}, {_title(row['mode'])}"]
        for kind in KINDS:
            ratio = row[kind]["ratio_to_plain"]
            cells += [_figure(row[kind]["tokens_per_s"]), "" if plain else "–" if ratio is None else f"{ratio:.2f}×"]
        same = {True: "yes", False: f"no: {row['difference']}", None: "" if plain else "–"}[row["same_text"]]
        cells += [same, _figure(row["prefill_tokens_per_s"]) if plain else ""]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _comparison(record: Record) -> list[str]:
    ratios = record["to_llama_cpp"]
    if ratios is None:
        return []
    plain = ratios["plain"]
    sentences = [
        f"Foredraft to llama.cpp, both plain: {plain[COPY]:.2f}× on {COPY}, {plain[CHAT]:.2f}× on {CHAT}, "
        f"{plain['prefill']:.2f}× in prefill."
    ]
    for kind in KINDS:
        fastest = dict(ratios["fastest"][kind])
        best = fastest.pop("mode")
        ours = ", ".join(f"`{mode}` {ratio:.2f}×" for mode, ratio in fastest.items())
        sentences.append(f"Foredraft to llama.cpp's fastest mode on {kind} ({_title(best)}): {ours}.")
    return [" ".join(sentences)]


def _reasons(record: Record) -> list[str]:
    return [
        f"{failure['engine']} ({'; '.join(map(_title, failure['modes']))}) gave no figure: {failure['reason']}."
        for failure in record["failed"]
    ]


def _title(mode: str) -> str:
    return mode.replace("lookup-", "prompt lookup, ") + (" draft tokens" if mode.startswith("lookup") else "")


def _figure(rate: float | None) -> str:
    return "no figure" if rate is None else f"{rate:.1f}" if rate < 100 else f"{rate:.0f}"


def _rounded(value: float | None, digits: int) -> float | None:
    return None if value is None else round(value, digits)


def _ratio(rate: float | None, base: float | None) -> float | None:
    return None if rate is None or base is None else round(rate / base, 2)
