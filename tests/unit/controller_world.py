"""A simulated world for the controller: the engine's own step, with a clock that costs what it says and proposers that
are right or wrong at will.

The text of a request is its positions, one after the other, so a draft token is right if it is its own position. A
proposer is right at a position if that position's chance is below the proposer's probability there.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Items
from dataclasses import dataclass, field
from math import inf

from foredraft.config import EngineConfig
from foredraft.control.controller import Controller
from foredraft.control.costs import Calibration, Load
from foredraft.control.economics import VerifyCurve
from foredraft.params import SamplingParams
from foredraft.proposers.base import Proposer
from foredraft.proposers.registry import ProposerChoice, Spec
from foredraft.simulate.engine import Clock, SimulatedEngine
from foredraft.types import Draft, Sequence

ROWS = (1, 2, 4, 8, 16, 32, 64)
CHEAP = Calibration(VerifyCurve(ROWS, tuple(0.010 + 0.0005 * rows for rows in ROWS)), 0, 0.0)
DEAR = Calibration(VerifyCurve(ROWS, tuple(0.010 + 0.004 * rows for rows in ROWS)), 0, 0.0)
NARROW = Calibration(VerifyCurve(ROWS, tuple(0.003 + 0.0016 * rows for rows in ROWS)), 0, 0.0)  # 16 rows: 6 steps
FLAT = Calibration(VerifyCurve(ROWS, tuple(0.0015 + 0.000005 * rows for rows in ROWS)), 0, 0.0)
GPU = Calibration(VerifyCurve(ROWS, tuple(0.00076 + 0.00002 * rows for rows in ROWS)), 0, 0.0)  # of a small model

Place = tuple[int, int]  # a request and a position of its text
Probability = Callable[[Place], float]
WRONG = 0  # no position that is drafted
VOCAB = 1 << 20


def chance(seed: int, *place: int) -> float:
    """A number from 0 to 1 for every place, the same in every world."""
    mixed = seed
    for number in place:
        mixed = ((mixed ^ number) * 0x9E3779B97F4A7C15 + 0x7F4A7C15) % 2**64
        mixed ^= mixed >> 29
    return mixed % 2**64 * 0xBF58476D1CE4E5B9 % 2**64 / 2**64


@dataclass
class Player(Proposer):
    """A proposer that drafts chains, level by level if it takes time."""

    name: str
    probability: Callable[[Place], float]  # that its token is right, once everything before it is
    query_s: float = 0.0  # of a query, beside its nodes
    node_s: float = 0.0
    missing_s: float = 0.0  # per token that it had not run
    free: bool = True
    confidence: Callable[[Place], float] | None = None  # what it says; else the truth
    drafts: Callable[[Place], bool] = lambda _: True
    num_lookahead_tokens: int = 16
    acceptance: tuple[float, ...] = ()
    seed: int = 0
    late: Callable[[int], float] = lambda query: 1.0  # times as long as otherwise, by number of the query
    computed: dict[int, int] = field(default_factory=dict)  # tokens by request
    queries: int = 0
    clock: Clock = field(default_factory=Clock)
    budgets: Counter[str] = field(default_factory=Counter)  # nodes of the present step, by proposer

    def num_missing(self, sequence: Sequence) -> int:
        missing = sequence.num_tokens - self.computed.get(sequence.id, 0)
        return missing if self.missing_s and missing > 16 else 0

    def propose(self, sequences: Items[Sequence], budgets: Items[int], min_score: float) -> list[Draft]:
        return [self._draft(sequence, budget, min_score) for sequence, budget in zip(sequences, budgets, strict=True)]

    def _draft(self, sequence: Sequence, budget: int, min_score: float) -> Draft:
        self.queries += 1
        self.budgets[self.name] += budget
        request, start = sequence.id, sequence.num_tokens
        seconds = self.query_s + self.missing_s * (start - self.computed.get(request, 0))
        self.computed[request] = start
        tokens, scores, score = list[int](), list[float](), 1.0
        most = min(budget, self.num_lookahead_tokens)
        for position in range(start, start + most) if self.drafts((request, start)) else ():
            place = request, position
            score *= max(1e-6, (self.confidence or self.probability)(place))
            tokens.append(position if chance(self.seed, *place) < self.probability(place) else WRONG)
            scores.append(score)
            if not self.free and score <= min_score:
                break
        size = len(tokens)
        self.clock.now += (seconds + self.node_s * size) * self.late(self.queries)
        return Draft(tuple(tokens), tuple(range(-1, size - 1)), tuple(scores), (self.name,) * size)


def constant(probability: float) -> Probability:
    return lambda place: probability


def copier(right: Probability, confidence: float = 0.8, most: int = 8) -> Player:
    return Player("copier", right, query_s=1e-5, confidence=constant(confidence), num_lookahead_tokens=most)


def head(right: Probability, node_s: float = 0.001, **others: object) -> Player:
    return Player("head", right, node_s=node_s, free=False, num_lookahead_tokens=4, **others)  # type: ignore[arg-type]


class World:
    """Requests that the controller, or a fixed setting, drafts for with some proposers."""

    def __init__(
        self,
        truth: Calibration,
        players: Iterable[Player] = (),
        calibrated: Calibration | None = None,
        noise: float = 0.0,
        hiccup_every: int = 10**9,  # steps, one of which takes three times as long
        fixed: dict[str, int] | None = None,  # nodes by proposer: these are drafted and verified in every step
    ) -> None:
        self.truth = truth.curve
        self.players = {player.name: player for player in players}
        self.random = random.Random(1)
        self.noise, self.hiccup_every = noise, hiccup_every
        self.elapsed = self.plain = 0.0
        self.num_tokens = 0
        self.reasons: Counter[str] = Counter()
        self.verified: list[int] = []  # nodes of every step
        self.queried: list[Counter[str]] = []  # nodes by proposer, of every step
        self._next_request = 0
        clock = Clock()
        for player in self.players.values():
            player.clock = clock
            if fixed is not None:
                player.num_lookahead_tokens = min(fixed.get(player.name, 0), player.num_lookahead_tokens)
        names = [name for name in self.players if fixed is None or fixed.get(name)]
        self._spec = Spec(tuple(map(ProposerChoice, names)), adaptive=fixed is None)
        self._engine = SimulatedEngine(
            EngineConfig(
                prefix_caching=False, max_chunk_s=inf, max_num_batched_tokens=1 << 16, kv_cache_tokens=1 << 17
            ),
            calibrated or truth,
            VOCAB,
            lambda choice: self.players[choice.name],
            lambda sequence, position: position,
            self._takes,
            clock,
        )

    @property
    def controller(self) -> Controller:
        controller = self._engine.speculation.controller
        assert controller is not None
        return controller

    @property
    def speedup(self) -> float:
        return self.plain / self.elapsed

    def write(self, count: int, requests: int = 1, batch: int = 1, prompt: int = 1, temperature: float = 0.0) -> World:
        """Write requests of `count` tokens, `batch` at a time. Plain decoding would take `plain` seconds. Prompts do
        not count: they take the same time in any case."""
        params = SamplingParams(temperature=temperature).resolved({})
        for _ in range(requests):
            for _ in range(batch):
                text = Sequence(self._next_request, "", 0, [WRONG] * prompt, prompt, params, 0, count + 1)
                self._engine.add(text, self._spec)
                self._next_request += 1
            while self._engine.scheduler.has_work:
                self._step()
        return self

    def _step(self) -> None:
        queried: Counter[str] = Counter()
        for player in self.players.values():
            player.budgets = queried
        decoding = len(self._engine.scheduler.running)
        stepped = self._engine.step()
        if not decoding or any(work.num_new_tokens > 1 for work in stepped.works):
            return
        self.queried.append(queried)
        self.verified.append(sum(len(work.draft) for work in stepped.works))
        self.elapsed += stepped.draft_s + stepped.verify_s
        for index, commit in enumerate(stepped.commits):
            self.reasons.update(self._engine.speculation.reasons(index))
            self.num_tokens += len(commit.tokens)
            self.plain += len(commit.tokens) * self.truth.seconds_at(decoding) / decoding * (1 + self.noise / 2)

    def _takes(self, load: Load, accepted: int) -> float:
        seconds = self.truth.seconds_at(load.rows) * (1 + self.noise * self.random.random())
        return seconds * (3 if len(self.verified) % self.hiccup_every == self.hiccup_every - 1 else 1)
