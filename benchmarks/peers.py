"""Foredraft beside other engines: the same GGUF file, the same prompts as token ids, the same threads, interleaved.

Every engine is a process in an environment of its own (peer_*.py) that loads once; while one works, the others wait.
Decoding is greedy, one prompt at a time, and nothing is remembered from one prompt to the next. A figure is the median
over the rounds of tokens after the first run of the model, all prompts of a kind together, per second. An engine or a
mode that does not run is listed with the reason, and so is one that is left out because it would take too long.

    make bench-peers [ARGS="--out results.json --rounds 2 --leave-out transformers:lookup-2 --publish"]

`--publish` writes the figures to docs/results/ and renews docs/benchmarks.md and the table in README.md.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import select
import subprocess
import sys
import tempfile
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from common import PREFILL_TOKENS, Prompts, say
from pages import write_pages
from peer_report import body, peers_record
from peer_results import CHAT, COPY, FOREDRAFT, LLAMA, OPENVINO, PEERS, PLAIN, TRANSFORMERS, Peer, Results
from published import publish

from foredraft.reports.facts import cpu_name

HERE = Path(__file__).parent
ROOT = HERE.parent
TIMEOUT_S = 600  # for one answer, loading included


class PeerError(Exception):
    """An engine did not do its task; the message is for the report."""


@dataclass
class Child:
    """The process of one engine. What it prints apart from answers is kept for the reason if it dies."""

    peer: Peer
    process: subprocess.Popen[str]
    log: IO[str]
    about: dict[str, str] = field(default_factory=dict)

    @classmethod
    def start(cls, peer: Peer, python: Path, model: Path, threads: int) -> Child:
        if not python.exists():
            raise PeerError("its environment is not there; `make bench-peers` makes it")
        log = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")  # noqa: SIM115
        command = [python, HERE / peer.script, "--model", model, "--threads", str(threads)]
        environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True, env=environment
        )
        child = cls(peer, process, log)
        child.about = child.answer()
        return child

    def request(self, prompt: list[int], max_tokens: int, stop: list[int], mode: str) -> dict[str, Any]:
        request = {"prompt": prompt, "max_tokens": max_tokens, "stop": stop, "mode": mode}
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(json.dumps(request) + "\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            pass  # the answer will tell
        return self.answer()

    def answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        ready, _, _ = select.select([self.process.stdout], [], [], TIMEOUT_S)
        if not ready:
            self.process.kill()
        line = self.process.stdout.readline()
        if not ready or not line:
            raise PeerError(f"no answer within {TIMEOUT_S} s" if not ready else self._last_words())
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise PeerError(answer["error"])
        return answer

    def _last_words(self) -> str:
        status = self.process.wait()
        self.log.seek(0)
        lines = [line.strip() for line in self.log if line.strip()]
        return f"its process ended with status {status}" + (f": {lines[-1]}" if lines else "")

    def close(self) -> None:
        assert self.process.stdin is not None
        with suppress(BrokenPipeError):  # it may have died before it read the last request
            self.process.stdin.close()
        try:
            self.process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self.process.kill()
        self.log.close()


@dataclass(frozen=True)
class Task:
    """What all engines are to write."""

    prompts: dict[str, list[list[int]]]  # kind -> token ids
    vocab_size: int
    stop: list[int]
    max_tokens: int


def make_task(model: Path, max_tokens: int, prompts: int) -> Task:
    from foredraft.bench.code_samples import FERRY, ORDERS, SHELF, THERMOMETER
    from foredraft.bench.passages import TO_REPEAT
    from foredraft.bench.suite import built_in
    from foredraft.models.catalog import open_checkpoint

    checkpoint = open_checkpoint(model)
    tokenizer = checkpoint.tokenizer()
    copied = (SHELF, THERMOMETER, TO_REPEAT[1], ORDERS, TO_REPEAT[0], FERRY)  # what the default model does copy
    texts = {
        COPY: [next(q.text for q in built_in() if text in q.text) for text in copied],
        CHAT: [q.text for q in built_in() if q.category == "chat"][::-1],
    }
    return Task(
        {
            kind: [tokenizer.encode_chat([{"role": "user", "content": text}]) for text in several[:prompts]]
            for kind, several in texts.items()
        },
        checkpoint.config.vocab_size,
        list(tokenizer.eos_token_ids),
        max_tokens,
    )


class Measurement:
    """Queries all engines in turn, and goes on without those that fail."""

    def __init__(self, task: Task, children: list[Child], results: Results) -> None:
        self.task, self.children, self.results = task, children, results
        self.random = Prompts(task.vocab_size)

    def warm_up(self) -> None:
        for child in self.children:
            for mode in child.peer.modes:
                self._query(child, mode, self.random.prompt("warm-up", 64), 8)

    def round(self, number: int) -> None:
        totals: dict[tuple[str, str, str], list[float]] = {}
        prefill_prompt = self.random.prompt(f"prefill {number}", PREFILL_TOKENS)
        for child in self.children:
            if answer := self._query(child, PLAIN, prefill_prompt, 1, stop=[]):
                rate = PREFILL_TOKENS / answer["prefill_s"]
                self.results.prefill.setdefault(child.peer.name, []).append(rate)
        turn = number
        for kind, prompts in self.task.prompts.items():
            for prompt in prompts:
                first = turn % max(1, len(self.children))
                for child in (*self.children[first:], *self.children[:first]):
                    for mode in child.peer.modes:
                        if answer := self._query(child, mode, prompt, self.task.max_tokens):
                            total = totals.setdefault((child.peer.name, mode, kind), [0.0, 0.0])
                            total[0] += len(answer["token_ids"]) - answer["first_tokens"]
                            total[1] += answer["decode_s"]
                            self.results.texts.setdefault((child.peer.name, mode), []).append(answer["token_ids"])
                turn += 1
        for key, (tokens, seconds) in totals.items():
            self.results.rates.setdefault(key, []).append(tokens / seconds)

    def _query(
        self, child: Child, mode: str, prompt: list[int], max_tokens: int, stop: list[int] | None = None
    ) -> dict[str, Any] | None:
        if not self.results.runs(child.peer, mode):
            return None
        try:
            return child.request(prompt, max_tokens, self.task.stop if stop is None else stop, mode)
        except PeerError as error:
            dead = child.process.poll() is not None
            self.results.fail(child.peer, child.peer.modes if dead or mode == PLAIN else (mode,), str(error))
            return None


def measure_all(
    task: Task, pythons: dict[Peer, Path], model: Path, threads: int, rounds: int, left_out: set[tuple[str, str]]
) -> Results:
    results, children = Results(failed=dict.fromkeys(sorted(left_out), "it was left out (`--leave-out`)")), []
    try:
        for peer, python in pythons.items():
            if not results.runs(peer, PLAIN):
                continue
            say(f"{peer.name}: loading")
            try:
                children.append(Child.start(peer, python, model, threads))
                results.about[peer.name] = children[-1].about
            except PeerError as error:
                results.fail(peer, peer.modes, _install_error(python) or str(error))
        measurement = Measurement(task, children, results)
        measurement.warm_up()
        for number in range(rounds):
            say(f"round {number + 1} of {rounds}")
            measurement.round(number)
    finally:
        for child in children:
            child.close()
    return results


def _install_error(python: Path) -> str | None:
    """What pip said, if the environment was made but the engine could not be installed in it."""
    environment = python.absolute().parent.parent
    log = environment / "install.log"
    if not log.exists() or (environment / ".installed").exists():
        return None
    errors = [line.strip() for line in log.read_text(errors="replace").splitlines() if "ERROR" in line]
    return f"it could not be installed: {errors[-1]}" if errors else None


def _left_out(text: str) -> set[tuple[str, str]]:
    """The modes that ENGINE or ENGINE:MODE names; all of them for the engine's name or for its plain mode, which the
    others are compared with."""
    name, _, mode = text.partition(":")
    peer = next((peer for peer in PEERS if peer.name == name), None)
    if peer is None:
        raise ValueError(f"there is no engine {name!r}; there are {[peer.name for peer in PEERS]}")
    if mode and mode not in peer.modes:
        raise ValueError(f"{name} has no mode {mode!r}; it has {list(peer.modes)}")
    return {(name, mode)} if mode and mode != PLAIN else {(name, each) for each in peer.modes}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2-135m", help="a catalogue name or a GGUF file")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--prompts", type=int, default=4, help="of each kind, at most 6")
    parser.add_argument("--llama-python", type=Path, default=ROOT / ".peers/llama/bin/python")
    parser.add_argument("--openvino-python", type=Path, default=ROOT / ".peers/openvino/bin/python")
    parser.add_argument("--leave-out", action="append", default=[], metavar="ENGINE[:MODE]", help="may be repeated")
    parser.add_argument("--out", type=Path, help="write all figures and texts to this file")
    parser.add_argument("--publish", action="store_true", help="write docs/results/ and renew the pages")
    options = parser.parse_args()

    from foredraft.models.catalog import resolve

    model = resolve(options.model)
    if model.suffix != ".gguf":
        parser.error("--model must be a GGUF file, which all engines read")
    own = Path(sys.executable)
    pythons = {FOREDRAFT: own, LLAMA: options.llama_python, TRANSFORMERS: own, OPENVINO: options.openvino_python}
    task = make_task(model, options.max_tokens, options.prompts)
    try:
        left_out = set().union(*map(_left_out, options.leave_out))
    except ValueError as error:
        parser.error(str(error))
    results = measure_all(task, pythons, model, options.threads, options.rounds, left_out)
    settings = {name: getattr(options, name) for name in ("model", "threads", "rounds", "max_tokens", "leave_out")}
    settings |= {"file": model.name, "prompts": {kind: len(prompts) for kind, prompts in task.prompts.items()}}
    record = peers_record(results, settings, cpu_name())
    print(body(record))
    if options.out:
        options.out.write_text(json.dumps(_as_json(results, settings), indent=1) + "\n", encoding="utf-8")
    if options.publish:
        publish(record, f"peers {model.stem} {cpu_name()}")
        write_pages()


def _as_json(results: Results, settings: dict[str, Any]) -> dict[str, Any]:
    return {
        "machine": {"cpu": cpu_name(), "architecture": platform.machine(), "cores": os.cpu_count()},
        "settings": settings,
        "engines": results.about,
        "prefill_tokens_per_s": results.prefill,
        **{
            name: {", ".join(key): value for key, value in values.items()}
            for name, values in (
                ("failed", results.failed),
                ("decode_tokens_per_s", results.rates),
                ("token_ids", results.texts),
            )
        },
    }


if __name__ == "__main__":
    main()
