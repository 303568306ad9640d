"""From raw runs to figures: one cell per speculation setting, category, batch size and temperature. Pure functions."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from statistics import median, quantiles

from foredraft.bench.measure import OFF, Run
from foredraft.control.economics import VerifyCurve, quotient
from foredraft.proposers.registry import ProposerChoice, parse_spec

ALL = "all"
QUIET = 0.2  # plain runs of the same prompts that differ by more tell that the machine was busy
PLATEAU = 0.02  # a k is on the plateau when its speed-up is within so much of the best

Texts = dict[tuple[float, int], str]  # by temperature and prompt
Times = dict[int, float]  # by group


@dataclass(frozen=True)
class Cell:
    """What one setting did for one category; the category `all` sums over all groups.

    Times are sums, over the groups, of the median over the repeats. `ratio_to_off` is plain decoding's time divided by
    this setting's; its quartiles are those of the groups' own ratios.
    """

    spec: str
    category: str
    batch: int
    temperature: float
    dtype: str
    prompts: int
    tokens_per_s: float
    ratio_to_off: float
    tokens_per_run: float
    acceptance_rate: float
    same_text: bool
    # What follows may be missing in a file that something else has written.
    predicted_ratio: float = 0.0
    ratio_quartiles: list[float] = field(default_factory=list)
    group_sizes: list[int] = field(default_factory=list)
    tokens: float = 0.0  # of one repeat
    seconds: float = 0.0
    drafted_per_run: float = 0.0
    draft_time_per_run_s: float = 0.0
    draft_steps_per_run: float = 0.0  # the same in plain steps: the cost of a draft
    acceptance_per_depth: list[float] = field(default_factory=list)
    by_origin: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Decoded:
    """Runs of sequences that decode in a batch of about this size, with what each run drafted on average."""

    runs: float
    batch: float
    drafted_per_run: float = 0.0
    draft_time_per_run_s: float = 0.0

    def seconds(self, cost: VerifyCurve) -> float:
        """A sequence's share of a run is one part in `batch`; drafting takes its time once for all of them."""
        rows = self.batch * (1 + self.drafted_per_run)
        return self.runs * (self.draft_time_per_run_s + cost.seconds_at(rows)) / self.batch


def predicted_ratio(cost: VerifyCurve, plain_s: float, plain: Decoded, drafted: Decoded) -> float:
    """The speed-up that follows from how many runs it took and what runs of so many rows cost.

    Plain decoding took `plain_s` in all; what of that its runs do not explain (prompts above all) is not sped up.
    """
    decoding = plain.seconds(cost)
    others = max(0.0, plain_s - decoding)
    return (others + decoding) / (others + drafted.seconds(cost))


def cells_of(runs: Sequence[Run], cost: VerifyCurve, dtype: str) -> list[Cell]:
    """One cell per combination that was measured, and one with category `all`. Without plain decoding there is none."""
    # The tokens of plain decoding's first run: every setting, batch and repeat must emit the same.
    texts = {(run.temperature, run.prompt): run.token_ids_hash for run in reversed(runs) if run.spec == OFF}
    parts: dict[tuple[float, int, str], dict[str, list[Run]]] = defaultdict(lambda: defaultdict(list))
    for run in runs:
        for category in {run.category, ALL}:  # a suite may have a category of that name
            parts[run.temperature, run.batch, category][run.spec].append(run)
    places = {key: place for place, key in enumerate(parts)}
    order = sorted(parts, key=lambda key: (key[0], key[1], key[2] == ALL, places[key]))
    specs = sorted({run.spec: None for run in runs}, key=lambda spec: spec != OFF)
    return [
        _cell(category, parts[temperature, batch, category][spec], plain, cost, dtype, texts)
        for temperature, batch, category in order
        if (plain := parts[temperature, batch, category].get(OFF))
        for spec in specs
        if spec in parts[temperature, batch, category]
    ]


def group_times(runs: Iterable[Run]) -> Times:
    """The median over the repeats of each group's time."""
    by_group: dict[int, dict[int, float]] = defaultdict(dict)
    for run in runs:
        by_group[run.group][run.repeat] = run.seconds
    return {group: median(by_repeat.values()) for group, by_repeat in by_group.items()}


def ratio(plain: Times, drafted: Times) -> tuple[float, list[float]]:
    """How many times as long plain decoding took, over the groups that both have; and the quartiles over groups, unless
    there is only one."""
    both = [group for group in plain if group in drafted]
    above, below = (sum(times[group] for group in both) for times in (plain, drafted))
    each = [quotient(plain[group], drafted[group]) for group in both]
    spread = quantiles(each, n=4, method="inclusive") if len(each) > 1 else []
    return quotient(above, below), spread


