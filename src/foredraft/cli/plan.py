"""`foredraft plan`: whether speculation pays, how long drafts should be, and when to turn it off."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from foredraft.cli import options
from foredraft.cli.output import tell
from foredraft.cli.progress import MEASURING, CountingProgress
from foredraft.errors import InvalidParameter

BATCH_MAX = 256  # how far to look without --batch-max


@options.opens_model("dtype", "threads", "head", spec="suffix")  # what auto drafts with
def plan(
    opening: options.Opening,  # of --measure; figures that are given depend on no model
    alpha: Annotated[float | None, typer.Option(help="How likely a draft token is accepted, from 0 to 1.")] = None,
    cost: Annotated[float | None, typer.Option(help="A draft token's time, in plain steps.")] = None,
    k_max: Annotated[int, typer.Option(min=1, max=1000, help="The longest draft to consider.")] = 16,
    verify_cost: Annotated[
        Path | None,
        typer.Option(help='Seconds of a run by its rows: {"rows": [1, 2], "seconds": [0.01, 0.02]}.'),
    ] = None,
    batch_max: Annotated[
        int | None, typer.Option(min=1, max=4096, help=f"Look so far for a flip; else {BATCH_MAX}.")
    ] = None,
    results: Annotated[Path | None, typer.Option("--from", help="Advise from a results.json of bench instead.")] = None,
    vllm_metrics: Annotated[
        str | None, typer.Option(help="Advise a running server, by the counters at this address.")
    ] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw speed-up against k into FILE.png or .svg.")] = None,
    measure: Annotated[
        bool, typer.Option("--measure", help="Measure acceptance and costs of --spec with --model on this machine.")
    ] = False,
    as_json: options.Json = False,
) -> None:
    """Say whether speculation pays, which draft length is best, and at which batch size to turn it off."""
    from foredraft.bench.results_file import read_curve, read_results
    from foredraft.control.economics import Outlook
    from foredraft.plan.advice import advise
    from foredraft.plan.inputs import PlanInputs, chain_spec, measured_inputs
    from foredraft.plan.plot import draw, require_drawing
    from foredraft.plan.results import Comparison, compare

    if vllm_metrics is not None:
        if alpha is not None or batch_max is not None or results is not None or measure or plot is not None:
            raise InvalidParameter(
                "--vllm-metrics finds acceptance itself; add only --cost, --verify-cost and --k-max."
            )
        from foredraft.integrations.vllm_metrics import read_server
        from foredraft.plan.server import advise_server

        curve = None if verify_cost is None else read_curve(verify_cost)
        tell(advise_server(read_server(vllm_metrics), vllm_metrics, cost, curve, k_max), as_json)
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
        found = compared.inputs
    elif measure:
        if any(given is not None for given in (alpha, cost, verify_cost)):
            raise InvalidParameter("--measure finds --alpha, --cost and --verify-cost itself; give it without them.")
        wanted = opening(spec=chain_spec(opening.keywords["spec"]))
        with wanted.open() as llm, CountingProgress(MEASURING) as progress:
            found = measured_inputs(llm, wanted.spec, progress.to)
            has_experts = llm.engine.config.experts is not None
        if found.curve is not None:
            from foredraft.plan.words import rows_cost

            source = rows_cost(found.curve, has_experts) + "\n"
        source += f"Measured here for {wanted.spec}, in the steps in which it drafts: "
    elif alpha is None or cost is None:
        raise InvalidParameter(
            "Give --alpha and --cost, or --measure, or --from with the results.json of a bench, or --vllm-metrics."
        )
    else:
        found = PlanInputs(alpha, cost, None if verify_cost is None else read_curve(verify_cost))
    if batch_max is not None and found.curve is None:
        raise InvalidParameter("--batch-max needs --verify-cost: only a measured cost tells how runs slow down.")
    figures = Outlook.of(found.alpha, found.cost, k_max, found.curve, batch_max or BATCH_MAX, found.batch, found.beside)
    if plot is not None:
        draw(figures, plot)
    tell(advise(figures, source, compared), as_json)
