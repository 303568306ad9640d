"""`foredraft bench`: plain decoding and every speculation setting, interleaved in one run; figures, a report, plots."""

from __future__ import annotations

import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from foredraft.cli import options
from foredraft.cli.output import make_folder, print_json, say, say_written
from foredraft.cli.progress import CountingProgress
from foredraft.config import EngineConfig
from foredraft.errors import InvalidParameter

if TYPE_CHECKING:
    from foredraft.bench.cells import Cell
    from foredraft.bench.report import Results

DEFAULT_SPECS = ("auto", "ngram", "suffix", "ngram+suffix")
HEADERS = (
    *("spec", "category", "batch", "temp.", "tok/s", "speed-up", "predicted", "draft cost"),
    *("tokens/run", "same text?"),
)


@options.opens_model("dtype", "activations", "device", "threads", "head")
def bench(
    opening: options.Opening,
    suite: Annotated[str, typer.Option(help="builtin, or a file in Spec-Bench's format.")] = "builtin",
    specs: Annotated[
        list[str] | None,
        typer.Option("--spec", help=f"Compare this with off; may be repeated. Without it: {', '.join(DEFAULT_SPECS)}."),
    ] = None,
    batch: Annotated[str, typer.Option(help="How many prompts run at once: one size, or several: 1,8.")] = "1",
    temperatures: Annotated[
        list[float] | None, typer.Option("--temperature", help="0, the default, is greedy; may be repeated.")
    ] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="So many prompts, evenly over kinds.")] = None,
    max_tokens: options.MaxTokens = 128,
    repeats: Annotated[int, typer.Option(min=1, help="Timed runs of each; the median counts.")] = 3,
    seed: Annotated[int, typer.Option(help="Of the first prompt; the others count on from it.")] = 1,
    out: Annotated[Path, typer.Option(help="The folder for the results.")] = Path("bench-results"),
    as_json: options.Json = False,
) -> None:
    """Measure plain decoding and every --spec, interleaved; write results.json, report.html and plots."""
    from foredraft.bench.cells import cells_of
    from foredraft.bench.measure import Plan, measure, num_timed_runs, verify_curve
    from foredraft.bench.report import Results, describe_model, describe_settings
    from foredraft.bench.suite import load_suite
    from foredraft.reports.facts import describe_machine, describe_versions

    chosen = tuple(specs or DEFAULT_SPECS)
    plan = Plan(chosen, _batches(batch), tuple(dict.fromkeys(temperatures or [0.0])), max_tokens, repeats, seed)
    questions = load_suite(suite, limit)
    make_folder(out)
    at_once = max(EngineConfig.max_num_seqs, *plan.batches)
    wanted = opening(spec="off", prefix_caching=False, max_num_seqs=at_once)
    with wanted.open() as llm:
        with CountingProgress("Measuring", num_timed_runs(questions, plan)) as progress:
            runs = measure(llm, questions, plan, progress.tick)
        cost = verify_curve(llm)
        results = Results(
            machine=describe_machine(llm),
            versions=describe_versions(),
            model=describe_model(wanted.model, llm),
            settings=describe_settings(plan, suite, len(questions)),
            cells=cells_of(runs, cost, llm.dtype),
            runs=runs,
            verify_cost=cost,
        )
    _write(results, out)
    if as_json:
        for cell in results.cells:
            print_json(asdict(cell))
    else:
        _print_table(results.cells)
    for remark in (*_failures(results), *([results.warning] if results.warning else ())):
        say(remark)
    if not results.same_text:
        raise typer.Exit(1)


def _batches(text: str) -> tuple[int, ...]:
    """The sizes of `1,8`, ascending, each once."""
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() for part in parts):
        raise InvalidParameter(f"--batch {text!r} must be whole numbers with commas between them, for instance 1,8.")
    return tuple(sorted({int(part) for part in parts}))


def _write(results: Results, out: Path) -> None:
    from foredraft.bench.report import write_report, write_results

    try:
        write_results(results, out)
        drawn = write_report(results, out)
    except OSError as error:
        raise InvalidParameter(f"The results cannot be written to {out}: {error.strerror}.") from error
    say_written("results.json and report.html", out, drawn)


def _failures(results: Results) -> list[str]:
    """What went wrong, in sentences; each prompt that failed is told once per setting."""
    errors = {
        (run.prompt, run.spec): f"Prompt {run.prompt}, {run.spec}: {run.error}" for run in results.runs if run.error
    }
    differing = dict.fromkeys(cell.spec for cell in results.cells if not cell.same_text)
    return [*errors.values(), *(f"{spec}: the texts are not those of plain decoding." for spec in differing)]


def _print_table(cells: list[Cell]) -> None:
    if not sys.stdout.isatty():
        from foredraft.reports.answer import print_aligned

        print_aligned([HEADERS, *map(_figures, cells)], [place >= 2 for place in range(len(HEADERS))])
        return
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=SIMPLE_HEAD)
    for place, header in enumerate(HEADERS):
        table.add_column(header, justify="left" if place < 2 else "right")
    for cell, after in zip(cells, [*cells[1:], None], strict=True):
        last = after is None or after.category != cell.category
        table.add_row(*map(Text, _figures(cell)), style=None if cell.same_text else "bold red", end_section=last)
    Console().print(table)


def _figures(cell: Cell) -> tuple[str, ...]:
    """A cell as text, in the order of HEADERS."""
    from foredraft.bench.report import figures

    *which, _, rate, ratio, _, predicted, draft_cost, per_run, _ = figures(cell).values()
    return (*which, rate, ratio, predicted, draft_cost, per_run, "yes" if cell.same_text else "NO")
