"""A report for people: one page that stands for itself, with its plots as files beside it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from html import escape
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from foredraft.reports.drawing import Plot

CSS = """
:root { color-scheme: light dark; --ink: #1b2733; --page: #ffffff; --soft: #5d6b78; --line: #dde3e8; --bad: #b3261e; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #dfe6ec; --page: #12171c; --soft: #93a1ae; --line: #2b353f; --bad: #ff8a80; }
}
body { margin: 0 auto; padding: 2rem 1.25rem 4rem; max-width: 72rem; background: var(--page); color: var(--ink);
  font: 16px/1.55 system-ui, sans-serif; }
h1 { font-size: 1.7rem; line-height: 1.2; margin: 0 0 .5rem; }
h2 { font-size: 1.2rem; margin: 2.5rem 0 .25rem; }
h3 { font-size: 1rem; margin: 1.2rem 0 .25rem; }
p { max-width: 42rem; margin: .25rem 0 1rem; }
p.answer { font-size: 1.05rem; }
p.note, dl { color: var(--soft); font-size: .9rem; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .15rem 1rem; }
dt { font-weight: 600; }
dd { margin: 0; overflow-wrap: anywhere; }
div.wide { overflow-x: auto; }
table { border-collapse: collapse; font-size: .85rem; font-variant-numeric: tabular-nums; }
th, td { padding: .3rem .5rem; text-align: right; white-space: nowrap; border-bottom: 1px solid var(--line); }
th { white-space: normal; vertical-align: bottom; }
th:nth-child(-n+2), td:nth-child(-n+2) { text-align: left; white-space: normal; min-width: 9.5rem;
  overflow-wrap: anywhere; }
tr.all td { font-weight: 600; }
.bad { color: var(--bad); font-weight: 700; }
svg { max-width: 100%; height: auto; }
svg text { font-family: system-ui, sans-serif !important; }
"""


def write_page(folder: Path, page: Callable[[Sequence[Plot]], str], draw: Callable[[], Sequence[Plot]]) -> bool:
    """`report.html`, and the plots as svg files where matplotlib is installed; says whether it is. `draw` imports what
    draws."""
    folder.mkdir(parents=True, exist_ok=True)
    drawn = find_spec("matplotlib") is not None
    plots = draw() if drawn else ()
    for plot in plots:
        (folder / f"{plot.name}.svg").write_text(plot.file, encoding="utf-8")
    (folder / "report.html").write_text(page(plots), encoding="utf-8")
    return drawn


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
<main>
<h1>{escape(title)}</h1>
{body}
</main>
</body>
</html>
"""


def plot_sections(plots: Sequence[Plot]) -> str:
    return "\n".join(
        f'<h2>{escape(plot.title)}</h2>\n<p class="note">{escape(plot.note)}</p>\n{plot.inline}' for plot in plots
    )


def html_table(columns: Iterable[str], rows: Iterable[str]) -> str:
    """The columns are text, the rows HTML."""
    head = "".join(f"<th>{escape(column)}</th>" for column in columns)
    body = "\n".join(rows)
    return f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>\n{body}\n</tbody></table></div>'


def html_cells(texts: Iterable[str]) -> str:
    return "".join(f"<td>{escape(text)}</td>" for text in texts)


def facts_list(facts: dict[str, Any]) -> str:
    def text(value: Any) -> str:
        return ", ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)

    pairs = "".join(
        f"<dt>{escape(name.replace('_', ' '))}</dt><dd>{escape(text(value))}</dd>"
        for name, value in facts.items()
        if value is not None
    )
    return f"<dl>{pairs}</dl>"
