"""Who takes part in peers.py, and what was measured of them."""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field

from common import say

PLAIN = "plain"
COPY, CHAT = "copying", "open chat"
LOOKUPS = tuple(f"lookup-{drafts}" for drafts in (2, 5, 10))


@dataclass(frozen=True)
class Peer:
    """An engine and its decoding modes; the first is always plain."""

    name: str
    script: str
    modes: tuple[str, ...]


FOREDRAFT = Peer("Foredraft int4", "peer_foredraft.py", (PLAIN, "suffix", "ngram", "auto"))
LLAMA = Peer("llama.cpp", "peer_llama.py", (PLAIN, *LOOKUPS))
TRANSFORMERS = Peer("transformers", "peer_transformers.py", (PLAIN, *LOOKUPS))
OPENVINO = Peer("OpenVINO GenAI", "peer_openvino.py", (PLAIN, "lookup-5", "lookup-10"))
PEERS = (FOREDRAFT, LLAMA, TRANSFORMERS, OPENVINO)


@dataclass
class Results:
    """Everything measured. Keys are an engine's name and a mode."""

    about: dict[str, dict[str, str]] = field(default_factory=dict)
    failed: dict[tuple[str, str], str] = field(default_factory=dict)
    rates: dict[tuple[str, str, str], list[float]] = field(default_factory=dict)  # by kind too; tok/s, one per round
    prefill: dict[str, list[float]] = field(default_factory=dict)  # tok/s, one per round
    texts: dict[tuple[str, str], list[list[int]]] = field(default_factory=dict)  # all rounds, prompt after prompt

    def runs(self, peer: Peer, mode: str) -> bool:
        return (peer.name, mode) not in self.failed

    def fail(self, peer: Peer, modes: tuple[str, ...], reason: str) -> None:
        for mode in modes:
            self.failed.setdefault((peer.name, mode), reason)
        say(f"{peer.name}, {' '.join(modes)}: does not run: {reason}")

    def rate(self, peer: Peer, mode: str, kind: str) -> float | None:
        samples = self.rates.get((peer.name, mode, kind))
        return statistics.median(samples) if samples and self.runs(peer, mode) else None

    def prefill_rate(self, peer: Peer) -> float | None:
        samples = self.prefill.get(peer.name)
        return statistics.median(samples) if samples and self.runs(peer, PLAIN) else None

    def best_mode(self, peer: Peer, kind: str) -> str:
        """The engine's fastest mode, plain decoding included; plain must run."""
        return max(peer.modes, key=lambda mode: self.rate(peer, mode, kind) or 0.0)

    def differences(self, peer: Peer, mode: str) -> list[int | None]:
        """For every text where it first differs from the engine's own plain text, counted from 1."""
        pairs = zip(self.texts[peer.name, PLAIN], self.texts[peer.name, mode], strict=True)
        return [_first_difference(plain, other) for plain, other in pairs]


def _first_difference(one: list[int], other: list[int]) -> int | None:
    if one == other:
        return None
    places = range(min(len(one), len(other)))
    return next((place + 1 for place in places if one[place] != other[place]), len(places) + 1)
