"""What `foredraft plan` starts from where no figures are given: a proposer's acceptance and costs, measured on this
machine or taken from the cell of a benchmark."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from statistics import fmean
from typing import TYPE_CHECKING

from foredraft.bench.cells import Cell
from foredraft.bench.measure import verify_curve
from foredraft.bench.suite import built_in
from foredraft.control.economics import VerifyCurve, acceptance_behind, quotient
from foredraft.errors import InvalidSpec
from foredraft.params import SamplingParams
from foredraft.proposers.registry import ProposerChoice, parse_spec, read_options

if TYPE_CHECKING:
    from foredraft.llm import LLM
    from foredraft.outputs import SpecMetrics

MAX_TOKENS = 48


@dataclass(frozen=True)
class PlanInputs:
    """The acceptance of a draft token behind an accepted path, its cost in plain steps, a run's time by rows."""

    alpha: float
    cost: float
    curve: VerifyCurve | None
    batch: int = 1  # how many sequences shared a run
    beside: float = 0.0  # plain steps of a token beside its runs, prompts above all: no draft saves them


def chain_spec(spec: str) -> str:
    """The spec with chains in place of trees, because a plan is about chains."""
    parsed = parse_spec(spec)
    return spec if parsed.adaptive or not parsed.choices else "+".join(str(_as_chain(one)) for one in parsed.choices)


def _as_chain(choice: ProposerChoice) -> ProposerChoice:
    has_trees = hasattr(read_options(choice), "tree")
    return replace(choice, options={**choice.options, "tree": "chain"}) if has_trees else choice


def measured_inputs(llm: LLM, spec: str, progress: Callable[[int, int], None]) -> PlanInputs:
    """Draft for one built-in prompt of each kind, greedily and alone, and time the target by its rows. `progress` is
    told the measurements that are done, and how many there are."""
    if parse_spec(spec).adaptive or spec == "off":
        raise InvalidSpec(f"spec={spec!r} cannot be planned for; name a proposer, for instance suffix or ngram:k=6.")
    _refuse_copies(llm.dtype, spec)
    first_of_kind = {question.category: question for question in reversed(built_in())}
    params = SamplingParams(max_tokens=MAX_TOKENS, temperature=0)
    room = llm.max_model_len - MAX_TOKENS
    prompts = [question.encoded(llm)[:room] for question in first_of_kind.values()]
    curve = verify_curve(llm)
    progress(1, 1 + len(prompts))
    metrics: list[SpecMetrics] = []
    for prompt in prompts:
        metrics.append(llm.generate([prompt], params, spec=spec)[0].metrics)
        progress(1 + len(metrics), 1 + len(prompts))
    # Tokens of drafts that are reached, and those of them that are accepted: a token is reached if the one before is.
    accepted = sum(each.target_runs * sum(each.acceptance_per_depth) for each in metrics)
    reached = sum(each.target_runs * sum([1.0, *each.acceptance_per_depth][:-1]) for each in metrics)
    drafts = sum(each.drafted_tokens for each in metrics)
    if not drafts:
        raise InvalidSpec(f"spec={spec!r} drafted nothing for the built-in prompts; there is nothing to plan with.")
    draft_s = sum(each.draft_time_s for each in metrics)
    return PlanInputs(min(1.0, accepted / reached), draft_s / drafts / curve.seconds_at(1), curve)


def inputs_of(cell: Cell, plain: Cell | None, curve: VerifyCurve | None) -> PlanInputs:
    """What explains the speed-up that a benchmark has measured for a setting: drafts as long as its mean bring its
    tokens per run, and cost all that its runs took beyond those of the target. `plain` is the cell of plain decoding
    beside it."""
    batch = max(1, round(fmean(cell.group_sizes or [cell.batch])))
    drafted = drafted_per_run(cell)
    if not drafted:
        return PlanInputs(cell.acceptance_rate, 0.0, curve, batch)
    alpha = acceptance_behind(cell.tokens_per_run, drafted)
    beside = 0.0
    if curve is not None and plain is not None and plain.tokens_per_s:
        beside = max(0.0, batch / plain.tokens_per_s / curve.seconds_at(batch) - 1)
    verify = 1.0 if curve is None else curve.seconds_at(batch * (1 + drafted)) / curve.seconds_at(batch)
    run = cell.tokens_per_run * ((1 + beside) / cell.ratio_to_off - beside)
    return PlanInputs(alpha, max(0.0, (run - verify) / drafted), curve, batch, beside)


def explained_ratio(found: PlanInputs, cell: Cell) -> float:
    """The speed-up that follows from these figures for drafts as long as those of the cell: its own, unless it is
    faster than drafts without any cost would be."""
    drafted = drafted_per_run(cell)
    plain = 1.0 if found.curve is None else found.curve.seconds_at(found.batch)
    run = 1.0 if found.curve is None else found.curve.seconds_at(found.batch * (1 + drafted)) / plain
    token = (drafted * found.cost + run) / max(1.0, cell.tokens_per_run)
    return (1 + found.beside) / (token + found.beside)


def flip_of(found: PlanInputs, cell: Cell, batch_max: int) -> int | None:
    """The smallest batch at which drafts as long as those of the cell, accepted as often and as costly, no longer pay;
    None where they pay up to batch_max. A shorter draft may still pay there."""
    sizes = range(found.batch, batch_max + 1)
    return next((size for size in sizes if explained_ratio(replace(found, batch=size), cell) <= 1), None)


def drafted_per_run(cell: Cell) -> float:
    """As measured, or as it follows from what was accepted; 0 where a file has neither."""
    return cell.drafted_per_run or quotient(max(0.0, cell.tokens_per_run - 1), cell.acceptance_rate)


def _refuse_copies(dtype: str, spec: str) -> None:
    """A copy of the target in as many bits is the target: always accepted, equally slow, and no basis for a plan."""
    for choice in parse_spec(spec).choices:
        bits = choice.options.get("bits", "4")
        if choice.name == "quantised" and dtype in (f"int{bits}", "int4"):
            raise InvalidSpec(
                f"spec={spec!r} would draft with a copy of the model in {bits} bits, but the model itself has no more "
                f"({dtype}); name another proposer, or a --dtype of more bits."
            )
