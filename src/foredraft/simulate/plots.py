"""The plots of a simulation. Needs matplotlib."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import isfinite

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator

from foredraft.reports.drawing import GREY, Plot, drawn, look, note, stacked
from foredraft.simulate.fleet import Outcome, Slo
from foredraft.simulate.study import TrafficAnswer


def draw_all(answers: Sequence[TrafficAnswer], slo: Slo) -> list[Plot]:
    """Goodput, waiting times and machines, one panel for each traffic."""
    return [
        drawn(
            "goodput",
            "Goodput against the rate of requests",
            "Requests per second that keep the objective. On the dashed line all of them do; the dotted line is the "
            "rate that was asked about. In the grey area, more arrive than any setting serves.",
            lambda: _curves(answers, lambda outcome: outcome.goodput, "good requests per s", diagonal=True),
        ),
        drawn(
            "token_time",
            "What a user waits for a token",
            "Mean time from arrival to the last token, divided by the tokens. Where fixed speculation rises above off, "
            "it has flipped (×): its rows cost other users more than they bring.",
            lambda: _curves(answers, lambda outcome: 1000 * outcome.token_s, "ms per token", log=True, flips=True),
        ),
        drawn(
            "ttft",
            "Time to the first token, 99th percentile",
            "The grey line is the objective, where there is one.",
            lambda: _curves(answers, lambda outcome: outcome.ttft_p99, "seconds", log=True, limit=slo.ttft),
        ),
        drawn(
            "itl",
            "Time between tokens, 99th percentile",
            "The grey line is the objective, where there is one.",
            lambda: _curves(answers, lambda outcome: 1000 * outcome.itl_p99, "ms", log=True, limit=1000 * slo.itl),
        ),
    ]


def _curves(
    answers: Sequence[TrafficAnswer],
    value: Callable[[Outcome], float],
    label: str,
    diagonal: bool = False,
    log: bool = False,
    flips: bool = False,
    limit: float = float("inf"),
) -> Figure:
    def panel(axes: Axes, answer: TrafficAnswer) -> None:
        for place, setting in enumerate(answer.settings):
            arrived = [each.qps for each in setting.sweep]
            axes.plot(arrived, [value(each) for each in setting.sweep], label=setting.spec, **look(place))
        if log:
            axes.set_yscale("log")
            axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
            axes.yaxis.set_major_formatter("{x:g}")  # powers of ten would need mathematical text
            axes.yaxis.set_minor_formatter("")
        else:
            axes.set_ylim(bottom=0)
        if diagonal:
            axes.plot(answer.rates, answer.rates, color=GREY, linestyle="--", linewidth=1)
        if isfinite(limit):
            axes.axhline(limit, color=GREY, linewidth=1)
        for place, setting in enumerate(answer.settings if flips else ()):
            if setting.flip_qps is not None:
                axes.axvline(setting.flip_qps, color=look(place)["color"], linestyle=":", linewidth=1)
                told = f"flips at {setting.flip_qps:.2g}/s"
                note(axes, told, (setting.flip_qps, 0.9), (4, 0), xycoords=("data", "axes fraction"))
        most = max(setting.most_qps for setting in answer.settings)
        axes.axvspan(most, max(most, answer.rates[-1]), color=GREY, alpha=0.2, linewidth=0)
        note(axes, "overload", (most, 1.0), (3, 3), xycoords=("data", "axes fraction"), color=GREY)
        if answer.rates[0] <= answer.qps <= answer.rates[-1]:
            axes.axvline(answer.qps, color=GREY, linestyle=":", linewidth=1)
        axes.set(xlabel="requests per second", ylabel=label, title=answer.traffic)

    return stacked(3.0, answers, panel)
