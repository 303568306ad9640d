"""The table and the sentences that peers.py writes into README.md."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

from common import PREFILL_TOKENS
from peer_results import CHAT, COPY, FOREDRAFT, LLAMA, PEERS, PLAIN, Peer, Results


def report(results: Results, settings: dict[str, Any], cpu: str) -> str:
    counts = settings["prompts"]
    intro = (
        f"{settings['file']}, the same file and the same tokens for every engine; greedy, batch 1, at most "
        f"{settings['max_tokens']} tokens, {settings['threads']} threads of {cpu}; {counts[COPY]} prompts whose answer "
        f"copies (code with one name changed, a list repeated; taken because the default model does copy them) and "
        f"{counts[CHAT]} of open chat, all distinct, nothing remembered between them; median of {settings['rounds']} "
        f"interleaved rounds, without the prefill, which is of {PREFILL_TOKENS} tokens. {_versions(results)} "
        f"To repeat it: `{_command(settings)}`."
    )
    return "\n\n".join([intro, _table(results), *_comparisons(results), *_failures(results)])


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


def _versions(results: Results) -> str:
    parts = []
    for name, about in results.about.items():
        settings = f" ({about['settings']})" if "settings" in about else ""
        parts.append(f"{name} {about['version']}{settings}")
    return ", ".join(parts) + "."


def _table(results: Results) -> str:
    lines = [
        f"| | {COPY}, tok/s | to its own plain | {CHAT}, tok/s | to its own plain | same text as its own plain "
        f"| prefill of {PREFILL_TOKENS}, tok/s |",
        "|---|--:|--:|--:|--:|---|--:|",
    ]
    for peer in PEERS:
        for mode in peer.modes:
            row = [f"{peer.name}, {_title(mode)}"]
            for kind in (COPY, CHAT):
                rate = results.rate(peer, mode, kind)
                row += [_figure(rate), "" if mode == PLAIN else _ratio(rate, results.rate(peer, PLAIN, kind))]
            row.append("" if mode == PLAIN else _sameness(results, peer, mode))
            row.append(_figure(results.prefill_rate(peer)) if mode == PLAIN else "")
            lines.append(f"| {' | '.join(row)} |")
    return "\n".join(lines)


def _title(mode: str) -> str:
    return mode.replace("lookup-", "prompt lookup, ") + (" guesses" if mode.startswith("lookup") else "")


def _figure(rate: float | None) -> str:
    return "no figure" if rate is None else f"{rate:.1f}" if rate < 100 else f"{rate:.0f}"


def _ratio(rate: float | None, base: float | None) -> str:
    return "–" if rate is None or base is None else f"{rate / base:.2f}×"


def _sameness(results: Results, peer: Peer, mode: str) -> str:
    if not results.runs(peer, mode):
        return "–"
    differences = results.differences(peer, mode)
    places = [place for place in differences if place is not None]
    if not places:
        return "yes"
    return f"no: {len(places)} of {len(differences)} texts differ, the earliest at token {min(places)}"


def _comparisons(results: Results) -> list[str]:
    if not (results.runs(FOREDRAFT, PLAIN) and results.runs(LLAMA, PLAIN)):
        return []
    plain = [_ratio(results.rate(FOREDRAFT, PLAIN, k), results.rate(LLAMA, PLAIN, k)) for k in (COPY, CHAT)]
    prefill = _ratio(results.prefill_rate(FOREDRAFT), results.prefill_rate(LLAMA))
    sentences = [
        f"Foredraft to llama.cpp, both plain: {plain[0]} on {COPY}, {plain[1]} on {CHAT}, {prefill} in prefill."
    ]
    for kind in (COPY, CHAT):
        best = results.best_mode(LLAMA, kind)
        rate = results.rate(LLAMA, best, kind)
        ours = ", ".join(f"`{m}` {_ratio(results.rate(FOREDRAFT, m, kind), rate)}" for m in FOREDRAFT.modes[1:])
        sentences.append(f"Foredraft to llama.cpp's fastest way on {kind} ({_title(best)}): {ours}.")
    return [" ".join(sentences)]


def _failures(results: Results) -> list[str]:
    reasons: dict[tuple[str, str], list[str]] = {}
    for (name, mode), reason in results.failed.items():
        reasons.setdefault((name, reason), []).append(_title(mode))
    return [f"{name} ({'; '.join(modes)}) gave no figure: {reason}." for (name, reason), modes in reasons.items()]
