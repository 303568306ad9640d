"""One machine, step by step: the step mode. Runs and drafts take the time that was measured, and drafts are right as
often as was measured. All else is the engine's own."""

from __future__ import annotations

from collections.abc import Sequence as Items
from random import Random

from foredraft.config import EngineConfig
from foredraft.control.costs import Load
from foredraft.params import SamplingParams
from foredraft.proposers.base import Proposer
from foredraft.proposers.registry import ProposerChoice, Spec
from foredraft.simulate.engine import Clock, SimulatedEngine
from foredraft.simulate.machine import DraftFigures, DraftProfile, Machine
from foredraft.simulate.traffic import Record, Request
from foredraft.types import NO_DRAFT, Commit, Draft, Sequence, Work

# The target emits the token RIGHT everywhere, so a draft tells by itself how far it will be accepted.
RIGHT, WRONG = 1, 2
VOCAB_SIZE = 128  # the branches of a draft are different wrong tokens
_LEAST_SCORE = 1e-6  # scores are above 0


class SimulatedProposer(Proposer):
    """A proposer without a model: its drafts are as long, as often right and as slow as those that were measured. They
    are drawn from the profile of a sequence's kind, which is its request id. Its confidence is what was measured
    for the kind: real proposers are surer of themselves where they are more often right."""

    def __init__(self, figures: DraftFigures, machine: Machine, clock: Clock, random: Random) -> None:
        self.name = figures.name
        self.free = figures.free
        self.num_lookahead_tokens = figures.k
        self._figures = figures
        self._machine = machine
        self._clock = clock
        self._random = random

    def propose(self, sequences: Items[Sequence], budgets: Items[int], min_score: float) -> list[Draft]:
        drafts = [
            self._draft(self._figures.profile(sequence.request_id), budget)
            for sequence, budget in zip(sequences, budgets, strict=True)
        ]
        depth = max((draft.depth for draft in drafts), default=0)
        self._clock.now += self._machine.draft_s(self._figures, len(sequences), depth)
        return drafts

    def _draft(self, profile: DraftProfile, budget: int) -> Draft:
        random = self._random.random
        if random() >= profile.coverage:
            return NO_DRAFT
        chance = random()
        length = sum(chance < share for share in profile.lengths[:budget])
        chance = random()
        right = sum(chance < share for share in profile.survivals[:length])
        branches = int(profile.branches + random()) if profile.branches else 0
        branches = min(branches, budget - length, VOCAB_SIZE - WRONG - 1)
        scores = tuple(max(_LEAST_SCORE, min(1.0, score)) for score in profile.survivals[:length])
        return Draft(
            (RIGHT,) * right + (WRONG,) * (length - right) + tuple(range(WRONG + 1, WRONG + 1 + branches)),
            (*range(-1, length - 1), *(-1,) * branches),
            scores + (_LEAST_SCORE,) * branches,
            (self.name,) * (length + branches),
        )


class StepReplica:
    """An engine without a model. Requests are added in order of arrival, after `advance` to that moment: a request
    that arrives while a step runs is scheduled for the next."""

    def __init__(self, machine: Machine, options: EngineConfig, spec: Spec, record: Record, seed: int = 0) -> None:
        self._machine = machine
        self._spec = spec
        self._record = record
        self._random = Random(seed)
        self.clock = Clock()
        self._engine = SimulatedEngine(
            *(options, machine.calibration, VOCAB_SIZE, self._make_proposer),
            *(lambda sequence, position: RIGHT, self._takes, self.clock),
        )
        self._params = SamplingParams().resolved({})
        self._sequences: dict[int, Sequence] = {}

    def _make_proposer(self, choice: ProposerChoice) -> Proposer:
        return SimulatedProposer(self._machine.proposers[str(choice)], self._machine, self.clock, self._random)

    def _takes(self, load: Load, accepted: int) -> float:
        running = len(self._engine.scheduler.running)
        return self._machine.run_s(load.rows, load.keys) + self._machine.overhead_s(running, accepted)

    @property
    def num_unfinished(self) -> int:
        return len(self._sequences)

    def add(self, index: int, request: Request, spec: Spec | None = None, prompt: list[int] | None = None) -> bool:
        """Queue a request; False where it can never fit into the KV cache. Its prompt matters only for the prefix
        cache; without one, the request shares no prefix with others."""
        if not self._engine.scheduler.can_ever_fit(request.prompt_tokens + request.output_tokens):
            return False
        self.clock.now = max(self.clock.now, request.arrival_s)
        sequence = Sequence(
            id=index,
            request_id=request.kind,
            sample=0,
            token_ids=[index, *[RIGHT] * (request.prompt_tokens - 1)] if prompt is None else prompt,
            num_prompt_tokens=request.prompt_tokens,
            params=self._params,
            seed=0,
            max_tokens=request.output_tokens,
        )
        self._engine.add(sequence, self._spec if spec is None else spec)
        self._sequences[index] = sequence
        return True

    def abort(self, index: int) -> None:
        """Drop a request whose client has left; a finished one is ignored."""
        sequence = self._sequences.pop(index, None)
        if sequence is not None:
            self._engine.abort(sequence)

    def advance(self, until: float) -> None:
        """Run all steps that begin before `until`."""
        while self._sequences and self.clock.now < until:
            self.step()

    def step(self) -> tuple[list[Work], list[Commit]]:
        stepped = self._engine.step()
        for commit in stepped.commits:
            sequence = commit.sequence
            if commit.tokens and sequence.num_output_tokens == len(commit.tokens):
                self._record.first_s[sequence.id] = self.clock.now
            if commit.finish_reason is not None:
                self._record.done_s[sequence.id] = self.clock.now
                del self._sequences[sequence.id]
        return stepped.works, stepped.commits
