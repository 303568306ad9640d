"""Measures everything that is published of this machine: one file in docs/results/ for each model, then the pages.

    make figures-machine [ARGS="--suite questions.jsonl --model smollm2-135m --model Coder-1.5B=coder.gguf"]

    plain       plain decoding, a prompt, runs of several rows and memory, beside llama.cpp and the memory's bandwidth
    exactness   the same model with `exact=True` and without: time of a token alone, tokens of many requests at once
    auto        `off`, `auto` and fixed settings by kind of prompt
    batch       the same with several requests at once, and where speculation stops to pay
    acceptance  tokens per run of the model's head

`--part` chooses among them. A file is written after each part. A second call measures the chosen parts that are missing
or of another commit; other parts stay, with the commit that they are of, while the version is the same. Delete a file
to measure it anew. `--minutes` is for each model: prompts are taken as they fit into it.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import time
from pathlib import Path
from typing import NamedTuple

import plain
import torch
from machine_parts import AUTO, PARTS, Subject, parts_of
from pages import write_pages
from published import ROOT, Record, describe_machine, new_record, publish, result_file, say, source_commit

import foredraft
from foredraft.backends.choose import choose_device, usable_cores
from foredraft.bench.suite import BUILT_IN_NAME, built_in, load_suite
from foredraft.models.catalog import DEFAULT_MODEL, resolve
from foredraft.proposers.registry import parse_spec
from foredraft.reports.facts import cpu_name, describe_versions, file_name
from foredraft.reports.prompts import Question

DATA = ROOT / "benchmarks" / "data"
OWN_SUITES = ("functions", "maths")  # those of them that are in DATA
SUITE = "suite"


class Model(NamedTuple):
    """What is opened, and the name that its figures are shown with."""

    name: str
    place: str

    @classmethod
    def parse(cls, text: str) -> Model:
        """`NAME=PLACE`, or a place alone."""
        name, sign, place = text.partition("=")
        return cls(name, place) if sign else cls(file_name(text), text)


def suites(given: str, limit: int | None) -> dict[str, list[Question]]:
    """The suite of many kinds, and those that come with the benchmarks."""
    own = {name: str(DATA / f"{name}.jsonl") for name in OWN_SUITES if (DATA / f"{name}.jsonl").exists()}
    return {name: load_suite(file, limit) for name, file in {SUITE: given, **own}.items()}


def prompts_at_once(own: dict[str, list[Question]], on_gpu: bool) -> list[Question]:
    """Of one kind, so that those of any kind decode at once. A CPU has short ones alone: it reads prompts slowly."""
    names = (SUITE, *OWN_SUITES) if on_gpu else OWN_SUITES
    questions = [each for name in names if name in own for each in own[name]] + built_in()
    return [Question("mixed", question.text) for question in questions]


def command(arguments: list[str]) -> str:
    """How this was called, without where files lie."""
    words = ["=".join(map(file_name, word.split("=", 1))) for word in arguments]
    options = shlex.join(words).replace("'", '"')
    return f"make figures-machine ARGS='{options}'" if words else "make figures-machine"


def measure_model(subject: Subject, record: Record, file: Path, chosen: list[str]) -> None:
    """Measure the chosen parts that the file does not have of this commit, and write it after each."""
    known = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    if known.get("version") == record["version"]:
        _keep(known, record, chosen)
    missing = [name for name in parts_of(subject) if name in chosen and name not in record]
    started = time.monotonic()
    for place, name in enumerate(missing):
        left = max(0.0, subject.seconds - (time.monotonic() - started))
        say(f"{record['model']['name']} {record['model']['dtype']}: {name}; {left / 60:.1f} minutes left")
        record[name] = PARTS[name].measure(subject, left * PARTS[name].share / _share(missing[place:]))
        publish(record, file.stem, folder=file.parent)


def _keep(known: Record, record: Record, chosen: list[str]) -> None:
    """What is known of this commit, and of earlier ones what is not to be measured now."""
    commits = {name: known.get("earlier", {}).get(name, known["commit"]) for name in PARTS if name in known}
    kept = [name for name, commit in commits.items() if commit == record["commit"] or name not in chosen]
    record |= {name: known[name] for name in kept}
    earlier = {name: commits[name] for name in kept if commits[name] != record["commit"]}
    if earlier:
        record["earlier"] = earlier
    if kept:
        record["command"] = "\n".join(dict.fromkeys([*known["command"].split("\n"), record["command"]]))


def _share(parts: list[str]) -> float:
    return sum(PARTS[name].share for name in parts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", action="append", metavar="[NAME=]PLACE", help="may be repeated")
    parser.add_argument("--part", action="append", choices=tuple(PARTS), help="may be repeated; all if not given")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", help="int4 on a CPU and bfloat16 on a GPU if not given")
    parser.add_argument("--threads", type=int, help="all usable cores if not given")
    parser.add_argument("--head", default="auto", help="auto, none, or where the head lies")
    parser.add_argument("--spec", action="append", type=checked_spec, help="a fixed setting; may be repeated")
    parser.add_argument("--suite", default=BUILT_IN_NAME, help="a file in Spec-Bench's format")
    parser.add_argument("--limit", type=int, help="at most so many prompts of each suite")
    parser.add_argument("--max-tokens", type=int, help="64 on a CPU and 128 on a GPU if not given")
    parser.add_argument("--minutes", type=float, help="of each model: 18 on a CPU and 6 on a GPU if not given")
    parser.add_argument("--name", help="of this machine; as it names itself if not given")
    parser.add_argument("--llama-bench", type=Path, help="a llama-bench that was built for this machine")
    parser.add_argument("--commit", help="where the code is no git repository")
    options = parser.parse_args()
    commit = source_commit() or options.commit
    if commit is None:
        parser.error("this is no git repository: name the commit that is measured with --commit")
    device = choose_device(options.device)
    on_gpu = device.type == "cuda"
    threads = options.threads or usable_cores()
    name = options.name or (torch.cuda.get_device_name(device) if on_gpu else cpu_name())
    machine = describe_machine(name, threads) | {"device": device.type}
    dtype = options.dtype or ("bfloat16" if on_gpu else "int4")
    questions = suites(options.suite, options.limit)
    for model in map(Model.parse, options.model or [f"SmolLM2-135M={DEFAULT_MODEL}"]):
        place = resolve(model.place)
        settings = plain.Settings(place, dtype, threads, device=str(device))
        subject = Subject(
            settings=settings,
            head=None if options.head == "none" else options.head,
            fixed=tuple(options.spec or ()),
            suites=questions,
            at_once=prompts_at_once(questions, on_gpu),
            batches=(1, 8, 32, 128) if on_gpu else (1, 8, 32),
            max_tokens=options.max_tokens or (128 if on_gpu else 64),
            llama_bench=options.llama_bench,
            seconds=60 * (options.minutes or (6 if on_gpu else 18)),
        )
        record = new_record("machine", machine, commit, describe_versions(), command(sys.argv[1:]))
        record["versions"]["foredraft"] = foredraft.__version__
        record["model"] = {"name": model.name, "file": place.name, "dtype": dtype}
        record["suite"] = file_name(options.suite)
        file = result_file(name, model.name, dtype, *([] if on_gpu else [f"{threads} threads"]))
        measure_model(subject, record, file, options.part or list(PARTS))
    write_pages()


def checked_spec(text: str) -> str:
    if parse_spec(text).adaptive:
        raise argparse.ArgumentTypeError(f"{text} is not fixed; {AUTO} and off are measured in any case")
    return text


if __name__ == "__main__":
    main()
