"""The questions that a simulation answers: what a fleet carries, where fixed speculation flips, how many machines are
needed."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from math import ceil

from foredraft.bench.cells import flip
from foredraft.bench.measure import OFF
from foredraft.config import EngineConfig
from foredraft.simulate.event_mode import EventReplica
from foredraft.simulate.fleet import Outcome, Server, Slo, outcome_of, run_fleet
from foredraft.simulate.machine import Machine
from foredraft.simulate.step_mode import StepReplica
from foredraft.simulate.table import StepTable
from foredraft.simulate.traffic import Record, Request, Traffic

MOST_REPLICAS = 4096  # more are not looked for
_SAMPLE = 600  # requests whose kinds and lengths a table is measured with
_SWEEP = (0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.1)  # of the highest rate that any setting carries
_BISECTIONS = 9


@dataclass
class Study:
    """One machine under one objective, in the event mode unless told otherwise. Every simulated point has `count`
    requests."""

    machine: Machine
    options: EngineConfig
    slo: Slo
    attain: float = 0.99  # the share of requests that must be good
    count: int = 5000
    seed: int = 0
    num_simulated: int = 0  # requests so far
    _tables: dict[tuple[str, str], StepTable] = field(default_factory=dict)

    def outcome(self, traffic: Traffic, spec: str, replicas: int, qps: float, step_mode: bool = False) -> Outcome:
        """What users see of so many machines at so many requests per second."""
        requests = traffic.requests(qps, max(self.count, 50 * replicas), self.seed)
        record = Record(len(requests))
        servers: list[Server] = []
        for seed in range(self.seed, self.seed + replicas):
            if step_mode:
                servers.append(StepReplica(self.machine, self.options, self.machine.spec(spec), record, seed))
            else:
                servers.append(EventReplica(self.table(traffic, spec), self.options, record))
        refused = run_fleet(servers, requests, self.seed)
        self.num_simulated += len(requests)
        return outcome_of(requests, record, self.slo, refused)

    def table(self, traffic: Traffic, spec: str) -> StepTable:
        """The steps of a setting under this traffic, measured once in the step mode."""
        key = (traffic.name, spec)
        if key not in self._tables:
            sample = self._sample(traffic)
            self._tables[key] = StepTable.measured(
                self.machine, self.options, self.machine.spec(spec), sample, self.seed
            )
        return self._tables[key]

    def most_qps(self, traffic: Traffic, spec: str) -> float:
        """Requests per second of one machine that is never idle, whatever its users wait."""
        table, sample = self.table(traffic, spec), self._sample(traffic)
        per_kind = [[each for each in sample if each.kind == kind] for kind in table.kinds]

        def seconds(batch: int) -> float:
            tokens = zip(per_kind, table.tokens_per_run, strict=True)
            runs = sum(sum(each.output_tokens for each in mine) / per_run[batch] for mine, per_run in tokens)
            prompt = (
                table.chunk_s[batch][table.chunk_rows[batch]]
                / table.chunk_rows[batch]
                * sum(each.prompt_tokens for each in sample)
            )
            return (runs * table.step_s[batch] / batch + prompt) / len(sample)

        return 1 / min(seconds(batch) for batch in range(1, len(table.step_s)))

    def carries(self, traffic: Traffic, spec: str, replicas: int, qps: float) -> bool:
        """Whether so many machines keep up with the rate, and enough requests are good. Machines that do not keep up
        may finish all requests that are simulated, but those wait longer the later they come."""
        if qps > replicas * self.most_qps(traffic, spec):
            return False
        return self.outcome(traffic, spec, replicas, qps).good_share >= self.attain

    def capacity(self, traffic: Traffic, spec: str, replicas: int) -> float:
        """The most requests per second that are carried; 0 where not even few are."""
        high = replicas * self.most_qps(traffic, spec)
        low = high / 1000
        if not self.carries(traffic, spec, replicas, low):
            return 0.0
        for _ in range(_BISECTIONS):
            middle = (low + high) / 2
            low, high = (middle, high) if self.carries(traffic, spec, replicas, middle) else (low, middle)
        return low

    def replicas_needed(self, traffic: Traffic, spec: str, qps: float) -> int | None:
        """The fewest machines that carry the rate; None where no number does, or none up to MOST_REPLICAS."""

        def is_enough(replicas: int) -> bool:
            return self.carries(traffic, spec, replicas, qps)

        least = ceil(qps / self.most_qps(traffic, spec))
        if least > MOST_REPLICAS:
            return None
        high = least
        while not is_enough(high):
            if high >= MOST_REPLICAS or not self.carries(traffic, spec, 1, qps / (100 * high)):
                return None
            high = min(MOST_REPLICAS, 2 * high)
        return least + bisect_left(range(least, high), True, key=is_enough)  # the last is enough

    def _sample(self, traffic: Traffic) -> list[Request]:
        return traffic.requests(1.0, _SAMPLE, self.seed + 1)


@dataclass(frozen=True)
class SettingAnswer:
    """One setting under one traffic. `sweep` has the same rates for all settings."""

    spec: str
    outcome: Outcome  # at the rate and with the machines that were asked about
    capacity_qps: float  # the most requests per second that those machines serve within the objective
    most_qps: float  # and that they serve at all: where more arrive, the queue grows without end
    replicas_needed: int | None  # at the rate that was asked about
    sweep: list[Outcome]
    ratios: list[float]  # at those rates: what a user of plain decoding waits for a token, in units of this setting's

    @property
    def flip_qps(self) -> float | None:
        """From which rate on plain decoding serves users faster; None if it never does, or always."""
        rates = [outcome.qps for outcome in self.sweep]
        return None if self.is_adaptive else flip(rates, self.ratios)

    @property
    def is_adaptive(self) -> bool:
        """A controller turns drafts off by itself: it has no rate at which it flips."""
        return self.spec.startswith("auto")

    @property
    def pays(self) -> bool:
        """Whether it serves users faster than plain decoding while machines are nearly idle."""
        return self.ratios[0] >= 1


@dataclass(frozen=True)
class TrafficAnswer:
    """All settings under one traffic, plain decoding first."""

    traffic: str
    qps: float
    rates: list[float]
    settings: list[SettingAnswer]

    @property
    def plain(self) -> SettingAnswer:
        return self.settings[0]

    def is_overload(self, setting: SettingAnswer) -> bool:
        """Whether more requests arrive than the machines serve: what users wait depends on how long that lasts."""
        return self.qps > setting.most_qps


def answer(
    study: Study, traffic: Traffic, specs: Iterable[str], replicas: int, qps: float, tick: Callable[[], None]
) -> TrafficAnswer:
    """Everything about one traffic; `specs` are settings beside plain decoding. `tick` is called for each setting."""
    settings = [OFF, *(spec for spec in specs if spec != OFF)]
    most = replicas * max(study.most_qps(traffic, spec) for spec in settings)
    rates = [share * most for share in _SWEEP]
    answers: list[SettingAnswer] = []
    plain: list[Outcome] = []
    for spec in settings:
        sweep = [study.outcome(traffic, spec, replicas, rate) for rate in rates]
        plain = plain or sweep
        answers.append(
            SettingAnswer(
                spec=spec,
                outcome=study.outcome(traffic, spec, replicas, qps),
                capacity_qps=study.capacity(traffic, spec, replicas),
                most_qps=replicas * study.most_qps(traffic, spec),
                replicas_needed=study.replicas_needed(traffic, spec, qps),
                sweep=sweep,
                ratios=[off.token_s / mine.token_s for off, mine in zip(plain, sweep, strict=True)],
            )
        )
        tick()
    return TrafficAnswer(traffic.name, qps, rates, answers)
