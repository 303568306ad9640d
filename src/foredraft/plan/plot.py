"""The picture of `foredraft plan`: speed-up against the length of drafts."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

from foredraft.control.economics import Outlook
from foredraft.errors import InvalidParameter

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
    figure = import_module("matplotlib.figure").Figure(figsize=(6, 4), layout="constrained")
    axes = figure.subplots()
    axes.plot([each.k for each in figures.table], [each.speedup for each in figures.table], marker="o")
    axes.plot([figures.best.k], [figures.best.speedup], marker="o", markersize=12, fillstyle="none", color="black")
    axes.axhline(1.0, color="grey", linestyle="--")
    axes.set_ylim(bottom=0.0)
    axes.set(xlabel="draft tokens per run", ylabel="speed-up", title=f"α = {figures.alpha:.3g}, c = {figures.cost:.3g}")
    try:
        figure.savefig(file)
    except OSError as error:
        raise InvalidParameter(f"{file} cannot be written: {error.strerror}.") from error
