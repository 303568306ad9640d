"""What a simulation knows of a machine: the measured cost of runs, of a step's other work and of drafts, and how far
drafts of each kind of request are accepted."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate
from pathlib import Path

from foredraft.bench.cells import ALL, Cell
from foredraft.bench.measure import OFF
from foredraft.bench.results_file import read_results
from foredraft.control.costs import Calibration, Costs
from foredraft.control.economics import quotient
from foredraft.errors import InvalidParameter, InvalidSpec
from foredraft.proposers.registry import ProposerChoice, Spec, parse_spec, proposer_class

_CONTEXT = 256  # tokens before the rows of a benchmark's verify cost, see engine/calibration.py


@dataclass(frozen=True)
class DraftProfile:
    """How a proposer drafts for one kind of request, run by run and independently of earlier runs."""

    coverage: float  # the share of runs that get a draft
    lengths: tuple[float, ...]  # the share of drafts that reach a depth, from 1 on
    survivals: tuple[float, ...]  # the share of those that are accepted down to it; never more than at the depth before

    @property
    def tokens_per_run(self) -> float:
        return 1 + self.coverage * sum(map(float.__mul__, self.lengths, self.survivals))

    @classmethod
    def of_counts(cls, runs: int, drafted_per_depth: Sequence[int], accepted_per_depth: Sequence[int]) -> DraftProfile:
        """From the counters of requests: runs of the target, drafts that reached a depth, and how many of those were
        accepted down to it."""
        if not runs or not any(drafted_per_depth):
            return NEVER
        drafts = drafted_per_depth[0]
        shares = map(quotient, accepted_per_depth, drafted_per_depth)
        lengths = tuple(count / drafts for count in drafted_per_depth)
        return cls(min(1.0, drafts / runs), lengths, tuple(accumulate(shares, min)))

    @classmethod
    def of_cell(cls, cell: Cell) -> DraftProfile:
        """From a cell of a benchmark, which knows how much was drafted but not how long each draft was: they all get
        the one length at which the acceptance by depth gives the cell's acceptance rate."""
        survivals = list(accumulate(cell.acceptance_per_depth or [cell.acceptance_rate], min))
        if not cell.drafted_per_run or not survivals[0]:
            return NEVER
        length = _length_of_rate(survivals, cell.acceptance_rate)
        whole = int(length)
        lengths = (1.0,) * whole + ((length - whole,) if length > whole else ())
        return cls(min(1.0, cell.drafted_per_run / length), lengths, tuple(survivals[: len(lengths)]))

    @classmethod
    def constant(cls, alpha: float, k: int) -> DraftProfile:
        """Drafts of k tokens in every run, each accepted with probability alpha once it is reached."""
        return cls(1.0, (1.0,) * k, tuple(alpha**depth for depth in range(1, k + 1)))


NEVER = DraftProfile(0.0, (), ())


@dataclass(frozen=True)
class DraftFigures:
    """A proposer on this machine: profiles by kind of request, and its time for one sequence."""

    name: str
    free: bool  # takes next to no time, as its class declares it
    by_kind: Mapping[str, DraftProfile]
    seconds: float  # of a call of a free proposer, or of one depth of another's draft

    def profile(self, kind: str) -> DraftProfile:
        """That of a kind, or of all kinds together where the kind was not measured."""
        return self.by_kind.get(kind) or self.by_kind.get(ALL) or self.common

    @cached_property
    def common(self) -> DraftProfile:
        """The mean over the kinds: what a proposer itself knows of its acceptance before it is verified."""
        if ALL in self.by_kind:
            return self.by_kind[ALL]
        profiles = [profile for profile in self.by_kind.values() if profile.coverage] or [NEVER]
        depth = max(len(profile.lengths) for profile in profiles)

        def mean(values: Iterable[tuple[float, ...]]) -> tuple[float, ...]:
            return tuple(sum(column) / len(profiles) for column in zip(*((*v, *(0.0,) * (depth - len(v))) for v in values)))

        coverage = sum(profile.coverage for profile in profiles) / len(profiles)
        return DraftProfile(coverage, mean(p.lengths for p in profiles), mean(p.survivals for p in profiles))

    @property
    def k(self) -> int:
        """The longest draft."""
        return max((len(profile.lengths) for profile in self.by_kind.values()), default=0)


