"""`foredraft audit`: checks on this machine that speculation changes no text, no distribution and no bit."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from foredraft.cli import options
from foredraft.cli.output import print_json, say
from foredraft.cli.progress import CountingProgress
from foredraft.params import SamplingParams
from foredraft.proposers.registry import parse_spec, proposer_names
from foredraft.reports.prompts import Question, read_suite, spread

if TYPE_CHECKING:
    from foredraft.audit.report import Check
    from foredraft.llm import LLM


@options.opens_model("dtype", "activations", "device", "threads", "head")
def audit(
    opening: options.Opening,
    specs: Annotated[
        list[str] | None,
        typer.Option("--spec", help="Compare this with off; may be repeated. Without it: every proposer and pair."),
    ] = None,
    suite: Annotated[Path | None, typer.Option(help="Prompts in Spec-Bench's format, JSON lines.")] = None,
    limit: Annotated[
        int, typer.Option(min=1, help="So many prompts, evenly over categories; pairs run on a fifth.")
    ] = 8,
    samples: Annotated[int, typer.Option(min=500, help="Texts per check of the sampled distribution.")] = 4000,
    max_tokens: options.MaxTokens = 96,
    as_json: options.Json = False,
) -> None:
    """Check on this machine: the same text with and without speculation, the sampled distribution, row invariance."""
    from foredraft.audit.prompts import BUILT_IN

    for spec in specs or ():
        parse_spec(spec)
    SamplingParams(max_tokens=max_tokens)
    questions = spread(BUILT_IN if suite is None else read_suite(suite), limit)
    with opening().open() as llm:
        checks = _all_checks(llm, questions, specs or _default_specs(llm), max_tokens, samples, as_json)
    passed = all(check.passed for check in checks)
    if as_json:
        print_json({"passed": passed, "checks": [asdict(check) for check in checks]})
    else:
        print(f"{sum(check.passed for check in checks)} of {len(checks)} checks passed.")
    if not passed:
        raise typer.Exit(1)


def _default_specs(llm: LLM) -> list[str]:
    """Every proposer that this model has, and every pair of them; says which ones are left out, and why."""
    from foredraft.audit import text

    left_out = text.unusable_proposers(llm)
    for name, complaint in left_out.items():
        say(f"{name} is left out: {complaint}")
    return text.with_pairs([name for name in proposer_names() if name not in left_out])


def _all_checks(
    llm: LLM, questions: list[Question], specs: list[str], max_tokens: int, samples: int, as_json: bool
) -> list[Check]:
    """All checks, each shown as soon as it is done."""
    from foredraft.audit import distribution, rows, text

    checks: list[Check] = []
    total = len(text.MODES) * (1 + len(specs)) + len(distribution.CASES) + rows.NUM_CHECKS
    with CountingProgress("Auditing", total) as progress:

        def each() -> Iterator[Check]:
            yield from text.text_checks(llm, questions, specs, max_tokens, progress.tick)
            yield from distribution.distribution_checks(samples, progress.tick)
            yield from rows.row_checks(llm.engine.runner, progress.tick)

        for check in each():
            checks.append(check)
            if as_json:  # stdout is kept for the one object that is promised there
                progress.print(json.dumps(asdict(check), ensure_ascii=False), file=sys.stderr)
            else:
                progress.print(_shown(check))
    return checks


def _shown(check: Check) -> str:
    """One line per check."""
    verdict = "passed" if check.passed else "FAILED"
    if sys.stdout.isatty():
        verdict = f"\x1b[{32 if check.passed else 31}m{verdict}\x1b[39m"
    return f"{verdict}  {check.name}: {check.detail}"
