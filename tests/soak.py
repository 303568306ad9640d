"""The server under load for minutes: answers stay right, memory flat, and nothing is left behind.

    python -m tests.soak [--minutes 10] [--clients 16] [--model smollm2-135m] [--dtype int4] [--json FILE]

`foredraft serve` runs in a process of its own. Clients send chats with seeds, streams and not, with different specs;
20 % leave in the middle. Now and then there is a burst of ten times as many requests as may wait. At the end every
finished answer must be the offline text of its seed, no block of the KV cache may be in use, and the memory of the
server may have grown by no more than 5 % since it was warm. A soak of less than about five minutes may miss the last,
because the store of `suffix` still fills.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import re
import subprocess
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

MAX_NUM_SEQS = 8
MAX_WAITING = 16
KV_CACHE_TOKENS = 8192  # few, so that all of it was touched, and counts as memory, when the server is warm
BURST = 10 * MAX_WAITING
BURST_EVERY_S = 20.0
LEAVE_SHARE = 0.2
TEMPERATURES = (0.0, 0.9)
MOST_GROWTH = 0.05
WARM_SHARE = 0.3  # of the time, before memory is looked at for the first time
TOPICS = ("rivers", "sorting a list in Python", "the moon", "bread", "trains", "a short poem", "prime numbers", "cats")
TASKS = ("Tell me about {}.", "Explain {} to a child.", "Write three facts about {}.", "List words about {}.")
SPECS = ("auto", "off", "suffix", "ngram:k=4")


@dataclass(frozen=True)
class Job:
    """A request that can be repeated offline: its text depends on these fields alone."""

    content: str
    seed: int
    max_tokens: int
    temperature: float

    @classmethod
    def draw(cls, chance: random.Random) -> Job:
        """Of few kinds, so that the offline texts are computed in reasonable time."""
        content = chance.choice(TASKS).format(chance.choice(TOPICS))
        return cls(content, chance.randrange(2), chance.choice((8, 32)), chance.choice(TEMPERATURES))

    def body(self, stream: bool, spec: str) -> dict[str, Any]:
        return {
            "messages": [{"role": "user", "content": self.content}],
            "seed": self.seed,
            "max_tokens": self.max_tokens,
            "temperature": self.temperature,
            "stream": stream,
            "spec": spec,
        }


@dataclass(frozen=True)
class Report:
    """What the server told about one answer, in its field `metrics`."""

    job: Job
    spec: str
    metrics: dict[str, Any]


@dataclass
class Tally:
    """What the clients saw."""

    outcomes: Counter[str] = field(default_factory=Counter)
    texts: dict[Job, set[str]] = field(default_factory=dict)
    reports: list[Report] = field(default_factory=list)
    gaps_s: list[float] = field(default_factory=list)

    def answered(self, job: Job, text: str) -> None:
        self.outcomes["answered"] += 1
        self.texts.setdefault(job, set()).add(text)


class Client:
    """HTTP without a library: what is sent and when the connection ends is in its hands."""

    def __init__(self, port: int, tally: Tally, chance: random.Random) -> None:
        self._port = port
        self._tally = tally
        self._chance = chance

    async def run(self, until: float) -> None:
        while time.monotonic() < until:
            await self.request()
            await asyncio.sleep(self._chance.expovariate(20))

    async def request(self) -> None:
        chance, stream = self._chance, self._chance.random() < 0.7
        job, leaves, spec = Job.draw(chance), chance.random() < LEAVE_SHARE, chance.choice(SPECS)
        reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
        try:
            data = json.dumps(job.body(stream, spec)).encode()
            head = "POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
            writer.write(f"{head}content-length: {len(data)}\r\nconnection: close\r\n\r\n".encode() + data)
            reading = self._read(reader, job, stream, spec)
            if leaves:
                try:
                    await asyncio.wait_for(reading, chance.uniform(0, 1))
                except TimeoutError:
                    self._tally.outcomes["left"] += 1
            else:
                await reading
        except OSError as error:
            self._tally.outcomes[f"failed: {type(error).__name__}"] += 1
        finally:
            writer.close()

    async def _read(self, reader: asyncio.StreamReader, job: Job, stream: bool, spec: str) -> None:
        status = int((await reader.readline()).split()[1])
        while (await reader.readline()).strip():
            pass
        if status != 200:
            self._tally.outcomes[f"refused with {status}"] += 1
        elif stream:
            await self._read_stream(reader, job, spec)
        else:
            answer = json.loads(await reader.read())
            self._tally.reports.append(Report(job, spec, answer["metrics"]))
            self._tally.answered(job, answer["choices"][0]["message"]["content"])

    async def _read_stream(self, reader: asyncio.StreamReader, job: Job, spec: str) -> None:
        text, last = "", None
        while line := await reader.readline():
            if not line.startswith(b"data: {"):
                if line.startswith(b"data: [DONE]"):
                    self._tally.answered(job, text)
                continue
            chunk = json.loads(line[6:])
            if "error" in chunk:
                self._tally.outcomes["error in a stream"] += 1
                return
            if content := chunk["choices"][0]["delta"].get("content"):
                now = time.monotonic()
                if last is not None:
                    self._tally.gaps_s.append(now - last)
                text, last = text + content, now
            if "metrics" in chunk:
                self._tally.reports.append(Report(job, spec, chunk["metrics"]))


async def load(port: int, pid: int, clients: int, seconds: float, tally: Tally) -> tuple[int, int]:
    """Runs the clients; returns the memory of the server when it was warm, and at the end."""
    until = time.monotonic() + seconds
    warm_at = time.monotonic() + WARM_SHARE * seconds
    running = [asyncio.create_task(Client(port, tally, random.Random(n)).run(until)) for n in range(clients)]
    warm, bursts = 0, 0
    next_burst = time.monotonic() + min(BURST_EVERY_S, seconds / 4)
    while time.monotonic() < until:
        await asyncio.sleep(0.5)
        if time.monotonic() > next_burst:
            next_burst += BURST_EVERY_S
            bursts += 1
            chances = (random.Random(1000 * bursts + place) for place in range(BURST))
            await asyncio.gather(*(Client(port, tally, chance).request() for chance in chances))
        if not warm and time.monotonic() > warm_at and bursts:
            warm = memory(pid)
            print(f"warm after {seconds - (until - time.monotonic()):.0f} s with {warm >> 20} MiB", flush=True)
    await asyncio.gather(*running)
    return warm or memory(pid), memory(pid)


def memory(pid: int) -> int:
    status = Path(f"/proc/{pid}/status").read_text()
    return int(re.findall(r"^VmRSS:\s+(\d+) kB", status, re.MULTILINE)[0]) << 10


def metric(port: int, name: str) -> float:
    from urllib.request import urlopen

    with urlopen(f"http://127.0.0.1:{port}/metrics") as answer:
        text = answer.read().decode()
    return sum(float(value) for value in re.findall(rf"^{re.escape(name)}{{[^}}]*}} (\S+)$", text, re.MULTILINE))


def is_idle(port: int) -> bool:
    names = ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc")
    return not any(metric(port, name) for name in names)


def percentile(values: list[float], share: float) -> float:
    ranked = sorted(values)
    return ranked[min(len(ranked) - 1, int(share * len(ranked)))] if ranked else 0.0


def wrong_texts(arguments: argparse.Namespace, texts: dict[Job, set[str]]) -> list[str]:
    """The jobs whose answers were not those of the library."""
    from foredraft import LLM, SamplingParams

    llm = LLM(arguments.model, dtype=arguments.dtype, threads=arguments.threads, spec="off")
    jobs = list(texts)
    params = [SamplingParams(max_tokens=j.max_tokens, temperature=j.temperature, seed=j.seed) for j in jobs]
    outputs = llm.chat([[{"role": "user", "content": job.content}] for job in jobs], params)
    return [str(job) for job, output in zip(jobs, outputs, strict=True) if texts[job] != {output.text}]


def server_command(arguments: argparse.Namespace) -> list[str]:
    program = "from foredraft.cli.main import run; run()"
    command = [sys.executable, "-c", program, "serve", "--port", "0", "--model", arguments.model]
    command += ["--dtype", arguments.dtype, "--threads", str(arguments.threads)]
    command += ["--max-num-seqs", str(MAX_NUM_SEQS), "--max-waiting", str(MAX_WAITING)]
    command += ["--kv-cache-tokens", str(KV_CACHE_TOKENS), "--share-answers"]
    for spec in SPECS:
        command += ["--allow-spec", spec]
    return command


def wait_for_port(server: subprocess.Popen[bytes], log: Path) -> int:
    """The port that the server says it listens on."""
    while not (found := re.search(r"http://127\.0\.0\.1:(\d+)", log.read_text())):
        assert server.poll() is None, log.read_text()
        time.sleep(0.1)
    return int(found[1])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--dtype", default="int4")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    arguments = parser.parse_args()
    log = Path("soak.log")
    command = server_command(arguments)
    with log.open("w") as log_file, subprocess.Popen(command, stderr=log_file) as server:
        try:
            port, tally = wait_for_port(server, log), Tally()
            warm, grown = asyncio.run(load(port, server.pid, arguments.clients, 60 * arguments.minutes, tally))
            end = time.monotonic() + 30
            while not (idle := is_idle(port)) and time.monotonic() < end:
                time.sleep(0.05)
        finally:
            server.terminate()
        stopped = server.wait(90)
    wrong = wrong_texts(arguments, tally.texts)
    queue_s = [report.metrics["queue_time_s"] for report in tally.reports]
    unexpected = {what: count for what, count in tally.outcomes.items() if what not in EXPECTED}
    checks = {
        "KV use is 0 and nothing runs at the end": idle,
        f"memory grew by at most {MOST_GROWTH:.0%}": grown <= warm * (1 + MOST_GROWTH),
        "every finished answer is the offline text of its seed": not wrong and bool(tally.texts),
        "nothing failed but what had to be refused": not unexpected,
        "the server ended with 0 after SIGTERM": stopped == 0,
    }
    figures = {
        "minutes": arguments.minutes,
        "clients": arguments.clients,
        "outcomes": dict(tally.outcomes),
        "distinct_jobs": len(tally.texts),
        "memory_mib": {"warm": warm >> 20, "end": grown >> 20},
        "queue_s": {"p50": percentile(queue_s, 0.5), "p99": percentile(queue_s, 0.99)},
        "inter_token_s": {"p50": percentile(tally.gaps_s, 0.5), "p99": percentile(tally.gaps_s, 0.99)},
        "checks": checks,
        "wrong": wrong[:5],
    }
    print(json.dumps(figures, indent=2))
    if arguments.json:
        arguments.json.write_text(json.dumps(figures, indent=2) + "\n")
    return 0 if all(checks.values()) else 1


EXPECTED = ("answered", "left", "refused with 429")

if __name__ == "__main__":
    sys.exit(main())
