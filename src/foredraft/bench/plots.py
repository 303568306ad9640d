"""The plots of a benchmark, each a figure without any state of pyplot's. Needs matplotlib."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from foredraft.bench.cells import ALL, Cell, flip, k_sweeps, plateau
from foredraft.bench.measure import OFF
from foredraft.control.economics import VerifyCurve
from foredraft.reports.drawing import GREY, INK, MARKERS, Plot, colour, drawn, line_at_one, look, note, stacked


def draw_all(cells: Sequence[Cell], cost: VerifyCurve) -> list[Plot]:
    """Every plot that these cells have enough figures for."""
    drafted = [cell for cell in cells if cell.spec != OFF]
    sweeps = k_sweeps(_unique(cell.spec for cell in drafted))
    plots = [
        (
            bool(drafted),
            "speedup",
            "Speed-up by category",
            "Plain decoding is 1. Bars are ratios of summed times; whiskers span the quartiles of the groups' own "
            "ratios.",
            lambda: _by_category(drafted, lambda cell: cell.ratio_to_off, "speed-up over off", whiskers=True),
        ),
        (
            bool(drafted),
            "tokens_per_run",
            "Tokens per run of the model",
            "What a speed-up is made of. Plain decoding has 1.",
            lambda: _by_category(drafted, lambda cell: cell.tokens_per_run, "tokens per run", whiskers=False),
        ),
        (
            any(cell.acceptance_per_depth for cell in drafted),
            "acceptance",
            "Acceptance by depth",
            "The share of drafts of at least this depth that were accepted down to it.",
            lambda: _acceptance(drafted),
        ),
        (
            True,
            "verify_cost",
            "What a run of the model costs",
            "Drafts are cheap while the curve is flat: their rows cost no more than the one row of plain decoding.",
            lambda: _verify_cost(cost),
        ),
        (
            bool(drafted),
            "predicted",
            "Predicted and measured speed-up",
            "Each point is one category. Points below the line gained less than runs and rows promise. A long prompt "
            "is one reason: it takes the same time with and without drafts.",
            lambda: _predicted(drafted),
        ),
        (
            len({cell.batch for cell in drafted}) > 1,
            "batch",
            "Speed-up against batch size",
            "Where a line falls below 1, speculation no longer pays: the rows of other sequences fill the run.",
            lambda: _batches(drafted),
        ),
        (
            bool(sweeps),
            "k_sweep",
            "Speed-up against draft length",
            "The dotted line marks the smallest k that is within two percent of the best.",
            lambda: _k_sweep(drafted, sweeps),
        ),
    ]
    return [drawn(name, title, note, draw) for is_possible, name, title, note, draw in plots if is_possible]


def _by_category(cells: Sequence[Cell], value: Callable[[Cell], float], label: str, whiskers: bool) -> Figure:
    specs = _unique(cell.spec for cell in cells)
    categories = [*(name for name in _unique(cell.category for cell in cells) if name != ALL), ALL]
    width = 0.8 / len(specs)

    def panel(axes: Axes, setting: tuple[float, int]) -> None:
        found = {(c.spec, c.category): c for c in cells if (c.temperature, c.batch) == setting}
        for place, spec in enumerate(specs):
            shown = [(x, found[spec, name]) for x, name in enumerate(categories) if (spec, name) in found]
            left = [x + (place - (len(specs) - 1) / 2) * width for x, _ in shown]
            axes.bar(left, [value(cell) for _, cell in shown], width * 0.92, label=spec, color=colour(place))
            if whiskers:
                ends = [(x, *cell.ratio_quartiles) for x, (_, cell) in zip(left, shown) if cell.ratio_quartiles]
                for x, low, _, high in ends:
                    axes.vlines(x, low, high, colors=INK, linewidth=1)
        line_at_one(axes)
        axes.set_xticks(range(len(categories)), [_short(name) for name in categories], rotation=20, ha="right")
        axes.set(ylabel=label, title=_title(*setting))

    return stacked(3.4, _unique((cell.temperature, cell.batch) for cell in cells), panel)


def _acceptance(cells: Sequence[Cell]) -> Figure:
    smallest = min(cell.batch for cell in cells)
    specs = _unique(cell.spec for cell in cells)

    def panel(axes: Axes, temperature: float) -> None:
        for cell in cells:
            if (cell.category, cell.batch, cell.temperature) == (ALL, smallest, temperature):
                place, depths = specs.index(cell.spec), range(1, len(cell.acceptance_per_depth) + 1)
                axes.plot(depths, cell.acceptance_per_depth, label=cell.spec, **look(place))
        axes.set(xlabel="depth", ylabel="accepted", ylim=(0, 1.03), title=_title(temperature, smallest))
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))

    return stacked(3.2, _unique(cell.temperature for cell in cells), panel)


def _verify_cost(cost: VerifyCurve) -> Figure:
    def panel(axes: Axes, milliseconds: list[float]) -> None:
        axes.plot(cost.rows, milliseconds, **look(0))
        for rows, value in zip(cost.rows, milliseconds, strict=True):
            note(axes, f"{value / milliseconds[0]:.2f}x", (rows, value), (0, 7), ha="center")
        axes.set_xscale("log", base=2)
        axes.set_xticks(cost.rows, [str(rows) for rows in cost.rows])
        axes.set(xlabel="rows in the run", ylabel="milliseconds", ylim=(0, 1.15 * max(milliseconds)))

    return stacked(3.2, [[1000 * seconds for seconds in cost.seconds]], panel)


def _predicted(cells: Sequence[Cell]) -> Figure:
    def panel(axes: Axes, batches: list[int]) -> None:
        for place, spec in enumerate(_unique(cell.spec for cell in cells)):
            for number, batch in enumerate(batches):
                shown = [c for c in cells if (c.spec, c.batch) == (spec, batch) and c.category != ALL]
                axes.scatter(
                    [cell.predicted_ratio for cell in shown],
                    [cell.ratio_to_off for cell in shown],
                    label=spec if len(batches) == 1 else f"{spec}, batch {batch}",
                    color=colour(place),
                    marker=MARKERS[number % len(MARKERS)],
                    alpha=0.85,
                )
        ends = [value for cell in cells for value in (cell.predicted_ratio, cell.ratio_to_off)]
        low, high = min(0.9, *ends), max(1.1, *ends)
        axes.plot([low, high], [low, high], color=GREY, linestyle="--", linewidth=1)
        axes.set(xlabel="predicted speed-up", ylabel="measured speed-up")

    return stacked(5.0, [_unique(cell.batch for cell in cells)], panel)


def _batches(cells: Sequence[Cell]) -> Figure:
    def panel(axes: Axes, temperature: float) -> None:
        for place, spec in enumerate(_unique(cell.spec for cell in cells)):
            shown = [c for c in cells if (c.spec, c.temperature, c.category) == (spec, temperature, ALL)]
            batches, ratios = [cell.batch for cell in shown], [cell.ratio_to_off for cell in shown]
            axes.plot(batches, ratios, label=spec, **look(place))
            crossing = flip(batches, ratios)
            if crossing is not None:
                axes.plot([crossing], [1.0], marker="x", markersize=9, color=colour(place))
                note(axes, f"flips at {crossing:.1f}", (crossing, 1.0), (4, 6))
        line_at_one(axes)
        axes.set_xticks(_unique(cell.batch for cell in cells))
        axes.set(xlabel="batch", ylabel="speed-up over off", title=f"temperature {temperature:g}")

    return stacked(3.4, _unique(cell.temperature for cell in cells), panel)


def _k_sweep(cells: Sequence[Cell], sweeps: dict[str, dict[int, str]]) -> Figure:
    def panel(axes: Axes, setting: tuple[float, int]) -> None:
        found = {c.spec: c for c in cells if (c.temperature, c.batch) == setting and c.category == ALL}
        for place, (shared, by_k) in enumerate(sweeps.items()):
            ratios = {k: found[spec].ratio_to_off for k, spec in by_k.items() if spec in found}
            axes.plot(list(ratios), list(ratios.values()), label=shared, **look(place))
            start = plateau(ratios)
            axes.axvline(start, color=colour(place), linestyle=":", linewidth=1.2)
            aligned = {"ha": "right"} if start == max(ratios) else {}
            note(axes, f"plateau from {start}", (start, ratios[start]), (-4 if aligned else 4, -12), **aligned)
        line_at_one(axes)
        axes.set_xticks(sorted({k for by_k in sweeps.values() for k in by_k}))
        axes.set(xlabel="k", ylabel="speed-up over off", title=_title(*setting))

    return stacked(3.4, _unique((cell.temperature, cell.batch) for cell in cells), panel)


def _title(temperature: float, batch: int) -> str:
    return f"batch {batch}, temperature {temperature:g}"


def _short(name: str) -> str:
    return name if len(name) <= 24 else name[:23] + "…"


def _unique(values: Any) -> list[Any]:
    return list(dict.fromkeys(values))
