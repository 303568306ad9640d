"""What a running server counts of its speculation: vLLM's /metrics, whose names Foredraft's own server shares."""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import dataclass
from urllib.error import HTTPError, URLError
from urllib.parse import urlsplit, urlunsplit
from urllib.request import urlopen

from foredraft.control.economics import quotient
from foredraft.errors import InvalidParameter

_SAMPLE = re.compile(r"(?P<name>vllm:\w+)(?:\{(?P<labels>.*)\})?\s+(?P<value>\S+)")
_POSITION = re.compile(r'(?:^|,)position="(\d+)"')
_PER_POSITION = "vllm:spec_decode_num_accepted_tokens_per_pos_total"


@dataclass(frozen=True)
class ServerSpeculation:
    """Counts since the server started, of all its engines together."""

    drafts: float  # runs that had draft tokens to verify
    draft_tokens: float
    accepted_tokens: float
    accepted_per_position: tuple[float, ...]  # from the first draft token on, as long as drafts may be
    generated_tokens: float
    running: float  # requests at this moment

    @property
    def k(self) -> int:
        """How long drafts may be."""
        return len(self.accepted_per_position)

    @property
    def draft_length(self) -> float:
        """How long they were."""
        return self.draft_tokens / self.drafts

    @property
    def tokens_per_draft(self) -> float:
        """Tokens of a run that had a draft, with the target's own one."""
        return 1 + self.accepted_tokens / self.drafts

    @property
    def acceptances(self) -> list[float]:
        """At each depth, among the drafts that were right so far."""
        reached = (self.drafts, *self.accepted_per_position)
        return [min(1.0, quotient(more, fewer)) for fewer, more in zip(reached, self.accepted_per_position)]


def read_server(url: str) -> ServerSpeculation:
    """The counters behind a server's address, with or without /metrics."""
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.netloc:
        raise InvalidParameter(f"--vllm-metrics {url!r} must be an address such as http://localhost:8000/metrics.")
    address = urlunsplit(parts._replace(path=parts.path if parts.path.strip("/") else "/metrics"))
    try:
        with urlopen(address, timeout=10) as answer:
            text = answer.read(1 << 24).decode("utf-8", "replace")
    except (URLError, OSError, ValueError) as error:
        if isinstance(error, HTTPError):
            error.close()  # it is an answer too
        reason = getattr(error, "reason", error)
        raise InvalidParameter(f"{address} cannot be read ({reason}); check that the server is up.") from error
    return parse_metrics(text, address)


def parse_metrics(text: str, source: str) -> ServerSpeculation:
    """From Prometheus' text format; raises InvalidParameter where nothing was drafted."""
    totals: dict[str, float] = defaultdict(float)
    positions: dict[int, float] = defaultdict(float)
    for line in text.splitlines():
        sample = _SAMPLE.match(line)
        value = _number(sample["value"]) if sample else None
        if sample is None or value is None:
            continue
        position = _POSITION.search(sample["labels"] or "")
        if sample["name"] == _PER_POSITION and position:
            positions[int(position[1])] += value
        else:
            totals[sample["name"]] += value
    drafts, accepted = (totals[f"vllm:spec_decode_num_{what}_total"] for what in ("drafts", "accepted_tokens"))
    if drafts <= 0 or not positions:
        raise InvalidParameter(
            f"{source} counts no drafts; start the server with speculation, send it requests, and try again."
        )
    return ServerSpeculation(
        drafts=drafts,
        draft_tokens=totals["vllm:spec_decode_num_draft_tokens_total"],
        accepted_tokens=accepted,
        accepted_per_position=tuple(positions[place] for place in range(max(positions) + 1)),
        generated_tokens=totals["vllm:generation_tokens_total"],
        running=totals["vllm:num_requests_running"],
    )


def _number(text: str) -> float | None:
    """A count; None for what is none, such as NaN."""
    try:
        value = float(text)
    except ValueError:
        return None
    return value if 0 <= value < float("inf") else None
