"""Several machines behind one door, and what their users saw."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from random import Random

import numpy as np

from foredraft.errors import InvalidParameter
from foredraft.simulate.event_mode import EventReplica
from foredraft.simulate.step_mode import StepReplica
from foredraft.simulate.traffic import Record, Request

_WARM_UP_SHARE = 0.1  # of the requests do not count: they find machines that are still empty


Server = StepReplica | EventReplica  # one machine in either mode


@dataclass(frozen=True)
class Slo:
    """What a good answer keeps: seconds to the first token, and per token after it."""

    ttft: float = inf
    itl: float = inf

    @classmethod
    def parse(cls, text: str) -> Slo:
        """From `ttft=SECONDS,itl=SECONDS`, either of which may be left out."""
        try:
            values = {name: float(value) for name, value in (pair.split("=") for pair in text.split(","))}
            if not values.keys() <= {"ttft", "itl"} or not all(value > 0 for value in values.values()):
                raise ValueError
        except ValueError as error:
            raise InvalidParameter(
                f"slo={text!r} must be ttft=SECONDS,itl=SECONDS with times above 0; either may be left out."
            ) from error
        return cls(**values)


@dataclass(frozen=True)
class Outcome:
    """What the users of a fleet saw, without the first tenth of them. Times are seconds."""

    qps: float  # requests per second that arrived
    goodput: float  # requests per second that kept the objective, until the last was finished
    good_share: float
    tokens_per_s: float
    ttft_mean: float
    ttft_p50: float
    ttft_p99: float
    itl_mean: float
    itl_p50: float
    itl_p99: float
    latency_mean: float  # to the last token
    token_s: float  # mean latency per output token: what a user waits for a token, queueing included
    refused: int


def run_fleet(servers: Sequence[Server], requests: Sequence[Request], seed: int = 0) -> int:
    """Serve all requests to their end; returns how many could not be served at all. Each goes to the emptier one of two
    machines that are drawn at random, as Ray Serve routes."""
    draw, count, refused = Random(seed).random, len(servers), 0
    for index, request in enumerate(requests):
        server = servers[int(draw() * count)]
        server.advance(request.arrival_s)
        if count > 1:
            other = servers[int(draw() * count)]
            other.advance(request.arrival_s)
            if other.num_unfinished < server.num_unfinished:
                server = other
        refused += not server.add(index, request)
    for server in servers:
        server.advance(inf)
    return refused


def outcome_of(requests: Sequence[Request], record: Record, slo: Slo, refused: int = 0) -> Outcome:
    """The figures of a record. A request that was never finished is not good."""
    skipped = int(_WARM_UP_SHARE * len(requests))
    arrivals, _, _, outputs = (np.array(column) for column in zip(*requests))
    first, done = np.array(record.first_s), np.array(record.done_s)
    span = float(arrivals[-1] - arrivals[skipped]) or 1.0
    arrivals, outputs, first, done = (values[skipped:] for values in (arrivals, outputs.astype(int), first, done))
    ttft, itl = first - arrivals, (done - first) / np.maximum(1, outputs - 1)
    finished = np.isfinite(done)
    good = finished & (ttft <= slo.ttft) & (itl <= slo.itl)
    ttft, itl, latency, tokens = ttft[finished], itl[finished], (done - arrivals)[finished], outputs[finished]
    if not len(ttft):
        ttft = itl = latency = np.array([inf])
        tokens = np.array([1])
    ttft_p50, ttft_p99 = np.percentile(ttft, (50, 99)).tolist()
    itl_p50, itl_p99 = np.percentile(itl, (50, 99)).tolist()
    served_s = float(np.max(done[finished], initial=float(arrivals[-1]))) - float(arrivals[0]) or 1.0
    return Outcome(
        qps=(len(arrivals) - 1) / span,
        goodput=int(good.sum()) / served_s,
        good_share=float(good.mean()),
        tokens_per_s=float(outputs[finished].sum()) / served_s,
        ttft_mean=float(ttft.mean()),
        ttft_p50=ttft_p50,
        ttft_p99=ttft_p99,
        itl_mean=float(itl.mean()),
        itl_p50=itl_p50,
        itl_p99=itl_p99,
        latency_mean=float(latency.mean()),
        token_s=float((latency / tokens).mean()),
        refused=refused,
    )
