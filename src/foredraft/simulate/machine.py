"""What a simulation knows of a machine: the measured cost of runs, of a step's other work and of drafts, and how far
drafts of each kind of request are accepted."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate, zip_longest
from math import ceil

from foredraft.control.costs import Calibration, Costs
from foredraft.control.economics import quotient
from foredraft.errors import InvalidParameter, InvalidSpec
from foredraft.proposers.registry import Spec, parse_spec
from foredraft.simulate.traffic import ANY


@dataclass(frozen=True)
class DraftProfile:
    """How a proposer drafts for one kind of request, run by run and independently of earlier runs."""

    coverage: float  # the share of runs that get a draft
    lengths: tuple[float, ...]  # the share of drafts that reach a depth, from 1 on
    survivals: tuple[float, ...]  # the share of those that are accepted down to it; never more than at the depth before
    branches: float = 0.0  # further nodes of a draft, where drafts are trees: rows that are run, and wrong

    @property
    def tokens_per_run(self) -> float:
        return 1 + self.coverage * sum(map(float.__mul__, self.lengths, self.survivals))

    @classmethod
    def of_counts(
        cls, runs: int, drafted_per_depth: Sequence[int], accepted_per_depth: Sequence[int], drafted_tokens: int
    ) -> DraftProfile:
        """From the counters of requests: runs of the target, drafts that reached a depth, how many of those were
        accepted down to it, and the nodes of all drafts."""
        if not runs or not any(drafted_per_depth):
            return NEVER
        drafts = drafted_per_depth[0]
        branches = max(0, drafted_tokens - sum(drafted_per_depth)) / drafts
        shares = map(quotient, accepted_per_depth, drafted_per_depth)
        lengths = tuple(count / drafts for count in drafted_per_depth)
        return cls(min(1.0, drafts / runs), lengths, tuple(accumulate(shares, min)), branches)

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
        return self.by_kind.get(kind) or self.common

    @cached_property
    def common(self) -> DraftProfile:
        """That of all kinds together where it was measured, else the mean over the kinds."""
        if ANY in self.by_kind:
            return self.by_kind[ANY]
        profiles = [profile for profile in self.by_kind.values() if profile.coverage] or [NEVER]

        def mean(values: Iterable[tuple[float, ...]]) -> tuple[float, ...]:
            return tuple(sum(column) / len(profiles) for column in zip_longest(*values, fillvalue=0.0))

        coverage, branches = mean((p.coverage, p.branches) for p in profiles)
        return DraftProfile(coverage, mean(p.lengths for p in profiles), mean(p.survivals for p in profiles), branches)

    @property
    def k(self) -> int:
        """The most nodes of a draft."""
        return max((len(profile.lengths) + ceil(profile.branches) for profile in self.by_kind.values()), default=0)


@dataclass(frozen=True)
class Machine:
    """One machine with one model. `step_s`, `sequence_s` and `token_s` are the time of a step beside drafts and the
    run: for any step, for every sequence in it, and for every draft token that is accepted."""

    name: str
    calibration: Calibration
    proposers: Mapping[str, DraftFigures] = field(default_factory=dict)
    step_s: float = 0.0
    sequence_s: float = 0.0
    token_s: float = 0.0

    @cached_property
    def _costs(self) -> Costs:
        return Costs(self.calibration)  # never told of a run, so it stays what was measured

    def run_s(self, rows: int, keys: int) -> float:
        return self._costs.run(rows, keys)

    def overhead_s(self, sequences: int, accepted: int = 0) -> float:
        """Seconds of a step beside drafts and the run, in which so many draft tokens are accepted."""
        return self.step_s + self.sequence_s * sequences + self.token_s * accepted

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
            return Spec(tuple(parse_spec(name).choices[0] for name in self.proposers), adaptive=True)
        spec = parse_spec(text)
        for choice in spec.choices:
            if str(choice) not in self.proposers:
                known = ", ".join(self.proposers) or "nothing but off"
                raise InvalidSpec(f"spec={text!r}: {choice} was not measured on {self.name}; there is {known}.")
        return spec

    def with_proposer(self, name: str, figures: DraftFigures) -> Machine:
        return replace(self, proposers={**self.proposers, name: figures})


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
            f"assume={text!r} must be NAME:alpha=A,cost=C,k=K: a proposer's name, an acceptance from 0 to 1, the cost "
            "of a draft token in plain steps, and a length from 1 to 64."
        ) from error
    return name, DraftFigures(name, False, {ANY: DraftProfile.constant(alpha, int(k))}, cost * plain_s)
