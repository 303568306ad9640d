"""Clients for the check of replicas: what each request came to, to the last byte."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from tests.soak import SPECS, Job

CLEAN = ("answered", "failed cleanly", "refused")  # how outcomes begin that a client can deal with


@dataclass(frozen=True)
class Done:
    """A request that was answered."""

    job: Job
    text: str
    num_tokens: int
    run_s: float  # from its first run in the engine to its last
    ended_s: float


@dataclass
class Tally:
    """What all clients saw."""

    outcomes: Counter[str] = field(default_factory=Counter)
    done: list[Done] = field(default_factory=list)
    ids: Counter[str] = field(default_factory=Counter)

    def texts(self) -> dict[Job, set[str]]:
        texts: dict[Job, set[str]] = {}
        for each in self.done:
            texts.setdefault(each.job, set()).add(each.text)
        return texts

    def unclean(self) -> dict[str, int]:
        return {what: count for what, count in self.outcomes.items() if not what.startswith(CLEAN)}

    def answered_between(self, start_s: float, end_s: float) -> int:
        return sum(start_s <= each.ended_s < end_s for each in self.done)

    def tokens_per_s(self, start_s: float, end_s: float) -> float:
        """A request that ran partly in the window counts by that part. The load must be the same for as long after the
        window as a request runs, because tokens are taken to come evenly."""
        tokens = 0.0
        for each in self.done:
            inside = min(end_s, each.ended_s) - max(start_s, each.ended_s - each.run_s)
            tokens += each.num_tokens * max(0.0, inside) / each.run_s
        return tokens / (end_s - start_s)


class Broken(Exception):
    """An answer that is no answer and no error either."""


class _FailedCleanly(Exception):
    """A stream that ended with an error event."""


async def request(port: int, body: dict[str, Any], job: Job, tally: Tally) -> None:
    """Send one request and read whatever comes until the connection ends."""
    try:
        status, headers, data = await exchange(port, body)
        if status != 200:
            tally.outcomes[_failure(status, headers, data)] += 1
            return
        request_id, text, num_tokens, run_s = _read_stream(data) if body["stream"] else _read_whole(data)
    except _FailedCleanly:
        tally.outcomes["failed cleanly: an error event ended the stream"] += 1
    except (OSError, EOFError, ValueError, LookupError, Broken) as error:
        tally.outcomes[f"broken: {type(error).__name__} {error}"[:120]] += 1
    else:
        tally.outcomes["answered"] += 1
        tally.ids[request_id] += 1
        tally.done.append(Done(job, text, num_tokens, run_s, time.monotonic()))


async def exchange(port: int, body: dict[str, Any]) -> tuple[int, dict[str, str], bytes]:
    """Status, headers and the complete body; raises EOFError where the connection ends before the body does."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        data = json.dumps(body).encode()
        head = (
            "POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\nconnection: close\r\n"
        )
        writer.write(f"{head}content-length: {len(data)}\r\n\r\n".encode() + data)
        status = int((await reader.readline()).split()[1])
        headers = {}
        while line := (await reader.readline()).strip():
            name, _, value = line.decode().partition(":")
            headers[name.lower()] = value.strip()
        if headers.get("transfer-encoding") != "chunked":
            return status, headers, await reader.readexactly(int(headers["content-length"]))
        whole = b""
        while size := int(await reader.readline(), 16):
            whole += (await reader.readexactly(size + 2))[:-2]
        return status, headers, whole
    finally:
        writer.close()


def _failure(status: int, headers: dict[str, str], data: bytes) -> str:
    """An error must have the shape of the API, and a refusal must say when to come back."""
    json.loads(data)["error"]["message"]
    if status != 429:
        return f"failed cleanly with {status}"
    if int(headers["retry-after"]) < 1:
        raise Broken("a Retry-After without a time")
    return "refused with 429 and Retry-After"


def _read_whole(data: bytes) -> tuple[str, str, int, float]:
    """Id, text, tokens, and for how long it ran."""
    answer = json.loads(data)
    text, num_tokens = answer["choices"][0]["message"]["content"], answer["usage"]["completion_tokens"]
    return answer["id"], text, num_tokens, _run_s(answer["metrics"])


def _run_s(metrics: dict[str, float]) -> float:
    return max(1e-3, metrics["total_time_s"] - metrics["queue_time_s"])


def _read_stream(data: bytes) -> tuple[str, str, int, float]:
    events = [line.removeprefix("data: ") for line in data.decode().splitlines() if line.startswith("data: ")]
    if not events or events[-1] != "[DONE]" or events.count("[DONE]") != 1:
        raise Broken("a stream without its end")
    chunks = [json.loads(event) for event in events[:-1]]
    if any("error" in chunk for chunk in chunks):
        raise _FailedCleanly
    if len({chunk["id"] for chunk in chunks}) != 1:
        raise Broken("a stream of two answers")
    text = "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks if chunk["choices"])
    tokens = next(chunk["usage"]["completion_tokens"] for chunk in chunks if chunk.get("usage"))
    metrics = next(chunk["metrics"] for chunk in chunks if chunk.get("metrics"))
    return chunks[0]["id"], text, tokens, _run_s(metrics)


class Load:
    """Clients that send one request after the other until they are stopped."""

    def __init__(self, port: int, num_clients: int, *, steady: bool = False) -> None:
        self.tally = Tally()
        self._port = port
        self._is_over = False
        self._clients = [asyncio.create_task(self._run(random.Random(n), n, steady)) for n in range(num_clients)]

    async def stop(self) -> Tally:
        """Lets every request end."""
        self._is_over = True
        await asyncio.gather(*self._clients)
        return self.tally

    async def _run(self, chance: random.Random, number: int, steady: bool) -> None:
        count = 0
        while not self._is_over:
            count += 1
            if steady:  # every prompt is new, lengths differ, and nothing is learnt from one answer for the next
                job = Job(f"Client {number} writes about subject {count}.", count, chance.randrange(64, 193), 1.0)
                body = {**job.body(False, "off"), "ignore_eos": True}
            else:
                job = Job.draw(chance)
                body = job.body(chance.random() < 0.5, chance.choice(SPECS))
                body |= {"stream_options": {"include_usage": True}} if body["stream"] else {}
            await request(self._port, body, job, self.tally)
