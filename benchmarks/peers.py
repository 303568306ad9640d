"""Foredraft beside other engines: the same GGUF file, the same prompts as token ids, the same threads, interleaved.

Every engine is a process in an environment of its own (peer_engines.py) that loads once; only one works at a time.
Decoding is greedy, one prompt at a time, and nothing is remembered from one prompt to the next. A figure is the median
over the rounds of tokens after the first run of the model, all prompts of a kind together, per second. An engine or a
mode that does not run is listed with the reason, and so is one that is left out because it would take too long.

    make bench-peers [ARGS="--rounds 2 --leave-out transformers:lookup-2 --publish"]

`--publish` writes the figures to docs/results/ and renews docs/benchmarks.md and the table in README.md.
"""

from __future__ import annotations

import argparse
import json
import os
import select
import shlex
import statistics
import subprocess
import sys
import tempfile
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from page_sections import CHAT, COPY, KINDS, PLAIN, peers_body
from pages import write_pages
from published import PREFILL_TOKENS, Prompts, Record, describe_machine, new_record, publish, say, source_commit

from foredraft.reports.facts import cpu_name

HERE = Path(__file__).parent
ROOT = HERE.parent
TIMEOUT_S = 600  # for one answer, loading included
LOOKUPS = tuple(f"lookup-{drafts}" for drafts in (2, 5, 10))


@dataclass(frozen=True)
class Peer:
    """An engine and its decoding modes; the first is always plain."""

    name: str
    key: str  # in peer_engines.py
    modes: tuple[str, ...]


FOREDRAFT = Peer("Foredraft int4", "foredraft", (PLAIN, "suffix", "ngram", "auto"))
LLAMA = Peer("llama.cpp", "llama", (PLAIN, *LOOKUPS))
TRANSFORMERS = Peer("transformers", "transformers", (PLAIN, *LOOKUPS))
OPENVINO = Peer("OpenVINO GenAI", "openvino", (PLAIN, "lookup-5", "lookup-10"))
PEERS = (FOREDRAFT, LLAMA, TRANSFORMERS, OPENVINO)


@dataclass
class Results:
    """Everything measured. Keys are an engine's name and a mode."""

    about: dict[str, dict[str, str]] = field(default_factory=dict)
    failed: dict[tuple[str, str], str] = field(default_factory=dict)
    rates: dict[tuple[str, str, str], list[float]] = field(default_factory=dict)  # by kind too; tok/s, one per round
    prefill: dict[str, list[float]] = field(default_factory=dict)  # tok/s, one per round
    texts: dict[tuple[str, str], list[list[int]]] = field(default_factory=dict)  # all rounds, prompt after prompt

    def runs(self, peer: Peer, mode: str) -> bool:
        return (peer.name, mode) not in self.failed

    def fail(self, peer: Peer, modes: tuple[str, ...], reason: str) -> None:
        for mode in modes:
            self.failed.setdefault((peer.name, mode), reason)
        say(f"{peer.name}, {' '.join(modes)}: does not run: {reason}")

    def rate(self, peer: Peer, mode: str, kind: str) -> float | None:
        samples = self.rates.get((peer.name, mode, kind))
        return statistics.median(samples) if samples and self.runs(peer, mode) else None

    def prefill_rate(self, peer: Peer) -> float | None:
        samples = self.prefill.get(peer.name)
        return statistics.median(samples) if samples and self.runs(peer, PLAIN) else None

    def best_mode(self, peer: Peer, kind: str) -> str:
        """The engine's fastest mode, plain decoding included; plain must run."""
        return max(peer.modes, key=lambda mode: self.rate(peer, mode, kind) or 0.0)

    def differences(self, peer: Peer, mode: str) -> list[int | None]:
        """For every text where it first differs from the engine's own plain text, counted from 1."""
        pairs = zip(self.texts[peer.name, PLAIN], self.texts[peer.name, mode], strict=True)
        return [_first_difference(plain, other) for plain, other in pairs]


