"""What a server takes beside the runs of its model: measured with requests of their own, before any load."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from tests import soak

STREAMS = (1, 2, 4, 8)  # at which plain steps are timed
TOKENS = 96
ROUNDS = 4
REQUESTS = 60  # of each kind whose processor time is measured
PROMPT_TOKENS = 40  # of a stream, about
REFUSED = -1  # as max_tokens: refused like a request too many, once its body has been read


@dataclass(frozen=True)
class ServerCosts:
    """Seconds. A request has `outside_s` of its own beside the engine. While it is read, tokenised and answered,
    `answered_s` of processor time are missing where runs compute; clients on the same machine take part of it."""

    step_s: float
    sequence_s: float
    outside_s: float
    answered_s: float
    refused_s: float


async def _send(port: int, body: dict[str, Any]) -> tuple[float, dict[str, Any]]:
    """One request: seconds as its client sees them, and what the server tells about it."""
    data = json.dumps(body).encode()
    started = time.perf_counter()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    head = "POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    writer.write(f"{head}content-length: {len(data)}\r\nconnection: close\r\n\r\n".encode() + data)
    metrics: dict[str, Any] = {}
    while line := await reader.readline():
        if line.startswith((b"data: {", b"{")):
            metrics = json.loads(line[line.index(b"{") :]).get("metrics", metrics)
    writer.close()
    return time.perf_counter() - started, metrics


async def _streams(port: int, count: int, number: int) -> list[tuple[float, dict[str, Any]]]:
    """So many plain streams at once. Every second one is sampled, as every second request of the soak is."""
    jobs = [
        soak.Job(f"{number}: count to {place}.", 0, TOKENS, soak.TEMPERATURES[(place + number) % 2])
        for place in range(count)
    ]
    return await asyncio.gather(*(_send(port, {**job.body(True, "off"), "ignore_eos": True}) for job in jobs))


def server_costs(port: int, pid: int, threads: int, run_s: Callable[[int, int], float]) -> ServerCosts:
    """Of the server with this process id, whose runs compute with so many threads. `run_s` gives the seconds of a run
    by its rows and keys."""
    asyncio.run(_streams(port, 2, 0))  # the first runs are slow
    before = _processor_times(pid)
    over: list[float] = []
    outside: list[float] = []
    for count in STREAMS:
        found = [each for number in range(ROUNDS) for each in asyncio.run(_streams(port, count, 10 * count + number))]
        step_s = fmean(metrics["inter_token_latency_s"] for _, metrics in found)
        over.append(step_s - run_s(count, count * (PROMPT_TOKENS + TOKENS // 2)))
        outside += [seconds - metrics["total_time_s"] for seconds, metrics in found if count == 1]
        print(f"{count} streams: {1000 * step_s:.1f} ms per step, {1000 * over[-1]:.1f} ms beside the run", flush=True)
    if min(over) < 0:
        print("A step took less time than its run alone did before: the machine is not quiet; trust no ratio.")
    sequence_s, step_s = (float(value) for value in np.polyfit(STREAMS, over, 1))
    busy = {thread: seconds - before.get(thread, 0.0) for thread, seconds in _processor_times(pid).items()}
    computing = sorted(busy, key=lambda thread: busy[thread])[-threads:]
    answered_s = fmean(_processor_s(port, pid, computing, stream, 1) for stream in (True, True, False))
    refused_s = _processor_s(port, pid, computing, False, REFUSED)
    costs = ServerCosts(step_s, sequence_s, fmean(outside), answered_s, refused_s)
    print(", ".join(f"{name} {1000 * value:.2f} ms" for name, value in vars(costs).items()), flush=True)
    return costs


def _processor_s(port: int, pid: int, computing: list[str], stream: bool, max_tokens: int) -> float:
    """Processor time of a short request, in the server beside the threads that compute, and in its client."""

    async def send() -> None:
        for number in range(REQUESTS):
            body = soak.Job(soak.TASKS[0].format(soak.TOPICS[number % len(soak.TOPICS)]), 0, 1, 0.0).body(stream, "off")
            await _send(port, {**body, "max_tokens": max_tokens})

    asyncio.run(send())  # the first ones are slow
    before, mine = _processor_times(pid), time.process_time()
    asyncio.run(send())
    after, mine = _processor_times(pid), time.process_time() - mine
    others = sum(seconds - before.get(thread, 0.0) for thread, seconds in after.items() if thread not in computing)
    return (others + mine) / REQUESTS


def _processor_times(pid: int) -> dict[str, float]:
    """Seconds on a processor of every thread of a process."""
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return {task.name: int((task / "schedstat").read_text().split()[0]) / 1e9 for task in tasks}
