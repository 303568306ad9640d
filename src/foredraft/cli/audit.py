"""`foredraft audit`: proves on this machine that speculation changes neither texts nor laws nor bits."""

from __future__ import annotations

import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from foredraft.cli import options
from foredraft.cli.output import print_json, say
from foredraft.cli.progress import CountingProgress
from foredraft.models.catalog import DEFAULT_MODEL

if TYPE_CHECKING:
    from foredraft.audit.prompts import Question
    from foredraft.audit.report import Check
    from foredraft.llm import LLM

VERDICTS = {True: "passed", False: "FAILED"}


def audit(
    model: options.Model = DEFAULT_MODEL,
    specs: Annotated[
        list[str] | None,
        typer.Option("--spec", help="Compare this with off; may be repeated. Without it: every proposer and pair."),
    ] = None,
    suite: Annotated[Path | None, typer.Option("--suite", help="Prompts in Spec-Bench's format, JSON lines.")] = None,
    limit: Annotated[
        int, typer.Option("--limit", min=1, help="So many prompts, evenly over categories; pairs run on a fifth.")
    ] = 8,
    samples: Annotated[int, typer.Option("--samples", min=500, help="Texts per check of the sampled law.")] = 4000,
    max_tokens: options.MaxTokens = 96,
    dtype: options.Dtype = "auto",
    device: options.Device = "auto",
    threads: options.Threads = None,
    as_json: options.Json = False,
) -> None:
    """Prove on this machine: same text with and without speculation, the sampled law, bits that rows do not share."""
    from foredraft.audit.prompts import BUILT_IN, read_suite, spread
    from foredraft.params import SamplingParams
    from foredraft.proposers.registry import parse_spec

    for spec in specs or ():
        parse_spec(spec)
    SamplingParams(max_tokens=max_tokens)
    questions = spread(BUILT_IN if suite is None else read_suite(suite), limit)
    with options.ModelOptions(model, dtype=dtype, device=device, threads=threads).open() as llm:
        checks = _all_checks(llm, questions, specs or _default_specs(llm), max_tokens, samples)
    passed = all(check.passed for check in checks)
    if as_json:
        print_json({"passed": passed, "checks": [asdict(check) for check in checks]})
    elif sys.stdout.isatty():
        _print_table(checks)
    else:
        _print_lines(checks)
    if not passed:
        raise typer.Exit(1)


def _default_specs(llm: LLM) -> list[str]:
    """Every proposer that this model has, and every pair of them; says which ones are left out."""
    from foredraft.audit.text import usable_proposers, with_pairs
    from foredraft.proposers.registry import proposer_names

    usable = usable_proposers(llm)
    left_out = [name for name in proposer_names() if name not in usable]
    if left_out:
        say(f"Left out, because they need options: {', '.join(left_out)}; name them with --spec.")
    return with_pairs(usable)


def _all_checks(llm: LLM, questions: list[Question], specs: list[str], max_tokens: int, samples: int) -> list[Check]:
    from foredraft.audit import law, rows, text

    done = 0
    total = len(text.MODES) * (1 + len(specs)) + len(law.CASES) + rows.NUM_CHECKS
    with CountingProgress("Auditing", total) as progress:

        def tick() -> None:
            nonlocal done
            done += 1
            progress.show(done)

        return [
            *text.text_checks(llm, questions, specs, max_tokens, tick),
            *law.law_checks(samples, tick),
            *rows.row_checks(llm.engine.runner, tick),
        ]


def _print_table(checks: list[Check]) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=SIMPLE_HEAD)
    for column in ("check", "", "what was seen"):
        table.add_column(column)
    for check in checks:
        verdict = Text(VERDICTS[check.passed], style="green" if check.passed else "bold red")
        table.add_row(Text(check.name), verdict, Text(check.detail))
    Console().print(table)
    print(_summary(checks))


def _print_lines(checks: list[Check]) -> None:
    for check in checks:
        print(f"{VERDICTS[check.passed]}  {check.name}: {check.detail}")
    print(_summary(checks))


def _summary(checks: list[Check]) -> str:
    return f"{sum(check.passed for check in checks)} of {len(checks)} checks passed."
