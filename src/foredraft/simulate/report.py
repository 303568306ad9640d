"""A simulation for people: rows of a table, sentences, and a page with plots."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any

from foredraft.bench.measure import OFF
from foredraft.reports.page import facts_list, html_cells, html_page, html_table, plot_sections, write_page
from foredraft.simulate.fleet import Outcome
from foredraft.simulate.study import MOST_REPLICAS, SettingAnswer, Study, TrafficAnswer

if TYPE_CHECKING:
    from foredraft.reports.drawing import Plot

COLUMNS = ("traffic", "setting", "goodput/s", "good", "tokens/s", "TTFT p50", "TTFT p99", "ITL p50", "ITL p99")
FLEET_COLUMNS = (*COLUMNS, "carries/s", "machines", "flips at")
OVERLOAD = "overload"


def premise(study: Study, replicas: int) -> str:
    """What was simulated."""
    limits = [f"{name} ≤ {seconds:g} s" for name, seconds in vars(study.slo).items() if isfinite(seconds)]
    objective = " and ".join(limits) if limits else "no objective: every finished request is good"
    fleet = f"{_machines(replicas)} as in {study.machine.name}"
    return f"{fleet}; {objective}, for {study.attain:.0%} of the requests."


def outcome_row(traffic: str, spec: str, outcome: Outcome) -> tuple[str, ...]:
    """In the order of COLUMNS."""
    return (
        traffic,
        spec,
        _figure(outcome.goodput),
        f"{outcome.good_share:.1%}",
        f"{outcome.tokens_per_s:.0f}",
        *(f"{_figure(seconds)} s" for seconds in (outcome.ttft_p50, outcome.ttft_p99)),
        *(f"{_figure(1000 * seconds)} ms" for seconds in (outcome.itl_p50, outcome.itl_p99)),
    )


def _figure(value: float) -> str:
    """Three digits, and more before the point where it has them."""
    return f"{value:.3g}" if value < 1000 else f"{value:,.0f}"


def fleet_row(answer: TrafficAnswer, setting: SettingAnswer) -> tuple[str, ...]:
    """In the order of FLEET_COLUMNS. In an overload, the time to the first token is as long as the simulation."""
    seen = outcome_row(answer.traffic, setting.spec, setting.outcome)
    if answer.is_overload(setting):
        seen = tuple(
            OVERLOAD if column.startswith("TTFT") else cell for column, cell in zip(COLUMNS, seen, strict=True)
        )
    return (
        *seen,
        _figure(setting.capacity_qps),
        "–" if setting.replicas_needed is None else str(setting.replicas_needed),
        _flip(setting),
    )


def _flip(setting: SettingAnswer) -> str:
    if setting.flip_qps is not None:
        return f"{setting.flip_qps:.3g}/s"
    return "–" if setting.is_adaptive or setting.spec == OFF else "pays at all" if setting.pays else "never pays"


def sentences(answer: TrafficAnswer) -> list[str]:
    """What follows for a person who buys machines."""
    plain, rate = answer.plain, f"{answer.qps:.3g} requests per second"
    if plain.replicas_needed is None:
        told = [f"{answer.traffic}: at {rate}, plain decoding {_why_none(plain)}."]
    else:
        told = [f"{answer.traffic}: {rate} need {_machines(plain.replicas_needed)} with plain decoding."]
    if refused := plain.outcome.refused:
        told.append(f"{refused} requests do not fit into the KV cache of a machine: give it more --kv-cache-tokens.")
    told += _limits(answer)
    for setting in answer.settings[1:]:
        told.append(_comparison(setting, plain))
        if setting.flip_qps is not None:
            told.append(f"{setting.spec} flips at {setting.flip_qps:.3g}/s: above that, off serves users faster.")
    return told


def _limits(answer: TrafficAnswer) -> list[str]:
    """What the machines of the simulation cannot do at this rate."""
    if full := [setting for setting in answer.settings if answer.is_overload(setting)]:
        most = max(full, key=lambda setting: setting.most_qps)
        who = "every setting" if len(full) == len(answer.settings) else ", ".join(setting.spec for setting in full)
        return [
            f"For the machines of this simulation that is an overload with {who}: they serve at most "
            f"{most.most_qps:.3g} a second ({most.spec}), and the queue grows without end."
        ]
    most = max(answer.settings, key=lambda setting: setting.capacity_qps)
    if 0 < most.capacity_qps < answer.qps:
        carried = f"{most.capacity_qps:.3g} a second ({most.spec})"
        return [f"The machines of this simulation carry no more than {carried} within the objective."]
    return []


def _comparison(setting: SettingAnswer, plain: SettingAnswer) -> str:
    needed, before = setting.replicas_needed, plain.replicas_needed
    if needed is None:
        return f"{setting.spec} {_why_none(setting)}."
    if before is None:
        return f"{setting.spec} keeps it with {_machines(needed)}."
    carries = ""
    if plain.capacity_qps:
        carries = f" (one fleet carries {setting.capacity_qps / plain.capacity_qps:.2f} times as much)"
    if needed == before:
        return f"{setting.spec} needs as many{carries}."
    verb, difference = ("saves", before - needed) if needed < before else ("costs", needed - before)
    return f"{setting.spec} {verb} {_machines(difference)}{'' if verb == 'saves' else ' more'}{carries}."


def _why_none(setting: SettingAnswer) -> str:
    """Why a setting has no number of machines that are enough."""
    if setting.capacity_qps:
        return f"would need more than {MOST_REPLICAS} machines"
    return "misses the objective with any number of machines"


def _machines(count: int) -> str:
    return f"{count} machine" + ("s" if count != 1 else "")


def write_report(
    answers: Sequence[TrafficAnswer], study: Study, replicas: int, facts: dict[str, Any], folder: Path
) -> bool:
    """`report.html` with plots, where matplotlib is installed; says whether it is."""

    def draw() -> list[Plot]:
        from foredraft.simulate.plots import draw_all

        return draw_all(answers, study.slo)

    return write_page(folder, lambda plots: _page(answers, premise(study, replicas), facts, plots), draw)


def _page(answers: Sequence[TrafficAnswer], simulated: str, facts: dict[str, Any], plots: Sequence[Plot]) -> str:
    told = "".join(f'<p class="answer">{escape(" ".join(sentences(answer)))}</p>' for answer in answers)
    rows = (f"<tr>{html_cells(fleet_row(answer, setting))}</tr>" for answer in answers for setting in answer.settings)
    body = f"""{told}
<p class="note">Simulated: {escape(simulated)}</p>
{html_table(FLEET_COLUMNS, rows)}
<p class="note">Goodput, tokens and times are those at the rate that was asked about. “carries” is the highest rate that
these machines serve within the objective, “machines” the fewest that serve the rate that was asked about. In an
overload more arrive than all machines serve: the queue grows without end, and so does the time to the first token.</p>
{plot_sections(plots)}
<h2>Where and how</h2>
{facts_list(facts)}"""
    return html_page("A fleet, simulated", body)
