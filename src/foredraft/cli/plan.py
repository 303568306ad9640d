"""`foredraft plan`: whether speculation pays, how long drafts should be, and when to turn it off."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from foredraft.bench.plan_inputs import PlanInputs, chain_spec, measured_inputs
from foredraft.bench.results_file import read_curve, read_results
from foredraft.cli import options
from foredraft.cli.output import print_json
from foredraft.cli.plan_answer import SMALL_GAIN, Answer, Table, bar, percent, requests, tokens
from foredraft.cli.plan_plot import draw, require_drawing
from foredraft.cli.plan_results import Comparison, compare
from foredraft.cli.plan_server import advise_server
from foredraft.control.economics import BatchLength, Outlook
from foredraft.errors import InvalidParameter
from foredraft.models.catalog import DEFAULT_MODEL

BATCH_MAX = 256  # how far to look without --batch-max


def plan(
    model: options.Model = DEFAULT_MODEL,  # every command takes it; figures that are given depend on none
    alpha: Annotated[
        float | None, typer.Option("--alpha", help="How likely a draft token is accepted, from 0 to 1.")
    ] = None,
    cost: Annotated[float | None, typer.Option("--cost", help="A draft token's time, in plain steps.")] = None,
    k_max: Annotated[int, typer.Option("--k-max", min=1, max=1000, help="The longest draft to consider.")] = 16,
    verify_cost: Annotated[
        Path | None,
        typer.Option("--verify-cost", help='Seconds of a run by its rows: {"rows": [1, 2], "seconds": [0.01, 0.02]}.'),
    ] = None,
    batch_max: Annotated[
        int | None, typer.Option("--batch-max", min=1, max=4096, help=f"Look so far for a flip; else {BATCH_MAX}.")
    ] = None,
    results: Annotated[Path | None, typer.Option("--from", help="Advise from a results.json of bench instead.")] = None,
    vllm_metrics: Annotated[
        str | None, typer.Option("--vllm-metrics", help="Advise a running server, by the counters at this address.")
    ] = None,
    plot: Annotated[Path | None, typer.Option("--plot", help="Draw speed-up against k into FILE.png or .svg.")] = None,
    measure: Annotated[
        bool, typer.Option("--measure", help="Measure acceptance and costs of --spec with --model on this machine.")
    ] = False,
    spec: options.Spec = "suffix",  # what auto drafts with
    dtype: options.Dtype = "auto",
    threads: options.Threads = None,
    head: options.Head = "auto",
    as_json: options.Json = False,
) -> None:
    """Say whether speculation pays, which draft length is best, and at which batch size to turn it off."""
    if vllm_metrics is not None:
        if alpha is not None or batch_max is not None or results is not None or measure or plot is not None:
            raise InvalidParameter(
                "--vllm-metrics finds acceptance itself; add only --cost, --verify-cost and --k-max."
            )
        _tell(_advise_server(vllm_metrics, cost, verify_cost, k_max), as_json)
        return
    if plot is not None:
        require_drawing(plot)
    compared: Comparison | None = None
    source = ""
    if results is not None:
        if any(given is not None for given in (alpha, cost, verify_cost)) or measure:
            raise InvalidParameter("--from takes every figure from its file; give it without other figures.")
        compared = compare(*read_results(results), results)
        source = f"{compared.premise}\nThe lengths follow for {compared.spec}, over all its steps: "
        figures = _outlook(compared.inputs, k_max, batch_max)
    elif measure:
        if any(given is not None for given in (alpha, cost, verify_cost)):
            raise InvalidParameter("--measure finds --alpha, --cost and --verify-cost itself; give it without them.")
        spec = chain_spec(spec)
        opening = options.ModelOptions(model, spec, dtype, threads=threads, head=head)
        figures = _outlook(_measured(opening), k_max, batch_max)
        source = f"Measured here for {spec}, in the steps in which it drafts: "
    elif alpha is None or cost is None:
        raise InvalidParameter(
            "Give --alpha and --cost, or --measure, or --from with the results.json of a bench, or --vllm-metrics."
        )
    else:
        curve = None if verify_cost is None else read_curve(verify_cost)
        figures = _outlook(PlanInputs(alpha, cost, curve), k_max, batch_max)
    if plot is not None:
        draw(figures, plot)
    _tell(_advise(figures, source, compared), as_json)


def _tell(answer: Answer, as_json: bool) -> None:
    if as_json:
        print_json(answer.record)
    else:
        answer.print()


def _advise_server(url: str, cost: float | None, verify_cost: Path | None, k_max: int) -> Answer:
    from foredraft.integrations.vllm_metrics import read_server

    curve = None if verify_cost is None else read_curve(verify_cost)
    return advise_server(read_server(url), url, cost, curve, k_max)


def _measured(opened: options.ModelOptions) -> PlanInputs:
    with opened.open() as llm:
        return measured_inputs(llm, opened.spec)


def _outlook(found: PlanInputs, k_max: int, batch_max: int | None) -> Outlook:
    if batch_max is not None and found.curve is None:
        raise InvalidParameter("--batch-max needs --verify-cost: only a measured cost tells how runs slow down.")
    return Outlook.of(found.alpha, found.cost, k_max, found.curve, batch_max or BATCH_MAX, found.batch, found.beside)


def _advise(figures: Outlook, source: str, compared: Comparison | None) -> Answer:
    """What follows from figures of this source; after what was compared in a benchmark, where they come from one."""
    edge = figures.flip_batch or 0
    shown = [each for each in figures.batches if each.batch & (each.batch - 1) == 0 or each.batch in (edge - 1, edge)]
    verify = "one plain step at any size" if figures.curve is None else "what was measured"
    premise = (
        f"Acceptance {figures.alpha:.4g}; a draft token costs {figures.cost:.4g} plain steps, a verify run {verify}."
    )
    tables, sentences = _tables(figures, shown), _length_advice(figures)
    if compared is None or not compared.several_batches:
        sentences += _batch_advice(figures)
    extras: dict[str, Any] = {}
    if compared is not None:
        tables = [compared.table, *tables]
        sentences = [*compared.sentences, compared.measured, *sentences]
        if compared.is_off_best and figures.best.k:
            sentences.append(
                "None of the settings that were measured gained that: bench that length before you rely on it."
            )
        extras = compared.record
    record = {
        "best_k": figures.best.k,
        "speedup": figures.best.speedup,
        "expected_tokens": figures.best.expected_tokens,
        "break_even_alpha": figures.break_even_alpha,
        "break_even_cost": figures.break_even_cost,
        "flip_batch": figures.flip_batch,
        "table": [asdict(each) for each in figures.table],
        "batches": [asdict(each) for each in shown],
        **extras,
        "recommendation": " ".join(sentences),
    }
    return Answer(record, source + premise, tables, sentences)


def _tables(figures: Outlook, shown: list[BatchLength]) -> list[Table]:
    """The lengths, and the batch sizes where runs were measured."""
    fastest = max(length.speedup for length in figures.table)
    rows = [
        (str(each.k), f"{each.expected_tokens:.2f}", f"{each.speedup:.2f}x", bar(each.speedup, fastest))
        for each in figures.table
    ]
    tables = [Table(("k", "tokens per run", "speed-up", ""), rows, frozenset({figures.best.k}))]
    if shown:
        batch_rows = [(str(each.batch), str(each.best_k), f"{each.speedup:.2f}x") for each in shown]
        tables.append(Table(("batch", "best k", "speed-up"), batch_rows))
    return tables


def _length_advice(figures: Outlook) -> list[str]:
    best, least, most = figures.best, figures.break_even_alpha, figures.break_even_cost
    longest = figures.table[-1].k
    if best.k == 0:
        sentences = [f"Leave it off: no draft of up to {tokens(longest)} is faster than plain decoding."]
        if least is None:
            sentences.append("At this cost it would not pay even if every draft token were accepted.")
        else:
            sentences.append(f"At this cost it pays once more than {percent(least)} of the draft tokens are accepted.")
        if most is not None:
            sentences.append(f"At this acceptance it pays once a draft token costs less than {most:.3g} plain steps.")
        return sentences
    assert least is not None and most is not None, "a draft that pays has both"
    if best.speedup - 1 < SMALL_GAIN:
        sentences = [
            f"Draft {tokens(best.k)} per run: it gains only {percent(best.speedup - 1)}, so leave it off unless "
            f"these figures are certain: it loses when fewer than {percent(least)} of the draft tokens are accepted."
        ]
    else:
        sentences = [
            f"Draft {tokens(best.k)} per run: {best.speedup:.2f} times as fast as plain decoding.",
            f"At this cost it pays while more than {percent(least)} of the draft tokens are accepted.",
            f"At this acceptance it pays while a draft token costs less than {most:.3g} plain steps.",
        ]
    if best.k == longest and figures.longer_gain > 0:
        sentences.append("Longer drafts gain more: try a larger --k-max.")
    return sentences


def _batch_advice(figures: Outlook) -> list[str]:
    if figures.curve is None:
        return []
    flip = figures.flip_batch
    again = next((each.batch for each in figures.batches if flip and each.batch > flip and each.best_k), None)
    if flip is None:
        sentences = [f"It still pays at {requests(len(figures.batches))}, the largest batch considered."]
    elif flip > 1:
        sentences = [f"Turn it off above {requests(flip - 1)}."]
    else:
        sentences = []
    if again is not None:
        sentences.append(f"At {requests(again)} it pays again.")
    measured = figures.curve.rows[-1]
    if 2 * (again or flip or len(figures.batches)) > measured:  # the shortest draft makes two rows of each request
        sentences.append(f"Runs of more than {measured} rows were not measured; their cost is extrapolated.")
    return sentences
