"""A simulated world for the controller: a clock that costs what it says, and proposers that are right or wrong at will.

The text of a request is its positions, one after the other, so a draft token is right if it is its own position. A
proposer is right at a position if that position's chance is below the proposer's probability there.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from math import inf

from foredraft.budget import Budget
from foredraft.control.controller import Controller
from foredraft.control.costs import Calibration, Costs, StepTimes
from foredraft.control.economics import VerifyCurve
from foredraft.control.worth import Candidate, Load
from foredraft.params import SamplingParams
from foredraft.proposers.merge import merge
from foredraft.types import NO_DRAFT, TARGET, Commit, Draft, Sequence, Work

ROWS = (1, 2, 4, 8, 16, 32, 64)
CHEAP = Calibration(VerifyCurve(ROWS, tuple(0.010 + 0.0005 * rows for rows in ROWS)), 0, 0.0)
DEAR = Calibration(VerifyCurve(ROWS, tuple(0.010 + 0.004 * rows for rows in ROWS)), 0, 0.0)
NARROW = Calibration(VerifyCurve(ROWS, tuple(0.003 + 0.0016 * rows for rows in ROWS)), 0, 0.0)  # 16 rows: 6 steps
FLAT = Calibration(VerifyCurve(ROWS, tuple(0.0015 + 0.000005 * rows for rows in ROWS)), 0, 0.0)
GPU = Calibration(VerifyCurve(ROWS, tuple(0.00076 + 0.00002 * rows for rows in ROWS)), 0, 0.0)  # of a small model

Place = tuple[int, int]  # a request and a position of its text
WRONG = -1


def chance(seed: int, *place: int) -> float:
    """A number from 0 to 1 for every place, the same in every world."""
    mixed = seed
    for number in place:
        mixed = ((mixed ^ number) * 0x9E3779B97F4A7C15 + 0x7F4A7C15) % 2**64
        mixed ^= mixed >> 29
    return mixed % 2**64 * 0xBF58476D1CE4E5B9 % 2**64 / 2**64


@dataclass
class Player:
    """A proposer that drafts chains, level by level if it takes time."""

    name: str
    probability: Callable[[Place], float]  # that its token is right, once everything before it is
    query_s: float = 0.0  # of a query, beside its nodes
    node_s: float = 0.0
    missing_s: float = 0.0  # per token that it had not run
    is_free: bool = True
    confidence: Callable[[Place], float] | None = None  # what it says; else the truth
    drafts: Callable[[Place], bool] = lambda _: True
    most: int = 16
    acceptance: tuple[float, ...] = ()
    seed: int = 0
    computed: dict[int, int] = field(default_factory=dict)  # tokens by request
    queries: int = 0

    @property
    def candidate(self) -> Candidate:
        return Candidate(self.name, self.is_free, self.most, self.acceptance)

    def query(self, sequence: Sequence, budget: int) -> tuple[Draft, float]:
        """A draft, and what it took."""
        self.queries += 1
        request, start = sequence.id, sequence.num_tokens
        seconds = self.query_s + self.missing_s * (start - self.computed.get(request, 0))
        self.computed[request] = start
        tokens, scores, score = list[int](), list[float](), 1.0
        for position in range(start, start + min(budget, self.most)) if self.drafts((request, start)) else ():
            place = request, position
            score *= max(1e-6, (self.confidence or self.probability)(place))
            tokens.append(position if chance(self.seed, *place) < self.probability(place) else WRONG)
            scores.append(score)
            if isinstance(budget, Budget) and not self.is_free and score <= budget.least + budget.beyond:
                break
        size = len(tokens)
        draft = Draft(tuple(tokens), tuple(range(-1, size - 1)), tuple(scores), (self.name,) * size)
        return draft, seconds + self.node_s * size


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
        deciding_s: float = 0.0,  # of every step in which the controller decides, or has drafts to choose from
    ) -> None:
        self.truth = truth.curve
        self.controller = Controller(Costs(calibrated or truth))
        self.players = sorted(players, key=lambda player: not player.is_free)
        self.random = random.Random(1)
        self.noise, self.hiccup_every, self.fixed, self.deciding_s = noise, hiccup_every, fixed, deciding_s
        # Until when the budgets of the last step stand for steps with the same requests, and without drafts.
        self._stand_until_s, self._requests, self._budgets = -inf, list[int](), dict[str, list[int]]()
        self.elapsed = self.plain = 0.0
        self.num_tokens = 0
        self.reasons: Counter[str] = Counter()
        self.verified: list[int] = []
        self.queried: list[Counter[str]] = []  # nodes by proposer, of every step
        self._next_request = 0

    @property
    def speedup(self) -> float:
        return self.plain / self.elapsed

    def write(self, count: int, requests: int = 1, batch: int = 1, prompt: int = 1) -> World:
        """Write requests of `count` tokens, `batch` at a time. Plain decoding would take `plain` seconds."""
        for _ in range(requests):
            params, first = SamplingParams().resolved({}), self._next_request
            texts = [Sequence(first + n, "", 0, [0] * prompt, prompt, params, 0, count) for n in range(batch)]
            self._next_request += batch
            while texts:
                self.step(texts)
                ended = [text for text in texts if text.num_output_tokens >= count]
                self.controller.release([text.id for text in ended])
                texts = [text for text in texts if text not in ended]
        return self

    def step(self, texts: list[Sequence]) -> None:
        """One step of these requests."""
        for text in texts:
            text.num_computed_tokens = text.num_tokens - 1
        works = [Work(text, 1, 64) for text in texts]
        load = Load.of(works)
        made: list[dict[str, Draft]] = [{} for _ in works]
        merged: list[list[Draft]] = [[] for _ in works]
        seconds = deciding_s = 0.0
        self.queried.append(Counter())
        requests = [text.id for text in texts]
        stands = requests == self._requests and self.controller.now_s < self._stand_until_s
        for player in self.players:
            seconds += self._query(
                player, works, load, made, merged, self._budgets.get(player.name) if stands else None
            )
        if self.fixed is None and (any(made) or not stands):
            deciding_s, self._requests, self._stand_until_s = self.deciding_s, requests, -inf
            if not any(made):
                names = [player.name for player in self.players]
                self._stand_until_s = self.controller.stands_until_s(names, works, load)
        made_by = Counter(name for drafts in made for name, draft in drafts.items() for _ in draft.tokens)
        asked = {name: len(works) + made_by[name] for name in self.queried[-1]}
        trees = [merge(drafts, 64) if drafts else NO_DRAFT for drafts in merged]
        if self.fixed is None:
            trees, reasons = self.controller.choose(works, trees, load)
            self.reasons.update(reasons)
        works = [work.with_draft(tree) for work, tree in zip(works, trees, strict=True)]
        self.verified.append(sum(map(len, trees)))
        run_s = self.truth.seconds_at(Load.of(works).rows) * (1 + self.noise * self.random.random())
        run_s *= 3 if len(self.verified) % self.hiccup_every == 0 else 1
        commits = [_commit(work) for work in works]
        if self.fixed is None and any(made):
            self.controller.observe(works, made, commits, load, StepTimes(run_s, seconds, deciding_s, asked))
        elif self.fixed is None:
            self.controller.observe_plain(load, StepTimes(run_s, seconds, deciding_s, asked))
        self.elapsed += seconds + run_s + deciding_s
        for commit in commits:
            self.plain += len(commit.tokens) * self.truth.seconds_at(len(texts)) / len(texts) * (1 + self.noise / 2)
            self.num_tokens += len(commit.tokens)
            commit.sequence.token_ids += commit.tokens

    def _query(
        self,
        player: Player,
        works: list[Work],
        load: Load,
        made: list[dict[str, Draft]],
        merged: list[list[Draft]],
        budgets: list[int] | None,
    ) -> float:
        """Query a proposer, with budgets that stand if there are any; returns the seconds that it took."""
        if self.fixed is not None:
            budgets = [self.fixed.get(player.name, 0)] * len(works)
        elif budgets is None:
            decided = self.controller.budgets(player.candidate, works, merged, load)
            budgets = self._budgets[player.name] = [nodes for nodes, _ in decided]
            self.reasons.update(f"{player.name}: {reason}" for _, reason in decided)
        chosen = [index for index, budget in enumerate(budgets) if budget]
        if not chosen:
            return 0.0
        self.queried[-1][player.name] += sum(budgets)
        answers = [player.query(works[index].sequence, budgets[index]) for index in chosen]
        seconds, drafts = sum(took for _, took in answers), [draft for draft, _ in answers]
        calibrated = drafts
        if self.fixed is None:
            asked = [works[index] for index in chosen]
            wanted = [budgets[index] for index in chosen]
            calibrated = self.controller.observe_query(player.candidate, asked, wanted, drafts, seconds)
        for index, draft, known in zip(chosen, drafts, calibrated, strict=True):
            if draft:
                made[index][player.name] = draft
            if known:
                merged[index].append(known)
        return seconds


def _commit(work: Work) -> Commit:
    """The path whose tokens are their own positions, and the target's own token behind it."""
    node, position, origins = -1, work.sequence.num_tokens, list[str]()
    while (child := work.draft.child(node, position)) >= 0:
        origins.append(work.draft.origin[child])
        node, position = child, position + 1
    tokens = tuple(range(work.sequence.num_tokens, position + 1))
    return Commit(work.sequence, tokens, (*origins, TARGET), (), draft=work.draft)
