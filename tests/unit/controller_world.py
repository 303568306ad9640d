"""A simulated world for the controller: a clock that costs what it says, drafters that are right or wrong at will."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable

from foredraft.control.controller import Controller, Load, StepTimes
from foredraft.control.costs import Calibration, Costs
from foredraft.control.economics import VerifyCurve
from foredraft.params import SamplingParams
from foredraft.types import Commit, Draft, Sequence, Work

ROWS = (1, 2, 4, 8, 16, 32, 64)
CHEAP = Calibration(VerifyCurve(ROWS, tuple(0.010 + 0.0005 * rows for rows in ROWS)), 0, 0.0)
DEAR = Calibration(VerifyCurve(ROWS, tuple(0.010 + 0.004 * rows for rows in ROWS)), 0, 0.0)


def chain(size: int, score: float = 0.8, origin: str = "test") -> Draft:
    scores = tuple(score**depth for depth in range(1, size + 1))
    return Draft((7,) * size, tuple(range(-1, size - 1)), scores, (origin,) * size)


class World:
    """Sequences whose draft tokens are right with a probability that may change over time."""

    def __init__(
        self,
        truth: Calibration,
        calibrated: Calibration | None = None,
        noise: float = 0.0,
        hiccup_every: int = 10**9,  # steps, one of which takes three times as long
    ) -> None:
        self.truth = truth.curve
        self.controller = Controller(Costs(calibrated or truth))
        self.random = random.Random(1)
        self.noise, self.hiccup_every = noise, hiccup_every
        self.elapsed = self.plain = 0.0
        self.tokens = 0
        self.reasons: Counter[str] = Counter()
        self.verified: list[int] = []

    def write(
        self,
        count: int,
        right: Callable[[int], float],
        drafter: Callable[[int], Draft] = lambda _: chain(8),
        batch: int = 1,
    ) -> None:
        """Let `batch` texts write `count` tokens each, for which plain decoding would take `plain` seconds."""
        texts = [
            Sequence(index, "", 0, [1], 1, SamplingParams().resolved({}), 0, 10**9, num_lookahead_tokens=64)
            for index in range(batch)
        ]
        done = 0.0
        while done < count:
            works = [Work(text, 1, 64) for text in texts]
            for text in texts:
                text.num_computed_tokens = 0
                del text.token_ids[1:]
            drafts: list[Draft | None] = [drafter(self.tokens) for _ in texts]
            load = Load.of(works)
            chosen, reasons = self.controller.choose(works, drafts, load)
            works = [Work(text, 1, 64, draft) for text, draft in zip(texts, chosen, strict=True)]
            self.reasons.update(reasons)
            self.verified.append(sum(map(len, chosen)))
            seconds = self.truth.seconds_at(Load.of(works).rows) * (1 + self.noise * self.random.random())
            seconds *= 3 if len(self.verified) % self.hiccup_every == 0 else 1
            commits = [self._commit(text, full, work.draft, right) for text, full, work in zip(texts, drafts, works)]
            self.controller.observe(works, drafts, commits, load, StepTimes(0.0, seconds, 0.0))
            emitted = sum(len(commit.tokens) for commit in commits) / batch
            self.elapsed += seconds
            self.plain += emitted * self.truth.seconds_at(batch) * (1 + self.noise / 2)
            self.tokens += int(emitted)
            done += emitted

    def _commit(self, text: Sequence, full: Draft | None, draft: Draft, right: Callable[[int], float]) -> Commit:
        """How far the draft would be right, whether it is verified or not."""
        assert full is not None
        length = 0
        while length < len(full) and self.random.random() < right(self.tokens):
            length += 1
        tokens = (7,) * min(length, len(draft))
        return Commit(text, (*tokens, 7 if length > len(draft) else 8), (), ())
