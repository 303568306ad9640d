"""Replicas on Ray under load: one is killed, all are renewed, too many requests come, and the fleet is stopped.

    python -m tests.check_ray [--seconds 30] [--clients 32] [--model smollm2-135m] [--dtype int4] [--json FILE]

`foredraft serve --replicas 2` runs in a process of its own; each replica has one thread, pinned to a core. Every
answer must be the offline text of its seed, once and whole; what is lost must fail with an error that clients
understand. Two replicas must give 1.8 times the tokens of one.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any
from urllib.request import urlopen

from tests.ray_clients import Load, Tally, request
from tests.soak import Job, wrong_texts

# Half of the clients: one replica and two run full batches, and one replica holds the rest itself, so that a replica
# does the same work in both.
MAX_NUM_SEQS = 16
KV_CACHE_TOKENS = 16384
LEAST_RATIO = 1.8
BURST = 200
MAX_QUEUED = 64
REPLICA = "ray::ServeReplica:foredraft:replica"
NEW_NAME = "renewed"  # what the rolling update adds to the model's names


class Fleet:
    """A running `foredraft serve --replicas 2`, and what the check may do to it."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.model: str = arguments.model
        self._options: dict[str, Any] = {
            "model": self.model,
            "dtype": arguments.dtype,
            "threads": 1,
            "max_num_seqs": MAX_NUM_SEQS,
            "kv_cache_tokens": KV_CACHE_TOKENS,
            "max_queued_requests": MAX_QUEUED,
        }
        command = [sys.executable, "-m", "foredraft", "serve", "--port", "0", "--replicas", "2"]
        command += ["--model", arguments.model, "--dtype", arguments.dtype, "--threads", "1"]
        command += ["--max-num-seqs", str(MAX_NUM_SEQS), "--kv-cache-tokens", str(KV_CACHE_TOKENS)]
        command += ["--max-waiting", str(MAX_QUEUED)]
        self._log = Path("check-ray.log")
        self.process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=self._log.open("w"))
        end = time.monotonic() + 300
        while not (found := re.search(r"http://127\.0\.0\.1:(\d+)\. Ctrl-C", self._log.read_text())):
            assert self.process.poll() is None and time.monotonic() < end, self._log.read_text()[-2000:]
            time.sleep(0.2)
        self.port = int(found[1])

    def descendants(self) -> dict[int, str]:
        """Its processes and their titles."""
        children: dict[int, list[int]] = {}
        for entry in filter(str.isdigit, os.listdir("/proc")):
            if stat := _read(f"/proc/{entry}/stat"):
                children.setdefault(int(stat.rpartition(")")[2].split()[1]), []).append(int(entry))
        found, left = {}, [self.process.pid]
        while left:
            pid = left.pop()
            found[pid] = _read(f"/proc/{pid}/cmdline").replace("\0", " ")
            left += children.get(pid, [])
        return found

    def replicas(self) -> list[int]:
        return [pid for pid, title in self.descendants().items() if title.startswith(REPLICA)]

    def num_ready(self) -> int:
        try:
            with urlopen(f"http://127.0.0.1:{self.port}/ready", timeout=10) as answer:
                return int(json.load(answer)["replicas"])
        except OSError:
            return 0

    def metric(self, name: str) -> dict[str, float]:
        """By replica or gateway."""
        with urlopen(f"http://127.0.0.1:{self.port}/metrics", timeout=10) as answer:
            text = answer.read().decode()
        found = re.findall(rf'^{re.escape(name)}{{(?:engine|gateway)="(\w+)"[^}}]*}} (\S+)$', text, re.MULTILINE)
        return {label: float(value) for label, value in found}

    async def until(self, num_replicas: int, timeout_s: float = 180) -> float:
        """Until so many replicas are ready; how long that took."""
        started = time.monotonic()
        while await asyncio.to_thread(self.num_ready) != num_replicas or len(self.replicas()) != num_replicas:
            assert time.monotonic() < started + timeout_s, f"{num_replicas} replicas were not there in time"
            await asyncio.sleep(0.2)
        return time.monotonic() - started

    def pin(self) -> None:
        """Each replica to a core of its own."""
        cores = sorted(os.sched_getaffinity(0))
        for pid, core in zip(sorted(self.replicas()), cores):
            for thread in os.listdir(f"/proc/{pid}/task"):
                os.sched_setaffinity(int(thread), {core})

    async def redeploy(self, **changes: Any) -> None:
        """What an operator does with an edited file: the same application with other options."""
        from ray import serve

        from foredraft.integrations.ray_serve import app
        from foredraft.integrations.ray_serve.local import APP_NAME

        self._options |= changes
        await asyncio.to_thread(serve.run, app(self._options), name=APP_NAME, logging_config={"log_level": "WARNING"})

    def cpu_s(self) -> tuple[float, float]:
        """The time that replicas and all other processes of the fleet have computed."""
        replicas = others = 0.0
        for pid, title in self.descendants().items():
            if stat := _read(f"/proc/{pid}/stat"):
                fields = stat.rpartition(")")[2].split()
                seconds = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
                is_replica = title.startswith(REPLICA)
                replicas, others = replicas + seconds * is_replica, others + seconds * (not is_replica)
        return replicas, others


