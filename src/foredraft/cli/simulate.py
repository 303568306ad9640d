"""`foredraft simulate`: what machines that were measured would do as a fleet, before they are bought."""

from __future__ import annotations

import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from foredraft.cli import options
from foredraft.cli.output import make_folder, say, say_written, tell
from foredraft.cli.progress import MEASURING, CountingProgress
from foredraft.errors import InvalidParameter
from foredraft.reports.answer import Answer, Table

if TYPE_CHECKING:
    from foredraft.simulate.machine import Machine
    from foredraft.simulate.study import Study, TrafficAnswer
    from foredraft.simulate.traffic import Traffic

DEFAULT_SPECS = ("suffix",)
STEP_REQUESTS = 300  # where --requests is not given: the step mode takes milliseconds for each
EVENT_REQUESTS = 3000


@options.opens_model("dtype", "threads", "head")
def simulate(
    opening: options.Opening,
    poisson: Annotated[
        float | None, typer.Option(help="Requests per second, arriving independently of each other.")
    ] = None,
    trace: Annotated[
        Path | None,
        typer.Option(help="Requests from a file: JSON lines with arrival_s, prompt_tokens, output_tokens."),
    ] = None,
    replicas: Annotated[int, typer.Option(min=1, max=4096, help="Machines of the fleet.")] = 1,
    slo: Annotated[str | None, typer.Option(help="When an answer is good: ttft=1,itl=0.1, in seconds.")] = None,
    attain: Annotated[float, typer.Option(min=0, max=1, help="The share of requests that must be good.")] = 0.99,
    mixes: Annotated[
        list[str] | None, typer.Option("--mix", help="chat, code or documents; may be repeated. Without it: all.")
    ] = None,
    specs: Annotated[
        list[str] | None,
        typer.Option("--spec", help="A proposer beside off and auto; may be repeated. Without it: suffix."),
    ] = None,
    assume: Annotated[
        list[str] | None, typer.Option(help="A proposer to be trained: eagle:alpha=0.7,cost=0.1,k=4.")
    ] = None,
    source: Annotated[
        Path | None, typer.Option("--from", help="A results.json of bench, or a machine of --save; else measure here.")
    ] = None,
    save: Annotated[Path | None, typer.Option(help="Write what was measured here to this file.")] = None,
    max_num_seqs: Annotated[int, typer.Option(help="Sequences that a machine runs at once.")] = 64,
    kv_cache_tokens: Annotated[int | None, typer.Option(help="Tokens of its KV cache.")] = None,
    requests: Annotated[
        int | None,
        typer.Option(
            min=10,
            help=f"Of every simulated point; else {EVENT_REQUESTS}, or {STEP_REQUESTS} if step_mode.",
        ),
    ] = None,
    step_mode: Annotated[
        bool,
        typer.Option("--step-mode", help="Step by step with the engine's own scheduler and controller; one rate only."),
    ] = False,
    seed: Annotated[int, typer.Option(min=0, help="Of arrivals, lengths and acceptance.")] = 0,
    out: Annotated[Path | None, typer.Option(help="Write report.html and plots into this folder.")] = None,
    as_json: options.Json = False,
) -> None:
    """Simulate a fleet: goodput of off, fixed proposers and auto, where fixed ones flip, and the machines needed."""
    from foredraft.config import EngineConfig
    from foredraft.simulate.fleet import Slo
    from foredraft.simulate.study import Study

    if (poisson is None) == (trace is None):
        raise InvalidParameter("Give either --poisson with requests per second, or --trace with a file of requests.")
    objective = Slo() if slo is None else Slo.parse(slo)
    traffics, qps = _traffics(poisson, trace, mixes)
    if source is not None and (specs or save):
        raise InvalidParameter(
            "--from has its proposers in the file, and they are kept: give it without --spec and --save."
        )
    if out is not None:
        if step_mode:
            raise InvalidParameter(
                "--out needs many rates, for which the step mode takes too long; give it without --step-mode."
            )
        make_folder(out)
    machine = _machine(source, save, opening(spec="off", prefix_caching=False), specs or DEFAULT_SPECS, assume or [])
    engine = EngineConfig(max_num_seqs=max_num_seqs, kv_cache_tokens=kv_cache_tokens, prefix_caching=False)
    count = requests or (STEP_REQUESTS if step_mode else EVENT_REQUESTS)
    study = Study(machine, engine, objective, attain, count, seed)
    settings = [*machine.proposers, *(["auto"] if machine.proposers else [])]
    started = time.perf_counter()
    if step_mode:
        answer = _one_rate(study, traffics, settings, replicas, qps)
    else:
        answer = _all_rates(study, traffics, settings, replicas, qps, out)
    took = f"Simulated {study.num_simulated:,} requests in {time.perf_counter() - started:.1f} s"
    say(f"{took}, {'step by step' if step_mode else 'from event to event'}.")
    tell(answer, as_json)


