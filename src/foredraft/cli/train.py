"""`foredraft train`: trains proposers for a model on text that the model itself writes."""

from __future__ import annotations

import time
from dataclasses import asdict
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from foredraft.cli import options
from foredraft.cli.output import print_json, say
from foredraft.cli.progress import loading_progress
from foredraft.errors import InvalidParameter
from foredraft.heads.kinds import trained_kind
from foredraft.models.catalog import DEFAULT_MODEL, check_name

if TYPE_CHECKING:
    from foredraft.train.evaluate import Evaluation
    from foredraft.train.loop import Report

TEXT = "text"


def train(
    kinds: Annotated[
        list[str],
        typer.Argument(
            help="eagle, medusa, dflash, mtp or draft; several are trained side by side. "
            "dflash:layers=3,correction=markov has options. `text` writes the training text only."
        ),
    ],
    out: Annotated[Path, typer.Option(help="The folder of the result; training goes on where it stopped.")],
    model: options.Model = DEFAULT_MODEL,
    prompts: Annotated[list[Path] | None, typer.Option(help="Prompts to answer, JSON lines; may be repeated.")] = None,
    exclude: Annotated[
        list[Path] | None, typer.Option(help="Prompts of evaluations, JSON lines: never trained on.")
    ] = None,
    text: Annotated[Path | None, typer.Option(help="The folder of the training text; OUT/text when not given.")] = None,
    tokens: Annotated[
        int | None,
        typer.Option(min=1, help="Answer tokens of the training text; more are written if need be."),
    ] = None,
    minutes: Annotated[
        float | None, typer.Option(help="The time of text and training, earlier training included; 10 without --steps.")
    ] = None,
    steps: Annotated[int | None, typer.Option(min=1, help="Train so many steps, earlier runs included.")] = None,
    batch_tokens: Annotated[
        int | None, typer.Option(min=64, help="Tokens of a step; 32768 on a GPU, 2048 on a CPU.")
    ] = None,
    vocab: Annotated[int, typer.Option(min=1, help="Tokens of the draft vocabulary.")] = 16_384,
    rate: Annotated[
        float, typer.Option(help="Learning rates in units of the usual ones; tiny models take more.")
    ] = 1.0,
    max_tokens: Annotated[int, typer.Option(min=1, help="The longest answer in the text.")] = 256,
    text_batch: Annotated[
        int | None, typer.Option(min=1, help="Sequences of text at once; 256 on a GPU, 32 on a CPU.")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Of the text, the order of batches and the weights.")] = 0,
    dtype: options.Dtype = "auto",
    device: options.Device = "auto",
    threads: options.Threads = None,
    as_json: options.Json = False,
) -> None:
    """Train proposers for a model on text that the model itself writes."""
    only_text = kinds == [TEXT]
    check_name(model)
    for kind in () if only_text else kinds:
        trained_kind(kind.partition(":")[0])
    if minutes is not None and not 0 < minutes < float("inf"):
        raise InvalidParameter(f"--minutes {minutes} must be a number above 0.")
    if not 0 < rate < float("inf"):
        raise InvalidParameter(f"--rate {rate} must be a number above 0.")
    if minutes is None and steps is None and not only_text:
        minutes = 10.0
    with loading_progress():  # torch takes seconds
        from foredraft.train.kinds import parse_kind
        from foredraft.train.run import TEXT_SHARE, TrainingRun, TrainOptions
        from foredraft.train.text import TextPlan

    parsed = () if only_text else tuple(parse_kind(kind) for kind in kinds)
    if len({kind.folder for kind in parsed}) < len(parsed):
        raise InvalidParameter("A kind is named twice; every kind can be trained once in a run.")
    plan = TextPlan(tuple(prompts or ()), tuple(exclude or ()), seed, max_tokens=max_tokens)
    run = TrainingRun(
        TrainOptions(
            model=model,
            out=out,
            kinds=parsed,
            text=text,
            plan=plan,
            tokens=tokens,
            steps=steps,
            minutes=minutes,
            batch_tokens=batch_tokens,
            text_batch=text_batch,
            vocab=vocab,
            rate=rate,
            seed=seed,
            device=device,
            dtype=dtype,
            threads=threads,
        ),
        loading_progress,
    )

    say(f"text: opening {model}")
    started = time.monotonic()
    limit_s = None if minutes is None else 60 * minutes * (1.0 if only_text else TEXT_SHARE)
    have = run.write_text(limit_s, _TextProgress(run.tokens, limit_s))
    if only_text:
        if as_json:
            print_json({"text": str(run.options.text_folder), "answer_tokens": have})
        else:
            print(f"{have:,} answer tokens in {run.options.text_folder}")
        return

    def report(line: Report) -> None:
        if as_json:
            print_json(asdict(line))
        else:
            say(_progress(line))

    say(f"training: opening {model} with {have:,} answer tokens of text")
    for name, evaluation in run.train(report, spent_s=time.monotonic() - started).items():
        folder = run.options.folder_of(next(kind for kind in parsed if kind.folder == name))
        if as_json:
            print_json({"kind": name, "folder": str(folder), **asdict(evaluation)})
        else:
            print(f"{name}: {_measured(evaluation)}; in {folder}")


class _TextProgress:
    """Says how much text there is, how fast it grows and how long it will take: often at first, then more rarely."""

    def __init__(self, wanted: int, limit_s: float | None) -> None:
        self._wanted, self._limit_s = wanted, inf if limit_s is None else limit_s
        self._first: int | None = None  # tokens that were there before
        self._next_s = 1.0

    def __call__(self, have: int, seconds: float) -> None:
        self._first = have if self._first is None else self._first
        if seconds >= self._next_s and have > self._first:
            self._next_s = 1.2 * seconds + 1
            rate = (have - self._first) / seconds
            left = _left(min((self._wanted - have) / rate, self._limit_s - seconds))
            say(f"text: {have:,} of {self._wanted:,} answer tokens, {rate:,.0f} a second, {left}")


def _left(seconds: float) -> str:
    return f"{seconds / 60:.1f} min left" if seconds >= 60 else f"{max(0.0, seconds):.0f} s left"


def _measured(evaluation: Evaluation) -> str:
    if not evaluation.runs:
        return "not measured, for too little text to hold some out"
    rates = " ".join(f"{rate:.2f}" for rate in evaluation.acceptance)
    chain = f"{evaluation.tokens_per_run:.2f} tokens per run as a greedy chain on held-out text"
    return f"{chain}, acceptance by depth {rates}"


def _progress(line: Report) -> str:
    losses = ", ".join(f"{name} {loss:.3f}" for name, loss in line.loss.items())
    chains = ", ".join(f"{name} {chain:.2f}" for name, chain in line.tokens_per_run.items())
    shown = f"step {line.step}, {line.tokens:,} tokens, {_left(line.seconds_left)}; loss {losses}"
    return f"{shown}; tokens per run {chains}" if chains else shown
