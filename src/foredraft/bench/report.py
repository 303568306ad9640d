"""What a benchmark leaves behind: results.json for scripts, report.html and plots for people."""

from __future__ import annotations

import json
import os
import platform
import subprocess
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from html import escape
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from foredraft.bench.cells import ALL, Cell
from foredraft.bench.measure import OFF, Plan, Run
from foredraft.control.economics import VerifyCurve

if TYPE_CHECKING:
    from foredraft.bench.drawing import Plot
    from foredraft.llm import LLM

PACKAGES = ("foredraft", "torch", "numpy", "tokenizers")
COLUMNS = (
    "spec",
    "category",
    "batch",
    "temperature",
    "prompts",
    "tokens/s",
    "speed-up",
    "quartiles",
    "predicted",
    "draft cost",
    "tokens/run",
    "accepted",
    "same text",
)
CSS = """
:root { color-scheme: light dark; --ink: #1b2733; --page: #ffffff; --soft: #5d6b78; --line: #dde3e8; --bad: #b3261e; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #dfe6ec; --page: #12171c; --soft: #93a1ae; --line: #2b353f; --bad: #ff8a80; }
}
body { margin: 0 auto; padding: 2rem 1.25rem 4rem; max-width: 60rem; background: var(--page); color: var(--ink);
  font: 16px/1.55 system-ui, sans-serif; }
h1 { font-size: 1.7rem; line-height: 1.2; margin: 0 0 .5rem; }
h2 { font-size: 1.2rem; margin: 2.5rem 0 .25rem; }
p { max-width: 42rem; margin: .25rem 0 1rem; }
p.note, dl { color: var(--soft); font-size: .9rem; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .15rem 1rem; }
dt { font-weight: 600; }
dd { margin: 0; overflow-wrap: anywhere; }
div.wide { overflow-x: auto; }
table { border-collapse: collapse; font-size: .85rem; font-variant-numeric: tabular-nums; }
th, td { padding: .3rem .6rem; text-align: right; white-space: nowrap; border-bottom: 1px solid var(--line); }
th:nth-child(-n+2), td:nth-child(-n+2) { text-align: left; }
tr.all td { font-weight: 600; }
.bad { color: var(--bad); font-weight: 700; }
svg { max-width: 100%; height: auto; }
svg text { font-family: system-ui, sans-serif !important; }
"""


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


def describe_machine(llm: LLM) -> dict[str, Any]:
    """The machine as far as it matters for speed."""
    import torch

    device = llm.engine.runner.backend.device
    return {
        "cpu": cpu_name(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "memory_gb": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9, 1),
        "system": f"{platform.system()} {platform.machine()}",
        "device": str(device),
        "accelerator": None if device.type == "cpu" else torch.cuda.get_device_name(device),
    }


def describe_versions() -> dict[str, str]:
    versions = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            continue
    return versions


def describe_model(name: str, llm: LLM) -> dict[str, Any]:
    return {"name": _file_name(name), "dtype": llm.dtype, "backend": llm.backend_name, "exact": str(llm.exact_report)}


def describe_settings(plan: Plan, suite: str, prompts: int) -> dict[str, Any]:
    measured_on = datetime.now(UTC).isoformat(timespec="seconds")
    return {
        "suite": _file_name(suite),
        "prompts": prompts,
        **asdict(plan),
        "specs": list(plan.settings),
        "measured_on": measured_on,
    }


def _file_name(name: str) -> str:
    """A file or folder without where it lies: a report travels, and that is nobody's business."""
    return Path(name).name if Path(name).exists() else name


