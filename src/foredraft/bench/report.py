"""What a benchmark leaves behind: results.json for scripts, report.html and plots for people."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from foredraft.bench.cells import ALL, Cell, unrest
from foredraft.bench.measure import OFF, Plan, Run
from foredraft.control.economics import VerifyCurve
from foredraft.reports.facts import file_name
from foredraft.reports.page import facts_list, html_cells, html_page, html_table, plot_sections, write_page

if TYPE_CHECKING:
    from foredraft.llm import LLM
    from foredraft.reports.drawing import Plot


@dataclass(frozen=True)
class Results:
    """Everything that a benchmark found, and where."""

    machine: dict[str, Any]
    versions: dict[str, str]
    model: dict[str, Any]
    settings: dict[str, Any]
    cells: list[Cell]
    runs: list[Run]
    verify_cost: VerifyCurve

    @property
    def same_text(self) -> bool:
        return all(cell.same_text for cell in self.cells)

    @property
    def warning(self) -> str | None:
        """What is to be known about all figures: that the machine was busy with something else."""
        repeated, restless = unrest(self.runs)
        if not restless:
            return None
        return (
            f"The machine was not quiet: in {restless} of {repeated} cases plain runs of the same prompts differ by "
            "more than a fifth. End what else runs, and measure again."
        )


def describe_model(name: str, llm: LLM) -> dict[str, Any]:
    return {"name": file_name(name), "dtype": llm.dtype, "backend": llm.backend_name, "exact": str(llm.exact_report)}


def describe_settings(plan: Plan, suite: str, prompts: int) -> dict[str, Any]:
    return {
        "suite": file_name(suite),
        "prompts": prompts,
        **asdict(plan),
        "specs": list(plan.settings),
        "measured_on": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def write_results(results: Results, folder: Path) -> Path:
    """`results.json`: the shape that scripts read. The keys `machine`, `versions`, `cells` and `runs` are promised."""
    file = folder / "results.json"
    file.write_text(json.dumps(asdict(results), ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
    return file


def write_report(results: Results, folder: Path) -> bool:
    """`report.html` with plots, where matplotlib is installed; says whether it is."""

    def draw() -> list[Plot]:
        from foredraft.bench.plots import draw_all

        return draw_all(results.cells, results.verify_cost)

    return write_page(folder, lambda plots: page(results, plots), draw)


def page(results: Results, plots: Sequence[Plot]) -> str:
    """A page that stands for itself: no script, nothing to fetch, and all text escaped."""
    body = f"""{_summary(results)}
{plot_sections(plots)}
<h2>All figures</h2>
<p class="note">Speed-up is plain decoding's time divided by the setting's, prompts included; quartiles are those of the
groups' own ratios. The prediction is made from tokens per run, drafting time and the cost of rows. The draft cost
is the time that proposers take per run of the target, in plain steps.</p>
{_tables(results.cells)}
<h2>Where and how</h2>
{facts_list({**results.model, **results.settings, **results.machine, **results.versions})}"""
    return html_page(f"Foredraft on {results.model['name']}", body)


def _summary(results: Results) -> str:
    """The best setting of each batch size and temperature, and whether every text was the same."""
    sentences: list[str] = []
    drafted = [cell for cell in results.cells if cell.spec != OFF and cell.category == ALL]
    for batch, temperature in dict.fromkeys((cell.batch, cell.temperature) for cell in drafted):
        best = max(
            (cell for cell in drafted if (cell.batch, cell.temperature) == (batch, temperature)),
            key=lambda cell: cell.ratio_to_off,
        )
        sentences.append(
            f"Batch {batch}, temperature {temperature:g}: best is <strong>{escape(best.spec)}</strong> with "
            f"{best.ratio_to_off:.2f}x over all prompts and {best.tokens_per_run:.2f} tokens per run."
        )
    if results.same_text:
        verdict = "Every setting wrote the same texts as plain decoding."
    else:
        verdict = '<span class="bad">Some texts differ from those of plain decoding.</span>'
    told = [escape(results.warning)] if results.warning else []
    return "".join(f"<p>{sentence}</p>" for sentence in (*sentences, verdict, *told))


def _tables(cells: Sequence[Cell]) -> str:
    """One for each batch size and temperature, which need no columns then."""
    tables: dict[str, list[Cell]] = {}
    for cell in cells:
        tables.setdefault(f"Batch {cell.batch}, temperature {cell.temperature:g}", []).append(cell)
    columns = [*_shown(cells[0]), "same text"]
    return "\n".join(f"<h3>{title}</h3>\n{html_table(columns, map(_row, mine))}" for title, mine in tables.items())


def _shown(cell: Cell) -> dict[str, str]:
    return {name: text for name, text in figures(cell).items() if name not in ("batch", "temperature")}


def _row(cell: Cell) -> str:
    verdict = "<td>yes</td>" if cell.same_text else '<td class="bad">NO</td>'
    return (
        ('<tr class="all">' if cell.category == ALL else "<tr>") + html_cells(_shown(cell).values()) + verdict + "</tr>"
    )


def _spread(quartiles: list[float]) -> str:
    """One group has none."""
    return f"{quartiles[0]:.2f} – {quartiles[2]:.2f}" if quartiles else "–"


def figures(cell: Cell) -> dict[str, str]:
    """A cell as text, column by column."""
    return {
        "spec": cell.spec,
        "category": cell.category,
        "batch": str(cell.batch),
        "temperature": f"{cell.temperature:g}",
        "prompts": str(cell.prompts),
        "tokens/s": f"{cell.tokens_per_s:.1f}",
        "speed-up": f"{cell.ratio_to_off:.2f}x",
        "quartiles": _spread(cell.ratio_quartiles),
        "predicted": f"{cell.predicted_ratio:.2f}x",
        "draft cost": f"{cell.draft_steps_per_run:.2f}",
        "tokens/run": f"{cell.tokens_per_run:.2f}",
        "accepted": f"{cell.acceptance_rate:.0%}",
    }