def unrest(runs: Iterable[Run]) -> tuple[int, int]:
    """How many groups were decoded plain several times, and in how many of them the times differ by more than QUIET:
    something else ran on the machine."""
    times: dict[tuple[float, int, int], dict[int, float]] = defaultdict(dict)
    for run in runs:
        if run.spec == OFF:
            times[run.temperature, run.batch, run.group][run.repeat] = run.seconds
    repeated = [list(by_repeat.values()) for by_repeat in times.values() if len(by_repeat) > 1]
    return len(repeated), sum(max(seconds) > (1 + QUIET) * min(seconds) for seconds in repeated)


def flip(batches: Sequence[float], ratios: Sequence[float]) -> float | None:
    """The batch size from which speculation no longer pays, on straight lines between those that were measured; None
    if it always pays, or never did."""
    points = list(zip(batches, ratios, strict=True))
    for (left, high), (right, low) in pairwise(points):
        if high >= 1 > low:
            return left + (right - left) * (high - 1) / (high - low)
    return None


def k_sweeps(specs: Iterable[str]) -> dict[str, dict[int, str]]:
    """The settings that differ only in one k, by what they share (with `k=…` in its place) and then by k."""
    sweeps: dict[str, dict[int, str]] = defaultdict(dict)
    for spec in specs:
        parsed = parse_spec(spec)
        lengths = [choice.options["k"] for choice in parsed.choices if choice.options.get("k", "").isdecimal()]
        if len(lengths) == 1:
            shared = "+".join(str(_with_any_k(choice)) for choice in parsed.choices)
            sweeps[f"auto({shared})" if parsed.adaptive else shared][int(lengths[0])] = spec
    return {shared: dict(sorted(by_k.items())) for shared, by_k in sweeps.items() if len(by_k) > 1}


def plateau(ratios: dict[int, float]) -> int:
    """The smallest k whose speed-up is within PLATEAU of the best."""
    best = max(ratios.values())
    return min(k for k, value in ratios.items() if value >= best * (1 - PLATEAU))


def _with_any_k(choice: ProposerChoice) -> ProposerChoice:
    return replace(choice, options={**choice.options, "k": "…"}) if "k" in choice.options else choice


def _cell(
    category: str, runs: Sequence[Run], plain: Sequence[Run], cost: VerifyCurve, dtype: str, texts: Texts
) -> Cell:
    times, plain_times = group_times(runs), group_times(plain)
    ratio_to_off, spread = ratio(plain_times, times)
    sizes = {run.group: run.group_size for run in runs}
    repeats = len({run.repeat for run in runs})
    emitted, target_runs, drafted = (
        sum(values) for values in zip(*((r.tokens, r.target_runs, r.drafted) for r in runs))
    )
    decoded = _decoded(runs)
    by_origin: Counter[str] = Counter()
    for run in runs:
        by_origin.update(run.by_origin)
    first = runs[0]
    return Cell(
        spec=first.spec,
        category=category,
        batch=first.batch,
        temperature=first.temperature,
        dtype=dtype,
        prompts=len({run.prompt for run in runs}),
        tokens_per_s=quotient(emitted / repeats, sum(times.values())),
        ratio_to_off=ratio_to_off,
        tokens_per_run=quotient(emitted, target_runs),
        acceptance_rate=quotient(sum(run.accepted for run in runs), drafted),
        same_text=all(
            run.error is None and texts.get((run.temperature, run.prompt)) == run.token_ids_hash for run in runs
        ),
        predicted_ratio=predicted_ratio(cost, sum(plain_times.values()), _decoded(plain), decoded),
        ratio_quartiles=spread,
        group_sizes=list(sizes.values()),
        tokens=emitted / repeats,
        seconds=sum(times.values()),
        drafted_per_run=decoded.drafted_per_run,
        draft_time_per_run_s=decoded.draft_time_per_run_s,
        draft_steps_per_run=decoded.draft_time_per_run_s / cost.seconds_at(max(1.0, decoded.batch)),
        acceptance_per_depth=_acceptance_per_depth(runs),
        by_origin=dict(by_origin),
    )


def _decoded(runs: Sequence[Run]) -> Decoded:
    """The runs of one repeat."""
    target_runs = sum(run.target_runs for run in runs)
    return Decoded(
        runs=target_runs / len({run.repeat for run in runs}),
        batch=quotient(sum(run.group_size * run.target_runs for run in runs), target_runs),
        drafted_per_run=quotient(sum(run.drafted for run in runs), target_runs),
        draft_time_per_run_s=quotient(sum(run.draft_time_s for run in runs), target_runs),
    )


def _acceptance_per_depth(runs: Sequence[Run]) -> list[float]:
    """The mean over the texts that drafted so deep, weighted by how much each drafted."""
    deepest = max((len(run.acceptance_per_depth) for run in runs), default=0)
    means: list[float] = []
    for depth in range(deepest):
        deep = [run for run in runs if len(run.acceptance_per_depth) > depth]
        means.append(
            quotient(sum(run.acceptance_per_depth[depth] * run.drafted for run in deep), sum(r.drafted for r in deep))
        )
    return means
