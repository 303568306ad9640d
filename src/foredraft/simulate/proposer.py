"""A proposer without a model: its drafts are as long, as often right and as slow as those that were measured.

The target of a simulation emits the token RIGHT everywhere, so a draft tells by itself how far it will be accepted.
"""

from __future__ import annotations

from collections.abc import Sequence as Items
from random import Random

from foredraft.proposers.base import Proposer
from foredraft.simulate.engine import Clock
from foredraft.simulate.machine import DraftFigures, DraftProfile, Machine
from foredraft.types import NO_DRAFT, Draft, Sequence

RIGHT, WRONG = 1, 2
VOCAB_SIZE = 128  # the branches of a draft are different wrong tokens
_LEAST_SCORE = 1e-6  # scores are above 0


class SimulatedProposer(Proposer):
    """Draws drafts from the profile of a sequence's kind, which is its request id. Its confidence is what was measured
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