def write_results(results: Results, folder: Path) -> Path:
    """`results.json`: the shape that scripts read. The keys `machine`, `versions`, `cells` and `runs` are promised."""
    file = folder / "results.json"
    file.write_text(json.dumps(asdict(results), ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
    return file


def write_report(results: Results, folder: Path) -> bool:
    """`report.html`, and the plots as svg files where matplotlib is installed; says whether it is."""
    plots: list[Plot] = []
    try:
        from foredraft.bench.plots import draw_all
    except ModuleNotFoundError as missing:
        if (missing.name or "").partition(".")[0] != "matplotlib":
            raise
        drawn = False
    else:
        plots, drawn = draw_all(results.cells, results.verify_cost), True
    for plot in plots:
        (folder / f"{plot.name}.svg").write_text(plot.file, encoding="utf-8")
    (folder / "report.html").write_text(page(results, plots), encoding="utf-8")
    return drawn


def page(results: Results, plots: Sequence[Plot]) -> str:
    """A page that stands for itself: no script, nothing to fetch, and all text escaped."""
    title = f"Foredraft on {results.model['name']}"
    sections = plot_sections(plots)
    body = f"""{_summary(results)}
{sections}
<h2>All figures</h2>
<p class="note">Speed-up is plain decoding's time divided by the setting's, prompts included; quartiles are those of the
groups' own ratios. The prediction is made from tokens per run, drafting time and the cost of rows. The draft cost
is the time that proposers take per run of the target, in plain steps.</p>
<div class="wide">{_table(results.cells)}</div>
<h2>Where and how</h2>
{facts_list({**results.model, **results.settings, **results.machine, **results.versions})}"""
    return html_page(title, body)


def html_page(title: str, body: str) -> str:
    """A page that stands for itself; the title is text, the body is HTML."""
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{escape(title)}</title>
<style>{CSS}</style>
</head>
<body>
<h1>{escape(title)}</h1>
{body}
</body>
</html>
"""


def plot_sections(plots: Sequence[Plot]) -> str:
    return "\n".join(
        f'<h2>{escape(plot.title)}</h2>\n<p class="note">{escape(plot.note)}</p>\n{plot.inline}' for plot in plots
    )


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
    return "".join(f"<p>{sentence}</p>" for sentence in (*sentences, verdict))


def _table(cells: Sequence[Cell]) -> str:
    head = "".join(f"<th>{escape(column)}</th>" for column in COLUMNS)
    rows = "\n".join(_row(cell) for cell in cells)
    return f"<table><thead><tr>{head}</tr></thead><tbody>\n{rows}\n</tbody></table>"


def _row(cell: Cell) -> str:
    figures = "".join(f"<td>{escape(text)}</td>" for text in _figures(cell))
    verdict = "<td>yes</td>" if cell.same_text else '<td class="bad">NO</td>'
    return ('<tr class="all">' if cell.category == ALL else "<tr>") + figures + verdict + "</tr>"


def _figures(cell: Cell) -> tuple[str, ...]:
    """A cell as text, in the order of COLUMNS without the last."""
    low, _, high = cell.ratio_quartiles
    return (
        cell.spec,
        cell.category,
        str(cell.batch),
        f"{cell.temperature:g}",
        str(cell.prompts),
        f"{cell.tokens_per_s:.1f}",
        f"{cell.ratio_to_off:.2f}x",
        f"{low:.2f} – {high:.2f}",
        f"{cell.predicted_ratio:.2f}x",
        f"{cell.draft_steps_per_run:.2f}",
        f"{cell.tokens_per_run:.2f}",
        f"{cell.acceptance_rate:.0%}",
    )


def facts_list(facts: dict[str, Any]) -> str:
    def text(value: Any) -> str:
        return ", ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)

    pairs = "".join(
        f"<dt>{escape(name.replace('_', ' '))}</dt><dd>{escape(text(value))}</dd>"
        for name, value in facts.items()
        if value is not None
    )
    return f"<dl>{pairs}</dl>"


def cpu_name() -> str:
    """The processor's name as the system tells it, else its architecture."""
    try:
        told = subprocess.run(["lscpu"], capture_output=True, text=True, env={**os.environ, "LC_ALL": "C"}).stdout
    except OSError:
        told = ""
    names = [line.partition(":")[2].strip() for line in told.splitlines() if line.startswith("Model name")]
    return names[0] if names and names[0] not in ("", "-") else platform.processor() or platform.machine()
