"""What commands print: JSON lines, remarks on stderr, and the figures of an answer."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from foredraft.errors import InvalidParameter

if TYPE_CHECKING:
    from foredraft.outputs import CompletionOutput, SpecMetrics, TokenEvent
    from foredraft.reports.answer import Answer

PROPOSER_COLOURS = (2, 5, 6, 3, 4)  # of a terminal's palette: green, magenta, cyan, yellow, blue


def say(sentence: str) -> None:
    """A remark for the person, on stderr, so that stdout holds nothing but results."""
    print(sentence, file=sys.stderr, flush=True)


@contextmanager
def library_remarks() -> Iterator[None]:
    """Passes on what the library logs, for instance that it takes seconds to measure the machine, as remarks."""
    log, handler = logging.getLogger("foredraft"), _Remarks()
    level = log.level
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    try:
        yield
    finally:
        log.removeHandler(handler)
        log.setLevel(level)


class _Remarks(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        say(self.format(record))


def make_folder(out: Path) -> None:
    """The folder of --out, before the work for it is done."""
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InvalidParameter(f"--out {out} cannot be made: {error.strerror}.") from error


def say_written(files: str, out: Path, drawn: bool) -> None:
    """What lies in the folder of --out now."""
    say(f"Wrote {files} to {out}.")
    if not drawn:
        say("The report has no plots, because matplotlib is not installed; to get it: pip install matplotlib.")


def print_json(record: dict[str, Any]) -> None:
    print(json.dumps(record, ensure_ascii=False), flush=True)


def tell(answer: Answer, as_json: bool) -> None:
    if as_json:
        print_json(answer.record)
    else:
        answer.print()


def follow(events: Iterator[TokenEvent], show: bool, colour_drafts: bool = False) -> CompletionOutput | None:
    """Runs the stream of one text to its end, showing it as it comes; a line once begun is ended whatever happens. A
    stream that was cut has no output."""
    output: CompletionOutput | None = None
    begun = False
    try:
        for event in events:
            if show:
                text = in_colour_of(event.origin, event.text) if colour_drafts else event.text
                print(text, end="", flush=True)
                begun = True
            output = event.output or output
    finally:
        if begun:
            print(flush=True)
    return output


def answer_record(index: int, samples: Sequence[CompletionOutput]) -> dict[str, Any]:
    """One prompt's answer for `--json`. The fields are those of the first sample; `samples` holds all where n > 1."""
    record = {"index": index, **_sample_record(samples[0])}
    if len(samples) > 1:
        record["samples"] = [_sample_record(sample) for sample in samples]
    return record


def _sample_record(sample: CompletionOutput) -> dict[str, Any]:
    record: dict[str, Any] = {
        "text": sample.text,
        "token_ids": sample.token_ids,
        "finish_reason": sample.finish_reason,
        "seed": sample.seed,
        "metrics": asdict(sample.metrics),
    }
    if sample.logprobs is not None:
        record["logprobs"] = [asdict(logprob) for logprob in sample.logprobs]
    if sample.error is not None:
        record["error"] = sample.error
    return record


def figures(sample: CompletionOutput, colour_drafts: bool = False) -> str:
    """The line under an answer; it names the proposers whose draft tokens were accepted, and how many of each."""
    from foredraft.control.economics import quotient
    from foredraft.types import TARGET

    metrics = sample.metrics
    rate = quotient(1, metrics.inter_token_latency_s)  # after the first token; 0 when there was no second one
    accepted = {name: count for name, count in metrics.by_origin.items() if name != TARGET and count}
    drafts = ", ".join(
        in_colour_of(name, f"{name} {count}") if colour_drafts else f"{name} {count}"
        for name, count in accepted.items()
    )
    return (
        f"{metrics.emitted_tokens} tokens, {rate:.1f} tok/s, "
        f"{metrics.tokens_per_run:.2f} tokens per run, "
        + (f"drafted by {drafts}, " if drafts else "")
        + (f"steps: {decisions(metrics)}, " if metrics.decisions else "")
        + f"seed {sample.seed}"
    )


def decisions(metrics: SpecMetrics) -> str:
    """What the controller decided, step by step, most frequent first."""
    return " · ".join(f"{count} {why}" for why, count in sorted(metrics.decisions.items(), key=lambda item: -item[1]))


@cache
def colour_of(origin: str) -> int | None:
    """The number of a proposer's colour in a terminal's palette; None for what the target wrote by itself."""
    from foredraft.proposers.registry import proposer_names
    from foredraft.types import TARGET

    if origin == TARGET:
        return None
    names = proposer_names()
    place = names.index(origin) if origin in names else len(names)
    return PROPOSER_COLOURS[place % len(PROPOSER_COLOURS)]


def in_colour_of(origin: str, text: str) -> str:
    """The text for a terminal, in the colour of the proposer that drafted it."""
    colour = colour_of(origin)
    return text if colour is None else f"\x1b[3{colour}m{text}\x1b[39m"


def show_cursor() -> None:
    """Undoes what a progress bar does to the terminal, should Ctrl-C come just as the bar begins or ends."""
    for stream in (sys.__stdout__, sys.__stderr__):
        if stream is not None and stream.isatty():
            print("\x1b[?25h", end="", file=stream, flush=True)


def dim(text: str, stream: Any) -> str:
    """The text in grey where the stream is a terminal."""
    return f"\x1b[2m{text}\x1b[0m" if stream.isatty() else text