def _first_difference(one: list[int], other: list[int]) -> int | None:
    if one == other:
        return None
    places = range(min(len(one), len(other)))
    return next((place + 1 for place in places if one[place] != other[place]), len(places) + 1)


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
        command = [python, HERE / "peer_engines.py", peer.key, "--model", model, "--threads", str(threads)]
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
    from foredraft.bench.suite import built_in
    from foredraft.models.catalog import open_checkpoint

    checkpoint = open_checkpoint(model)
    tokenizer = checkpoint.tokenizer()
    # Words of the prompts that the default model does copy.
    copied = ("class Shelf", "readThermometer", "oak table", "CREATE TABLE", "north pier", "load_routes")
    texts = {
        COPY: [next(q.text for q in built_in() if words in q.text) for words in copied],
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
    machine = describe_machine(cpu_name(), options.threads)
    record = peers_record(results, settings, machine, source_commit() or "unknown")
    print(peers_body(record))
    if options.publish:
        publish(record, "peers", model.stem, cpu_name())
        write_pages()


def peers_record(results: Results, settings: dict[str, Any], machine: Record, commit: str) -> Record:
    """What is published of a comparison: medians, ratios, and which texts differ."""
    return new_record("peers", machine, commit, _versions(results), _command(settings)) | {
        "model": settings["file"],
        "prompts": settings["prompts"],
        "rounds": settings["rounds"],
        "max_tokens": settings["max_tokens"],
        "prefill_tokens": PREFILL_TOKENS,
        "rows": [_row(results, peer, mode) for peer in PEERS for mode in peer.modes],
        "to_llama_cpp": _to_llama(results),
        "failed": _failures(results),
    }


def _row(results: Results, peer: Peer, mode: str) -> dict[str, Any]:
    difference = None if mode == PLAIN or not results.runs(peer, mode) else _difference(results, peer, mode)
    row: dict[str, Any] = {"engine": peer.name, "mode": mode}
    for kind in KINDS:
        rate, plain = results.rate(peer, mode, kind), results.rate(peer, PLAIN, kind)
        row[kind] = {
            "tokens_per_s": _rounded(rate, 1),
            "ratio_to_plain": None if mode == PLAIN else _ratio(rate, plain),
        }
    return row | {
        "same_text": None if mode == PLAIN or not results.runs(peer, mode) else difference is None,
        "difference": difference,
        "prefill_tokens_per_s": _rounded(results.prefill_rate(peer), 1) if mode == PLAIN else None,
    }


def _difference(results: Results, peer: Peer, mode: str) -> str | None:
    differences = results.differences(peer, mode)
    places = [place for place in differences if place is not None]
    if not places:
        return None
    return f"{len(places)} of {len(differences)} texts differ, the earliest at token {min(places)}"


def _to_llama(results: Results) -> dict[str, Any] | None:
    if not (results.runs(FOREDRAFT, PLAIN) and results.runs(LLAMA, PLAIN)):
        return None
    plain = {kind: _ratio(results.rate(FOREDRAFT, PLAIN, kind), results.rate(LLAMA, PLAIN, kind)) for kind in KINDS}
    fastest: dict[str, dict[str, Any]] = {}
    for kind in KINDS:
        best = results.best_mode(LLAMA, kind)
        rate = results.rate(LLAMA, best, kind)
        ours = {mode: _ratio(results.rate(FOREDRAFT, mode, kind), rate) for mode in FOREDRAFT.modes[1:]}
        fastest[kind] = {"mode": best, **ours}
    prefill = _ratio(results.prefill_rate(FOREDRAFT), results.prefill_rate(LLAMA))
    return {"plain": {**plain, "prefill": prefill}, "fastest": fastest}


def _failures(results: Results) -> list[dict[str, Any]]:
    reasons: dict[tuple[str, str], list[str]] = {}
    for (name, mode), reason in results.failed.items():
        reasons.setdefault((name, reason), []).append(mode)
    return [{"engine": name, "modes": modes, "reason": reason} for (name, reason), modes in reasons.items()]


def _versions(results: Results) -> dict[str, str]:
    return {
        name: about["version"] + (f" ({about['settings']})" if "settings" in about else "")
        for name, about in results.about.items()
    }


def _command(settings: dict[str, Any]) -> str:
    named = {"model": Path(settings["model"]).name, "prompts": settings["prompts"][CHAT]}
    options = named | {
        "threads": settings["threads"],
        "rounds": settings["rounds"],
        "max-tokens": settings["max_tokens"],
    }
    arguments = " ".join(f"--{name} {value}" for name, value in options.items())
    arguments += "".join(f" --leave-out {shlex.quote(name)}" for name in settings["leave_out"])
    return f'make bench-peers ARGS="{arguments}"'


def _rounded(value: float | None, digits: int) -> float | None:
    return None if value is None else round(value, digits)


def _ratio(rate: float | None, base: float | None) -> float | None:
    return None if rate is None or base is None else round(rate / base, 2)


if __name__ == "__main__":
    main()
