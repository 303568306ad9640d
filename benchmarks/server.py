"""What the server costs beside the offline engine, and what a long prompt costs a short one.

    python benchmarks/server.py [--model smollm2-135m] [--dtype int4] [--threads 2] [--rounds 5] [--tokens 128]

Throughput: 8 chats at once, offline in one batch and as 8 streams of a server in a process of its own, in turn; at
least 0.95 of the offline rate is wanted. First token: a short prompt alone, and while a prompt of 4,000 tokens is
computed; at most 4 steps of that moment later are wanted. Both limits are about a quiet machine.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.request import urlopen

from published import Prompts, say

from foredraft import LLM, SamplingParams

CHATS = 8
LEAST_RATIO = 0.95
LONG_TOKENS = 4000
SHORT_TOKENS = 32
MOST_STEPS_LATER = 4
LONG_HEAD_START_S = 0.4


@contextmanager
def serving(arguments: argparse.Namespace) -> Iterator[int]:
    """`foredraft serve` in a process of its own; its port."""
    program = "from foredraft.cli.main import run; run()"
    command = [sys.executable, "-c", program, "serve", "--port", "0", "--model", arguments.model]
    command += ["--dtype", arguments.dtype, "--threads", str(arguments.threads), "--served-model-name", "bench"]
    command += ["--share-answers"]  # as the library's requests do
    with tempfile.NamedTemporaryFile("w+") as log, subprocess.Popen(command, stderr=log) as server:
        try:
            while not (found := re.search(r":(\d+)\. Ctrl", Path(log.name).read_text())):
                if server.poll() is not None:
                    sys.exit(Path(log.name).read_text())
                time.sleep(0.1)
            yield int(found[1])
        finally:
            server.terminate()


class Receiver(asyncio.Protocol):
    """Keeps what comes. Little is looked at, and no task is woken: the client shares the cores."""

    def __init__(self) -> None:
        self.received = bytearray()
        self.first_token_time = 0.0
        self.ended = asyncio.get_running_loop().create_future()

    def data_received(self, data: bytes) -> None:
        self.received += data
        if not self.first_token_time and self._has_token():
            self.first_token_time = time.perf_counter()

    def connection_lost(self, exc: Exception | None) -> None:
        self.ended.set_result(None)

    def _has_token(self) -> bool:
        return b'"content":"' in self.received.partition(b'"role"')[2] or b'"text":"' in self.received


async def stream(port: int, path: str, body: dict[str, Any]) -> tuple[float, bytes]:
    """Seconds until the first token, and all that came."""
    transport, receiver = await asyncio.get_running_loop().create_connection(Receiver, "127.0.0.1", port)
    data = json.dumps({**body, "stream": True}).encode()
    head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\nconnection: close\r\n"
    started = time.perf_counter()
    transport.write(f"{head}content-length: {len(data)}\r\n\r\n".encode() + data)
    await receiver.ended
    return receiver.first_token_time - started, bytes(receiver.received)


def metric(port: int, name: str) -> float:
    with urlopen(f"http://127.0.0.1:{port}/metrics") as answer:
        return float(re.findall(rf"^{re.escape(name)}{{[^}}]*}} (\S+)$", answer.read().decode(), re.MULTILINE)[0])


def chats(number: int) -> list[str]:
    return [
        f"Round {number}, question {place}: tell me a long story about the number {place}." for place in range(CHATS)
    ]


def offline_rate(llm: LLM, number: int, tokens: int, spec: str) -> float:
    params = SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True)
    started = time.perf_counter()
    llm.chat([[{"role": "user", "content": text}] for text in chats(number)], params, spec=spec)
    return CHATS * tokens / (time.perf_counter() - started)


def server_rate(port: int, number: int, tokens: int, spec: str) -> float:
    async def run() -> float:
        bodies = [
            {
                "messages": [{"role": "user", "content": text}],
                "max_tokens": tokens,
                "temperature": 0,
                "ignore_eos": True,
                "spec": spec,
            }
            for text in chats(number)
        ]
        started = time.perf_counter()
        answers = await asyncio.gather(*(stream(port, "/v1/chat/completions", body) for body in bodies))
        seconds = time.perf_counter() - started
        assert all(b"[DONE]" in received for _, received in answers), answers[0][1][-500:]
        return CHATS * tokens / seconds

    return asyncio.run(run())


def throughput(llm: LLM, port: int, arguments: argparse.Namespace, spec: str) -> None:
    ratios: list[float] = []
    for number in range(arguments.rounds + 1):
        # The same questions for both: they decide how much can be drafted. Two processes share nothing.
        offline = offline_rate(llm, number, arguments.tokens, spec)
        served = server_rate(port, number, arguments.tokens, spec)
        if number:  # the first round warms up
            ratios.append(served / offline)
            say(f"{spec} round {number}: offline {offline:.0f} tok/s, server {served:.0f} tok/s, {ratios[-1]:.3f}")
    ratio = statistics.median(ratios)
    verdict = "holds" if ratio >= LEAST_RATIO else "MISSED"
    print(f"{CHATS} chats, {spec}: server / offline = {ratio:.3f}   at least {LEAST_RATIO}: {verdict}")


def first_tokens(port: int, prompts: Prompts, rounds: int) -> None:
    def body(name: str, tokens: int) -> dict[str, Any]:
        return {"prompt": prompts.prompt(name, tokens), "max_tokens": 1, "temperature": 0, "spec": "off"}

    async def beside(number: int) -> tuple[float, float, float]:
        """The first token's time of the short prompt alone and beside the long one, and a step beside it."""
        alone_s, _ = await stream(port, "/v1/completions", body(f"alone {number}", SHORT_TOKENS))
        steps = metric(port, "foredraft:steps")
        long = asyncio.create_task(stream(port, "/v1/completions", body(f"long {number}", LONG_TOKENS)))
        await asyncio.sleep(LONG_HEAD_START_S)
        beside_s, _ = await stream(port, "/v1/completions", body(f"short {number}", SHORT_TOKENS))
        assert not long.done(), "the long prompt was computed before the short one came"
        long_s, _ = await long
        return alone_s, beside_s, long_s / (metric(port, "foredraft:steps") - steps)

    later: list[float] = []
    for number in range(rounds):
        alone_s, beside_s, step_s = asyncio.run(beside(number))
        later.append((beside_s - alone_s) / step_s)
        say(
            f"first token: alone {alone_s:.3f} s, beside {beside_s:.3f} s, a step {step_s:.3f} s: {later[-1]:.1f} later"
        )
    worst = max(later)
    verdict = "holds" if worst <= MOST_STEPS_LATER else "MISSED"
    print(f"short beside {LONG_TOKENS} tokens: {worst:.1f} steps later   at most {MOST_STEPS_LATER}: {verdict}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--dtype", default="int4")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=128)
    arguments = parser.parse_args()
    llm = LLM(arguments.model, dtype=arguments.dtype, threads=arguments.threads)
    with serving(arguments) as port:
        first_tokens(port, Prompts(llm.model_config.vocab_size), arguments.rounds)
        for spec in ("off", "auto"):
            throughput(llm, port, arguments, spec)


if __name__ == "__main__":
    main()
