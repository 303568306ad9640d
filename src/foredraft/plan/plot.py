"""The picture of `foredraft plan`: speed-up against the length of drafts."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from foredraft.control.economics import Outlook
from foredraft.errors import InvalidParameter

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SUFFIXES = (".png", ".svg")


def require_drawing(file: Path) -> None:
    """Say what is in the way of a picture before anything is measured for it."""
    if file.suffix not in SUFFIXES:
        raise InvalidParameter(f"{file} must end in {' or '.join(SUFFIXES)}.")
    try:
        import_module("matplotlib.figure")
    except ImportError as error:
        raise InvalidParameter("--plot needs matplotlib; to get it: pip install matplotlib.") from error


def draw(figures: Outlook, file: Path) -> None:
    from foredraft.reports.drawing import INK, line_at_one, look, picture, stacked

    def panel(axes: Axes, shown: Outlook) -> None:
        axes.plot([each.k for each in shown.table], [each.speedup for each in shown.table], **look(0))
        axes.plot([shown.best.k], [shown.best.speedup], marker="o", markersize=12, fillstyle="none", color=INK)
        line_at_one(axes)
        axes.set_ylim(bottom=0.0)
        axes.set(xlabel="draft tokens per run", ylabel="speed-up", title=f"α = {shown.alpha:.3g}, c = {shown.cost:.3g}")

    try:
        picture(lambda: stacked(4.0, [figures], panel), file)
    except OSError as error:
        raise InvalidParameter(f"{file} cannot be written: {error.strerror}.") from error
