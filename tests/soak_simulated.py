"""The simulation against reality: one server under the load of `make soak`, measured and simulated.

    python -m tests.soak_simulated [--minutes 5] [--clients 16] [--model smollm2-135m] [--dtype int4] [--threads 2]

The simulation is given three things: this machine as `foredraft simulate` measures it; what a server takes beside its
runs, measured with requests of their own (server_costs.py): steps of plain streams, and the processor time
of a request, which its runs lose; and, from the soak itself, the lengths of outputs and the acceptance of drafts. It
must find the rest by itself, to within 10 %: throughput, and the mean times that requests wait, until the first token,
between tokens and in all. Every figure is printed, measured and simulated, with the ratio of the two. The machine must
be quiet.
"""

from __future__ import annotations

import argparse
import asyncio
import heapq
import json
import random
import subprocess
import sys
from collections import Counter, defaultdict
from dataclasses import asdict, dataclass, replace
from itertools import zip_longest
from pathlib import Path
from statistics import fmean
from typing import Any

from foredraft import LLM
from foredraft.config import EngineConfig
from foredraft.proposers.registry import parse_spec
from foredraft.simulate.machine import DraftProfile, Machine
from foredraft.simulate.measure import measured_machine
from foredraft.simulate.step_mode import StepReplica
from foredraft.simulate.traffic import ANY, Record, Request
from tests import soak
from tests.server_costs import ServerCosts, server_costs

PROPOSERS = ("suffix", "ngram:k=4")  # those of the soak; its auto drafts with suffix
TOLERANCE = 0.10
CHECKED = ("answers per s", "tokens per s", "mean wait s", "mean first token s", "mean token s", "mean total s")


@dataclass(frozen=True)
class Answer:
    """One finished request: what is compared."""

    tokens: int
    wait_s: float | None  # until its first run
    first_s: float
    total_s: float


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=5)
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--dtype", default="int4")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    arguments = parser.parse_args()
    machine, prompts = calibrated(arguments)
    log, tally, seconds = Path("soak.log"), soak.Tally(), 60 * arguments.minutes
    with log.open("w") as log_file, subprocess.Popen(soak.server_command(arguments), stderr=log_file) as server:
        try:
            port = soak.wait_for_port(server, log)
            costs = server_costs(port, server.pid, arguments.threads, machine.run_s)
            asyncio.run(soak.load(port, server.pid, arguments.clients, seconds, tally))
        finally:
            server.terminate()
    measured = figures([answer_of(report) for report in tally.reports], tally.outcomes, seconds)
    machine = with_acceptance(replace(machine, step_s=costs.step_s, sequence_s=costs.sequence_s), tally.reports)
    simulated = figures(*simulate(machine, prompts, tally.reports, arguments.clients, seconds, costs), seconds)
    return told(measured, simulated, costs, arguments.json)


def calibrated(arguments: argparse.Namespace) -> tuple[Machine, dict[str, list[int]]]:
    """This machine while nothing else runs, and the token ids of all prompts."""
    options: dict[str, Any] = {"dtype": arguments.dtype, "threads": arguments.threads, "head": None}
    llm = LLM(arguments.model, spec="off", prefix_caching=False, **options)
    contents = [task.format(topic) for task in soak.TASKS for topic in soak.TOPICS]
    prompts = {content: llm.encode([{"role": "user", "content": content}]) for content in contents}
    machine = measured_machine(llm, arguments.model, PROPOSERS)
    llm.close()
    return machine, prompts


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def with_acceptance(machine: Machine, reports: list[soak.Report]) -> Machine:
    for name in PROPOSERS:
        told = [report.metrics["speculative_decoding"] for report in reports if report.spec == name]
        drafted, accepted = (
            [sum(column) for column in zip_longest(*(each[key] for each in told), fillvalue=0)]
            for key in ("drafted_per_position", "accepted_per_position")
        )
        runs, tokens = (sum(each[key] for each in told) for key in ("target_runs", "drafted_tokens"))
        profile = DraftProfile.of_counts(runs, drafted, accepted, tokens)
        say(f"{name}: {profile.tokens_per_run:.2f} tokens per run, {profile.branches:.1f} further nodes in a draft")
        machine = machine.with_proposer(name, replace(machine.proposers[name], by_kind={ANY: profile}))
    return machine


def answer_of(report: soak.Report) -> Answer:
    metrics = report.metrics
    tokens = metrics["speculative_decoding"]["emitted_tokens"]
    return Answer(tokens, metrics["queue_time_s"], metrics["time_to_first_token_s"], metrics["total_time_s"])