def _read(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:  # the process has ended
        return ""


async def throughput(fleet: Fleet, clients: int, seconds: float) -> dict[str, float]:
    """Tokens per second of the fleet as it is, and how many cores its processes used. The load begins before the
    measurement and ends after it."""
    fleet.pin()
    load = Load(fleet.port, clients, steady=True)
    await asyncio.sleep(seconds / 2)
    start, before = time.monotonic(), fleet.cpu_s()
    await asyncio.sleep(seconds)
    end, after = time.monotonic(), fleet.cpu_s()
    await asyncio.sleep(seconds / 2)
    tally = await load.stop()
    assert not tally.unclean(), tally.unclean()
    cores = [(b - a) / (end - start) for a, b in zip(before, after)]
    return {"tokens_per_s": tally.tokens_per_s(start, end), "replica_cores": cores[0], "other_cores": cores[1]}


async def kill_one(fleet: Fleet, clients: int, seconds: float, checks: dict[str, bool]) -> tuple[Tally, dict[str, Any]]:
    load = Load(fleet.port, clients)
    await asyncio.sleep(seconds / 3)
    before, known = fleet.replicas(), set(fleet.metric("vllm:generation_tokens_total"))
    os.kill(before[0], signal.SIGKILL)
    killed = time.monotonic()
    await asyncio.sleep(0.5)
    back_s = 0.5 + await fleet.until(2)
    back = time.monotonic()
    await asyncio.sleep(seconds / 3)
    served = fleet.metric("vllm:generation_tokens_total")
    tally = await load.stop()
    new = [label for label in served if label not in known]
    checks["the other replica serves on"] = tally.answered_between(killed + 1, back) > 0
    checks["the replica comes back and serves"] = len(new) == 1 and served[new[0]] > 0
    retried, lost = (sum(fleet.metric(f"foredraft:requests_{what}_total").values()) for what in ("retried", "lost"))
    figures = {"back_after_s": back_s, "answered_meanwhile": tally.answered_between(killed, back)}
    return tally, {**figures, "retried": retried, "lost_in_streams": lost, "outcomes": dict(tally.outcomes)}


async def renew(fleet: Fleet, clients: int, checks: dict[str, bool]) -> tuple[Tally, dict[str, Any]]:
    old = set(fleet.replicas())
    load = Load(fleet.port, clients)
    await asyncio.sleep(2)
    await fleet.redeploy(served_model_names=[fleet.model, NEW_NAME])
    await fleet.until(2)
    tally = await load.stop()
    with urlopen(f"http://127.0.0.1:{fleet.port}/v1/models", timeout=10) as answer:
        names = [model["id"] for model in json.load(answer)["data"]]
    checks["a rolling update renews all replicas"] = NEW_NAME in names and not old & set(fleet.replicas())
    checks["a rolling update loses no request"] = set(tally.outcomes) == {"answered"}
    return tally, {"outcomes": dict(tally.outcomes)}


async def affinity(fleet: Fleet, checks: dict[str, bool]) -> tuple[Tally, dict[str, Any]]:
    """Tenants send prompts that begin alike, one after the other."""
    tally, places = Tally(), []
    for tenant in range(4):
        before = fleet.metric("vllm:prefix_cache_queries_total")
        for question in range(4):
            job = Job(f"These are the rules of tenant {tenant}. " * 20 + f"Question {question}?", 0, 8, 0.0)
            await request(fleet.port, {**job.body(False, "auto"), "cache_salt": f"tenant {tenant}"}, job, tally)
        after = fleet.metric("vllm:prefix_cache_queries_total")
        places.append(sum(after[engine] > before.get(engine, 0) for engine in after))
    checks["requests of one prefix meet one replica"] = places == [1] * len(places)
    return tally, {"replicas_by_tenant": places, "prefix_cache_hits": fleet.metric("vllm:prefix_cache_hits_total")}


async def burst(fleet: Fleet, checks: dict[str, bool]) -> tuple[Tally, dict[str, Any]]:
    tally, job = Tally(), Job("Tell me about rivers.", 0, 32, 0.9)
    await asyncio.gather(*(request(fleet.port, job.body(False, "auto"), job, tally) for _ in range(BURST)))
    refused = tally.outcomes["refused with 429 and Retry-After"]
    checks["too many requests are refused with 429 and Retry-After"] = refused > 0 and not tally.unclean()
    checks["as many are answered as there is room for"] = tally.outcomes["answered"] >= 4 * MAX_NUM_SEQS
    return tally, {"outcomes": dict(tally.outcomes)}


async def stop(fleet: Fleet, clients: int, checks: dict[str, bool]) -> tuple[Tally, dict[str, Any]]:
    """One request per client is under way when the signal comes; all of them are answered."""
    processes, tally = fleet.descendants(), Tally()
    jobs = [Job(f"Tell me about the number {n}.", n, 64, 0.9) for n in range(min(clients, MAX_NUM_SEQS))]
    under_way = [asyncio.create_task(request(fleet.port, job.body(False, "auto"), job, tally)) for job in jobs]
    await asyncio.sleep(1)
    fleet.process.send_signal(signal.SIGTERM)
    code = await asyncio.to_thread(fleet.process.wait, 120)
    await asyncio.gather(*under_way)
    await asyncio.sleep(1)
    left = [title for pid, title in processes.items() if _read(f"/proc/{pid}/cmdline")]
    checks["what runs at SIGTERM is finished, and the exit code is 0"] = code == 0 and set(tally.outcomes) == {
        "answered"
    }
    checks["nothing of Ray is left behind"] = not left
    return tally, {"outcomes": dict(tally.outcomes), "exit_code": code, "left": left}


async def check(arguments: argparse.Namespace, fleet: Fleet) -> tuple[dict[str, bool], dict[str, Any], list[Tally]]:
    checks: dict[str, bool] = {}
    figures: dict[str, Any] = {}
    tallies: list[Tally] = []

    def note(name: str, result: tuple[Tally, dict[str, Any]]) -> None:
        tallies.append(result[0])
        figures[name] = result[1]
        print(f"{name}: {json.dumps(result[1])}", flush=True)

    two = await throughput(fleet, arguments.clients, arguments.seconds)
    note("kill", await kill_one(fleet, arguments.clients, arguments.seconds, checks))
    import ray

    ray.init(address="auto", logging_level="WARNING", log_to_driver=False)
    note("renew", await renew(fleet, arguments.clients, checks))
    note("affinity", await affinity(fleet, checks))
    note("burst", await burst(fleet, checks))
    await fleet.redeploy(num_replicas=1)
    await fleet.until(1)
    one = await throughput(fleet, arguments.clients, arguments.seconds)
    ratio = two["tokens_per_s"] / one["tokens_per_s"]
    figures["throughput"] = {"one": one, "two": two, "ratio": ratio}
    checks[f"two replicas give at least {LEAST_RATIO} times the tokens of one"] = ratio >= LEAST_RATIO
    ray.shutdown()
    note("stop", await stop(fleet, arguments.clients, checks))
    return checks, figures, tallies


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=30, help="of each measurement")
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--dtype", default="int4")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    arguments = parser.parse_args()
    arguments.threads = 1
    fleet = Fleet(arguments)
    try:
        checks, figures, tallies = asyncio.run(check(arguments, fleet))
    finally:
        if fleet.process.poll() is None:
            fleet.process.terminate()
            fleet.process.wait(120)
    texts: dict[Job, set[str]] = {}
    for tally in tallies:
        for job, found in tally.texts().items():
            texts.setdefault(job, set()).update(found)
    wrong = wrong_texts(arguments, texts)
    checks["every answer is the offline text of its seed"] = not wrong and bool(texts)
    checks["no answer came twice, mixed or cut"] = all(
        not tally.unclean() and all(count == 1 for count in tally.ids.values()) for tally in tallies
    )
    report = {**figures, "distinct_jobs": len(texts), "wrong": wrong[:5], "checks": checks}
    print(json.dumps(report, indent=2))
    if arguments.json:
        arguments.json.write_text(json.dumps(report, indent=2) + "\n")
    return 0 if all(checks.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
