"""What the figures of all reports share: colours, panels, and a figure as text of its own or in a page. Needs
matplotlib."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from io import StringIO
from pathlib import Path
from typing import Any, TypeVar

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

INK = "#1b2733"  # of text and axes; in the report it becomes the colour of the page's own text
GREY = "#8a94a0"
COLOURS = ("#2f7ed8", "#e07b39", "#3a9d6e", "#b0509f", "#c9a227", "#5b6bc0", "#c44e52", "#4fb0c6")
MARKERS = "osD^vPX*"
DASHES = ("-", (0, (6, 2)), (0, (3, 1.5)), (0, (1, 1)))  # lines that lie on each other can be told apart
WIDTH = 8.0  # inches
T = TypeVar("T")
STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",  # text stays text
    "svg.hashsalt": "foredraft",  # the same figures give the same file
    "text.parse_math": False,  # a category may hold a dollar sign
    "font.size": 10,
    "text.color": INK,
    "axes.facecolor": "none",  # the page's own, light or dark
    "axes.edgecolor": INK,
    "axes.labelcolor": INK,
    "axes.titlesize": 11,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "xtick.color": INK,
    "ytick.color": INK,
    "legend.frameon": False,
    "legend.fontsize": 9,
}


@dataclass(frozen=True)
class Plot:
    """A drawn figure: the text of a file that stands for itself, and of an element to put into a page."""

    name: str
    title: str
    note: str
    file: str
    inline: str


def drawn(name: str, title: str, note: str, draw: Callable[[], Figure]) -> Plot:
    with matplotlib.rc_context(STYLE), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing", category=UserWarning)
        figure = draw()
        file, bare = _svg(figure, "white"), _svg(figure, "none")
    return Plot(name, title, note, file, _as_element(bare, title))


def picture(draw: Callable[[], Figure], file: Path) -> None:
    """A figure as a file of its own, in the format that its name ends in."""
    with matplotlib.rc_context(STYLE):
        draw().savefig(file, facecolor="white")


def _svg(figure: Figure, background: str) -> str:
    text = StringIO()
    figure.savefig(text, format="svg", facecolor=background, metadata={"Date": None})
    return text.getvalue()


def _as_element(svg: str, title: str) -> str:
    """The svg element alone: no prolog, no metadata, nothing that names an address, and the page's text colour."""
    element = svg[svg.index("<svg") :]
    element = re.sub(r"<metadata>.*?</metadata>", "", element, flags=re.DOTALL)
    element = re.sub(r'\s+xmlns(:\w+)?="[^"]*"', "", element)
    return element.replace(INK, "currentColor").replace("<svg", f'<svg role="img" aria-label="{escape(title)}"', 1)


def stacked(height: float, items: Sequence[T], draw: Callable[[Axes, T], None]) -> Figure:
    """A panel for each item, one below the other; what has a label is in the legend beside the first."""
    figure = Figure(figsize=(WIDTH, height * len(items)), layout="constrained")
    panels = [row[0] for row in figure.subplots(len(items), 1, squeeze=False)]
    for axes, item in zip(panels, items, strict=True):
        draw(axes, item)
    if panels[0].get_legend_handles_labels()[0]:
        panels[0].legend(loc="upper left", bbox_to_anchor=(1.0, 1.0))
    return figure


def line_at_one(axes: Axes) -> None:
    axes.axhline(1.0, color=GREY, linestyle="--", linewidth=1)


def note(axes: Axes, text: str, point: tuple[float, float], offset: tuple[int, int], **options: Any) -> None:
    """A small text beside a point; the offset is in points of type."""
    axes.annotate(text, point, offset, textcoords="offset points", fontsize=9, **options)


def look(place: int) -> dict[str, Any]:
    """Of a line: later ones are thinner, so that none hides another."""
    return {
        "color": colour(place),
        "marker": MARKERS[place % len(MARKERS)],
        "markersize": 5,
        "linestyle": DASHES[place % len(DASHES)],
        "linewidth": max(1.2, 2.6 - 0.4 * place),
    }


def colour(place: int) -> str:
    return COLOURS[place % len(COLOURS)]