def simulate(
    machine: Machine,
    prompts: dict[str, list[int]],
    reports: list[soak.Report],
    clients: int,
    seconds: float,
    costs: ServerCosts,
) -> tuple[list[Answer], Counter[str]]:
    """The clients of the soak before a simulated server: each sends a request, waits for the answer, leaves early now
    and then, and sends the next. Bursts come from clients that send one request only. The processor time of every
    request delays the runs, which would use all cores."""
    options = EngineConfig(max_num_seqs=soak.MAX_NUM_SEQS, kv_cache_tokens=soak.KV_CACHE_TOKENS)
    record = Record(1_000_000)
    specs = {text: parse_spec("auto(suffix)" if text == "auto" else text) for text in soak.SPECS}
    replica = SimulatedServer(machine, options, specs["off"], record)
    lengths: defaultdict[tuple[int, float], list[int]] = defaultdict(list)
    for report in reports:
        lengths[report.job.max_tokens, report.job.temperature].append(answer_of(report).tokens)
    chance, outcomes, answers = random.Random(1), Counter[str](), []
    owner: dict[int, int | None] = {}  # of a request: the client that goes on after it, or nobody
    arrivals: dict[int, Request] = {}
    events: list[tuple[float, int, str, int | None]] = []  # time, order, what, client or request
    order = 0

    def plan(at: float, what: str, who: int | None) -> None:
        nonlocal order
        order += 1
        heapq.heappush(events, (at, order, what, who))

    def ended(index: int, now: float) -> None:
        client = owner.pop(index)
        if client is not None:
            plan(now + costs.outside_s + chance.expovariate(20), "send", client)

    for client in range(clients):
        plan(0.0, "send", client)
    burst_at = min(soak.BURST_EVERY_S, seconds / 4)
    while burst_at < seconds:
        for _ in range(soak.BURST):
            plan(burst_at, "send", None)
        burst_at += soak.BURST_EVERY_S
    index = 0
    while events or replica.num_unfinished:
        until = events[0][0] if events else float("inf")
        if replica.num_unfinished and replica.clock.now < until:
            _, commits = replica.step()
            for commit in commits:
                if commit.finish_reason is not None:
                    done = commit.sequence.id
                    request = arrivals.pop(done)
                    first, last = record.first_s[done], record.done_s[done]
                    wait = replica.first_run_s.pop(done) - request.arrival_s
                    answers.append(
                        Answer(request.output_tokens, wait, first - request.arrival_s, last - request.arrival_s)
                    )
                    outcomes["answered"] += 1
                    ended(done, replica.clock.now)
            continue
        now, _, what, who = heapq.heappop(events)
        if what == "leave":
            assert who is not None
            if who in owner:
                replica.abort(who)
                replica.first_run_s.pop(who, None)
                outcomes["left"] += 1
                ended(who, now)
        elif now < seconds or who is None:
            job, leaves = soak.Job.draw(chance), chance.random() < soak.LEAVE_SHARE
            if replica.num_unfinished >= soak.MAX_NUM_SEQS + soak.MAX_WAITING:
                outcomes["refused with 429"] += 1
                replica.delay(costs.refused_s)
                if who is not None:
                    plan(now + costs.outside_s + chance.expovariate(20), "send", who)
                continue
            replica.delay(costs.answered_s)
            prompt = prompts[job.content]
            tokens = chance.choice(lengths[job.max_tokens, job.temperature])
            # The engine takes requests between steps, and counts their time from then on.
            arrivals[index] = Request(max(now, replica.clock.now), ANY, len(prompt), tokens)
            replica.add(index, arrivals[index], specs[chance.choice(soak.SPECS)], list(prompt))
            owner[index] = who
            if leaves:
                plan(now + chance.uniform(0, 1), "leave", index)
            index += 1
    return answers, outcomes


class SimulatedServer(StepReplica):
    """Also remembers when each request was first run, and can be delayed."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.first_run_s: dict[int, float] = {}

    def step(self) -> Any:
        started = self.clock.now
        works, commits = super().step()
        for work in works:
            self.first_run_s.setdefault(work.sequence.id, started)
        return works, commits

    def delay(self, seconds: float) -> None:
        """While nothing runs, there is nothing to delay."""
        if self.num_unfinished:
            self.clock.now += seconds


def figures(answers: list[Answer], outcomes: Counter[str], seconds: float) -> dict[str, float]:
    def p99(values: list[float]) -> float:
        return soak.percentile(values, 0.99)

    waits = [answer.wait_s for answer in answers if answer.wait_s is not None]
    firsts = [answer.first_s for answer in answers]
    gaps = [(answer.total_s - answer.first_s) / (answer.tokens - 1) for answer in answers if answer.tokens > 1]
    totals = [answer.total_s for answer in answers]
    return {
        "answers per s": len(answers) / seconds,
        "tokens per s": sum(answer.tokens for answer in answers) / seconds,
        "mean wait s": fmean(waits),
        "mean first token s": fmean(firsts),
        "mean token s": fmean(gaps),
        "mean total s": fmean(totals),
        "p99 wait s": p99(waits),
        "p99 first token s": p99(firsts),
        "p99 token s": p99(gaps),
        "p99 total s": p99(totals),
        "left per s": outcomes["left"] / seconds,
        "refused per s": outcomes["refused with 429"] / seconds,
    }


def told(measured: dict[str, float], simulated: dict[str, float], costs: ServerCosts, file: Path | None) -> int:
    print(f"\n{'':20}  measured  simulated  ratio")
    ratios = {name: simulated[name] / measured[name] if measured[name] else float("nan") for name in measured}
    for name, value in measured.items():
        checked = "" if name not in CHECKED else "  ok" if abs(ratios[name] - 1) <= TOLERANCE else "  NOT within 10 %"
        print(f"{name:20}  {value:8.4f}  {simulated[name]:9.4f}  {ratios[name]:5.2f}{checked}")
    if file is not None:
        content = {"measured": measured, "simulated": simulated, "ratios": ratios, "server": asdict(costs)}
        file.write_text(json.dumps(content, indent=2) + "\n")
    return 0 if all(abs(ratios[name] - 1) <= TOLERANCE for name in CHECKED) else 1


if __name__ == "__main__":
    sys.exit(main())