@dataclass(frozen=True)
class Machine:
    """One machine with one model. `step_s` and `sequence_s` are the time of a step beside drafts and the run: for any
    step, and for every sequence in it."""

    name: str
    calibration: Calibration
    proposers: Mapping[str, DraftFigures] = field(default_factory=dict)
    step_s: float = 0.0
    sequence_s: float = 0.0

    @cached_property
    def _costs(self) -> Costs:
        return Costs(self.calibration)  # never told of a run, so it stays what was measured

    def run_s(self, rows: int, keys: int) -> float:
        """Seconds of a run of the target."""
        return self._costs.run(rows, keys)

    def overhead_s(self, sequences: int) -> float:
        """Seconds of a step beside drafts and the run."""
        return self.step_s + self.sequence_s * sequences

    def draft_s(self, figures: DraftFigures, sequences: int, depth: int) -> float:
        """Seconds of a call of a proposer. One that runs a model is taken to slow down with the batch as the target
        does."""
        if figures.free:
            return figures.seconds * sequences
        curve = self.calibration.curve
        return figures.seconds * depth * curve.seconds_at(max(1, sequences)) / curve.seconds_at(1)

    def spec(self, text: str) -> Spec:
        """A speculation string over what was measured here; `auto` is over all of it."""
        if text == "auto":
            return Spec(tuple(ProposerChoice(*_choice(name)) for name in self.proposers), adaptive=True)
        spec = parse_spec(text)
        for choice in spec.choices:
            if str(choice) not in self.proposers:
                known = ", ".join(self.proposers) or "nothing but off"
                raise InvalidSpec(f"spec={text!r}: {choice} was not measured on {self.name}; there is {known}.")
        return spec

    def with_proposer(self, name: str, figures: DraftFigures) -> Machine:
        return replace(self, proposers={**self.proposers, name: figures})


def read_machine(file: Path) -> Machine:
    """The machine of a `results.json` that `foredraft bench` wrote, with every fixed proposer that was measured. Cells of
    the smallest batch count: there the proposer had the machine to itself."""
    cells, curve = read_results(file)
    if curve is None:
        raise InvalidParameter(f"{file} holds no verify_cost; write it again with foredraft bench.")
    proposers: dict[str, DraftFigures] = {}
    for text in dict.fromkeys(cell.spec for cell in cells if cell.spec != OFF):
        spec = parse_spec(text)
        mine = [cell for cell in cells if cell.spec == text]
        smallest = min((cell.batch, cell.temperature) for cell in mine)
        mine = [cell for cell in mine if (cell.batch, cell.temperature) == smallest]
        if not spec.adaptive and len(spec.choices) == 1:
            proposers[str(spec.choices[0])] = _figures(spec.choices[0], mine)
    return Machine(file.name, Calibration(curve, _CONTEXT, 0.0), proposers)


def _figures(choice: ProposerChoice, cells: Sequence[Cell]) -> DraftFigures:
    by_kind = {cell.category: DraftProfile.of_cell(cell) for cell in cells}
    free: bool = proposer_class(choice.name).free
    drafted, seconds = (sum(getattr(c, name) for c in cells) for name in ("drafted_per_run", "draft_time_per_run_s"))
    per_call = seconds / len(cells) / cells[0].batch  # every sequence of a batch waits for the drafts of all
    return DraftFigures(choice.name, free, by_kind, per_call if free else quotient(per_call * len(cells), drafted))


def assumed(text: str, plain_s: float) -> tuple[str, DraftFigures]:
    """A proposer that there is not yet, from `NAME:alpha=A,cost=C,k=K`: the acceptance of a draft token, its cost in
    plain steps, and the length of drafts."""
    name, _, settings = text.partition(":")
    try:
        values = {key: float(value) for key, value in (pair.split("=") for pair in settings.split(","))}
        alpha, cost, k = values.pop("alpha"), values.pop("cost"), values.pop("k")
        parse_spec(name)
        if values or not 0 <= alpha <= 1 or not 0 <= cost < 1e3 or k != int(k) or not 1 <= k <= 64:
            raise ValueError
    except (ValueError, KeyError) as error:
        raise InvalidParameter(
            f"assume={text!r} must be NAME:alpha=A,cost=C,k=K: a proposer's name, an acceptance from 0 to 1, the cost of "
            "a draft token in plain steps, and a length from 1 to 64."
        ) from error
    return name, DraftFigures(name, False, {ALL: DraftProfile.constant(alpha, int(k))}, cost * plain_s)


def _choice(text: str) -> tuple[str, dict[str, str]]:
    choice = parse_spec(text).choices[0]
    return choice.name, choice.options


def _length_of_rate(survivals: Sequence[float], rate: float) -> float:
    """The length of drafts whose share of accepted tokens is `rate`; a fraction is the share of drafts with one token
    more."""
    total = 0.0
    for depth, survival in enumerate(survivals, 1):
        if total + survival < rate * depth:
            # depth - 1 + x tokens of which total + x * survival are accepted
            return max(1.0, depth - 1 + (total - rate * (depth - 1)) / (rate - survival))
        total += survival
    return float(len(survivals))