def _traffics(poisson: float | None, trace: Path | None, mixes: list[str] | None) -> tuple[list[Traffic], float]:
    from foredraft.simulate.traffic import MIXES, read_trace

    if trace is not None:
        if mixes:
            raise InvalidParameter(
                "--mix is for --poisson: a trace has its own lengths, and kinds where it names them."
            )
        found = read_trace(trace)
        return [found], found.qps
    assert poisson is not None
    if not 0 < poisson < 1e6:
        raise InvalidParameter(f"--poisson {poisson} must be requests per second above 0, and below a million.")
    if unknown := [name for name in mixes or () if name not in MIXES]:
        raise InvalidParameter(f"--mix {unknown[0]} is not known; there are {', '.join(MIXES)}.")
    return [MIXES[name] for name in dict.fromkeys(mixes or MIXES)], poisson


def _machine(
    source: Path | None, save: Path | None, opening: options.ModelOptions, specs: Any, assume: list[str]
) -> Machine:
    from foredraft.simulate.machine import assumed
    from foredraft.simulate.machine_file import read_machine, write_machine

    if source is not None:
        machine = read_machine(source)
    else:
        from foredraft.simulate.measure import measured_machine

        say("Measuring this machine; nothing else should run. This takes a minute or two.")
        with opening.open() as llm, CountingProgress(MEASURING) as progress:
            machine = measured_machine(llm, opening.model, specs, progress.to)
        if save is not None:
            write_machine(machine, save)
    for text in assume:
        machine = machine.with_proposer(*assumed(text, machine.run_s(1, 0)))
    return machine


def _one_rate(study: Study, traffics: list[Traffic], settings: list[str], replicas: int, qps: float) -> Answer:
    """The step mode: what users see at the rate that was asked about."""
    from foredraft.bench.measure import OFF
    from foredraft.simulate.report import COLUMNS, outcome_row, premise

    rows: list[tuple[str, ...]] = []
    records: list[dict[str, Any]] = []
    with CountingProgress("Simulating", len(traffics) * (1 + len(settings))) as progress:
        for traffic in traffics:
            for spec in (OFF, *settings):
                outcome = study.outcome(traffic, spec, replicas, qps, step_mode=True)
                rows.append(outcome_row(traffic.name, spec, outcome))
                records.append({"traffic": traffic.name, "spec": spec, **asdict(outcome)})
                progress.tick()
    record = {**_premise_record(study, replicas, qps), "outcomes": records}
    return Answer(record, premise(study, replicas), [Table(COLUMNS, rows)], [])


def _all_rates(
    study: Study, traffics: list[Traffic], settings: list[str], replicas: int, qps: float, out: Path | None
) -> Answer:
    """The event mode: the rate that was asked about, the sweep, and the machines needed."""
    from foredraft.simulate.report import FLEET_COLUMNS, fleet_row, premise, sentences
    from foredraft.simulate.study import answer

    with CountingProgress("Simulating", len(traffics) * (1 + len(settings))) as progress:
        answers = [answer(study, traffic, settings, replicas, qps, progress.tick) for traffic in traffics]
    if out is not None:
        _write(answers, study, replicas, out)
    rows = [fleet_row(each, setting) for each in answers for setting in each.settings]
    told = [" ".join(sentences(each)) for each in answers]
    record = {
        **_premise_record(study, replicas, qps),
        "answers": [_answer_record(each) for each in answers],
        "recommendation": told,
    }
    return Answer(record, premise(study, replicas), [Table(FLEET_COLUMNS, rows)], told)


def _write(answers: list[TrafficAnswer], study: Study, replicas: int, out: Path) -> None:
    from foredraft.reports.facts import describe_versions
    from foredraft.simulate.report import write_report

    facts = {
        "command": " ".join(["foredraft", *sys.argv[1:]]),
        "requests of a point": study.count,
        **describe_versions(),
    }
    try:
        drawn = write_report(answers, study, replicas, facts, out)
    except OSError as error:
        raise InvalidParameter(f"The report cannot be written to {out}: {error.strerror}.") from error
    say_written("report.html", out, drawn)


def _answer_record(answer: TrafficAnswer) -> dict[str, Any]:
    settings = [{**asdict(setting), "flip_qps": setting.flip_qps} for setting in answer.settings]
    return {"traffic": answer.traffic, "rates": answer.rates, "settings": settings}


def _premise_record(study: Study, replicas: int, qps: float) -> dict[str, Any]:
    return {"machine": study.machine.name, "qps": qps, "replicas": replicas, "attain": study.attain}
