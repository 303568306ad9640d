"""The requests of a simulation, drawn from a mix of kinds or read from a trace of real traffic, and their record."""

from __future__ import annotations

import csv
import json
from array import array
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime
from math import nan
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from foredraft.errors import InvalidParameter

ANY = "all"  # the kind of a request of which only the lengths are known: the mean over all kinds
_SPREAD = 0.6  # of the logarithm of lengths: the longest of 100 is about four times the median
_LONGEST = 4096  # tokens of a drawn prompt or output


class Request(NamedTuple):
    """One request, in seconds since the beginning."""

    arrival_s: float
    kind: str  # which acceptance it has
    prompt_tokens: int
    output_tokens: int


class Record:
    """When every request got its first and its last token: seconds by its index, NaN for what never happened."""

    def __init__(self, count: int) -> None:
        self.first_s = array("d", [nan]) * count
        self.done_s = array("d", [nan]) * count


@dataclass(frozen=True)
class Kind:
    """Requests with one acceptance. Lengths have a log-normal distribution with these means; with spread 0 they are all
    equal."""

    name: str
    prompt_tokens: float
    output_tokens: float
    share: float
    spread: float = _SPREAD


@dataclass(frozen=True)
class Mix:
    """Kinds by their share of the requests."""

    name: str
    kinds: tuple[Kind, ...]

    def requests(self, qps: float, count: int, seed: int = 0) -> list[Request]:
        """So many requests that arrive independently of each other, `qps` per second on average."""
        random = np.random.default_rng(seed)
        arrivals = np.cumsum(random.exponential(1 / qps, count)).tolist()
        shares = np.array([kind.share for kind in self.kinds])
        which = random.choice(len(self.kinds), count, p=shares / shares.sum())
        spread = np.array([kind.spread for kind in self.kinds])[which]
        lengths: list[list[int]] = []
        for means in ([kind.prompt_tokens for kind in self.kinds], [kind.output_tokens for kind in self.kinds]):
            factor = np.exp(spread * random.standard_normal(count) - spread**2 / 2)  # its mean is 1
            lengths.append(np.clip(np.rint(np.array(means)[which] * factor), 1, _LONGEST).astype(int).tolist())
        kinds = [self.kinds[place].name for place in which.tolist()]
        return list(map(Request, arrivals, kinds, *lengths))


# The kinds are those of the built-in benchmark prompts; lengths are of the order that public traces of chat, of code
# and of document services show.
MIXES = {
    mix.name: mix
    for mix in (
        Mix(
            "chat",
            (Kind("chat", 150, 180, 0.6), Kind("question-answering", 60, 120, 0.25), Kind("maths", 80, 150, 0.15)),
        ),
        Mix("code", (Kind("code-editing", 400, 250, 0.7), Kind("chat", 150, 180, 0.3))),
        Mix("documents", (Kind("summarisation", 700, 80, 0.7), Kind("copy", 500, 200, 0.3))),
    )
}


@dataclass(frozen=True)
class Trace:
    """The requests of a trace, always the same ones in the same order."""

    name: str
    recorded: tuple[Request, ...]

    @property
    def qps(self) -> float:
        """Requests per second as they were recorded, from the first arrival to the last."""
        span = self.recorded[-1].arrival_s - self.recorded[0].arrival_s
        return (len(self.recorded) - 1) / span if span > 0 else float(len(self.recorded))

    def requests(self, qps: float, count: int, seed: int = 0) -> list[Request]:
        """The first `count` of them, faster or slower, so that the whole trace would have so many per second."""
        factor = self.qps / qps
        return [each._replace(arrival_s=each.arrival_s * factor) for each in self.recorded[:count]]


Traffic = Mix | Trace  # requests at any rate


def read_trace(file: Path) -> Trace:
    """The requests of a trace in order of arrival: JSON lines with `arrival_s`, `prompt_tokens`, `output_tokens` and
    optionally `kind`, or a CSV file with the columns of the public Azure LLM traces (TIMESTAMP, ContextTokens,
    GeneratedTokens)."""
    try:
        with file.open(encoding="utf-8", newline="") as lines:
            rows = _csv_rows(lines) if file.suffix == ".csv" else [json.loads(line) for line in lines if line.strip()]
        requests = sorted(_request(row) for row in rows)
    except OSError as error:
        raise InvalidParameter(f"{file} cannot be read: {error.strerror}.") from error
    except (ValueError, KeyError, TypeError) as error:
        raise InvalidParameter(
            f"{file} is no trace ({type(error).__name__}: {error}); give JSON lines with arrival_s, prompt_tokens and "
            "output_tokens (and kind), or a .csv with TIMESTAMP, ContextTokens and GeneratedTokens."
        ) from error
    if len(requests) < 2:
        raise InvalidParameter(f"{file} holds {len(requests)} requests; a trace needs at least two.")
    first = requests[0].arrival_s
    return Trace(file.name, tuple(request._replace(arrival_s=request.arrival_s - first) for request in requests))


def _csv_rows(lines: Iterable[str]) -> list[dict[str, Any]]:
    return [
        {
            "arrival_s": datetime.fromisoformat(row["TIMESTAMP"]).timestamp(),
            "prompt_tokens": row["ContextTokens"],
            "output_tokens": row["GeneratedTokens"],
        }
        for row in csv.DictReader(lines)
    ]


def _request(row: dict[str, Any]) -> Request:
    """One row of a trace. Lengths of 0 are taken for 1: every request computes a token and emits one."""
    prompt, output = (max(1, int(row[name])) for name in ("prompt_tokens", "output_tokens"))
    arrival = float(row["arrival_s"])
    if not 0 <= arrival < 1e12:
        raise ValueError(f"arrival_s={arrival} must be seconds of at least 0")
    return Request(arrival, str(row.get("kind", ANY)), prompt, output)
