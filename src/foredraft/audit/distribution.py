"""The second claim: sampled texts follow the target's distribution, with any draft and under any acceptance rule.

The distribution of a small model is known exactly (4 tokens, texts of 3, so 64 possible texts). It goes through the
real rules with the real keyed noise, once per seed. A G-test compares the counts with the distribution.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product

import torch
from torch import Tensor

from foredraft.audit.report import Check, Tick
from foredraft.params import SamplingParams
from foredraft.sampling.draw import pick
from foredraft.sampling.noise import DRAFT_STREAM, stream_key, uniform
from foredraft.sampling.rules import RULES, Chance, Outcome, Target
from foredraft.sampling.verify import KeyedChance
from foredraft.types import Draft

VOCAB, LENGTH = 4, 3
SHARPNESS = 1.5  # how far the models are from the uniform distribution
SIGNIFICANCE = 1e-4  # the chance that a sound machine fails any of the checks, were the seeds not fixed
FEWEST_EXPECTED = 5.0  # texts that are expected less often are counted together
# 63 degrees of freedom at this significance need 2·samples·KL ≈ 80 to be seen nine times in ten, and by Pinsker's
# inequality a total variation of v has KL ≥ 2v².
VISIBLE = 20.0

Text = tuple[int, ...]
Rule = Callable[[Draft, Target, Chance], Outcome]
Drafter = Callable[[Text, int], Draft]  # of the text so far and the seed


def table_model(seed: int) -> dict[Text, Tensor]:
    """A fixed distribution for every context, away from the uniform one."""
    generator = torch.Generator().manual_seed(seed)
    contexts = [text for length in range(LENGTH + 2) for text in product(range(VOCAB), repeat=length)]
    logits = torch.randn(len(contexts), VOCAB, generator=generator, dtype=torch.float64) * SHARPNESS
    return dict(zip(contexts, logits.softmax(-1), strict=True))


TARGET, DRAFTER = table_model(seed=1), table_model(seed=2)


class TableTarget:
    """The target after a committed text, as a rule sees it."""

    _params = SamplingParams(temperature=1.0).resolved({})

    def __init__(self, text: Text, seed: int) -> None:
        self._text = text
        self._seed = seed

    def token(self, node: int, path: list[int]) -> int:
        logits = self.distribution(node, path).log()
        return pick(logits, self._params, self._seed, len(self._text) + len(path))

    def distribution(self, node: int, path: list[int]) -> Tensor:
        return TARGET[*self._text, *path]


def sampled_chain(text: Text, seed: int) -> Draft:
    """Two tokens, each drawn from the drafter's distribution after the one before it."""
    noise = _draft_noise(text, seed)
    first = DRAFTER[text]
    token = _drawn(first, noise[0])
    second = DRAFTER[*text, token]
    return Draft((token, _drawn(second, noise[1])), (-1, 0), (0.5,) * 2, ("table",) * 2, torch.stack([first, second]))


def sampled_siblings(text: Text, seed: int) -> Draft:
    """Two different tokens for one place: the second is drawn from what the first has left."""
    noise = _draft_noise(text, seed)
    first = DRAFTER[text]
    token = _drawn(first, noise[0])
    second = first.clone()
    second[token] = 0
    second /= second.sum()
    return Draft((token, _drawn(second, noise[1])), (-1, -1), (0.5,) * 2, ("table",) * 2, torch.stack([first, second]))


def unsampled_chain(text: Text, seed: int) -> Draft:
    """The drafter's best token, and its best one after that: no chance, so no distribution."""
    first = int(DRAFTER[text].argmax())
    second = int(DRAFTER[*text, first].argmax())
    return Draft((first, second), (-1, 0), (0.5,) * 2, ("table",) * 2)


def unsampled_tree(text: Text, seed: int) -> Draft:
    """The drafter's two best tokens, and its best one after the first."""
    first, second = DRAFTER[text].topk(2).indices.tolist()
    below = int(DRAFTER[*text, first].argmax())
    return Draft((first, second, below), (-1, -1, 0), (0.5,) * 3, ("table",) * 3)


def _draft_noise(text: Text, seed: int) -> Tensor:
    """Two uniforms, keyed by where the draft begins, so that no two drafts share noise: the block rule looks at tokens
    that it then rejects, and the next draft must not depend on those."""
    return uniform(stream_key(seed, len(text), DRAFT_STREAM), torch.arange(2))


def _drawn(probabilities: Tensor, noise: Tensor) -> int:
    """The token in whose share of [0, 1) the noise falls."""
    return int((probabilities.cumsum(0)[:-1] <= noise).sum())


@dataclass(frozen=True)
class Case:
    """A rule, and a drafter for it to judge."""

    name: str
    rule: Rule
    drafter: Drafter


CASES = (
    Case("match, sampled chain", RULES["match"], sampled_chain),
    Case("rejection, sampled chain", RULES["rejection"], sampled_chain),
    Case("rejection, sampled siblings", RULES["rejection"], sampled_siblings),
    Case("rejection, unsampled tree", RULES["rejection"], unsampled_tree),
    Case("block, sampled chain", RULES["block"], sampled_chain),
    Case("block, unsampled chain", RULES["block"], unsampled_chain),
)


def distribution_checks(samples: int, tick: Tick, cases: Sequence[Case] = CASES) -> list[Check]:
    """One check per case over the seeds 0 to samples - 1. Holm's correction keeps the whole at SIGNIFICANCE."""
    tests: list[GTest] = []
    for case in cases:
        tests.append(g_test(Counter(write(case, seed) for seed in range(samples)), target_distribution()))
        tick()
    passed = holm([test.p_value for test in tests], SIGNIFICANCE)
    shift = f"a total variation of {math.sqrt(VISIBLE / samples):.2f} would show, less needs more samples"
    return [
        Check(f"distribution: {case.name}", ok, f"{samples} texts, {test}; {shift}")
        for case, test, ok in zip(cases, tests, passed, strict=True)
    ]


@torch.inference_mode()
def write(case: Case, seed: int) -> Text:
    """The text that a seed gives, draft after draft."""
    text: Text = ()
    while len(text) < LENGTH:
        draft = case.drafter(text, seed)
        _, tokens = case.rule(draft, TableTarget(text, seed), KeyedChance(seed, len(text)))
        text = (*text, *tokens)
    return text[:LENGTH]


def target_distribution() -> dict[Text, float]:
    """The exact probability of every text."""
    return {
        text: math.prod(float(TARGET[text[:place]][token]) for place, token in enumerate(text))
        for text in product(range(VOCAB), repeat=LENGTH)
    }


@dataclass(frozen=True)
class GTest:
    """How far counts are from a distribution, and the probability that chance alone takes them at least that far."""

    statistic: float
    cells: int
    p_value: float

    def __str__(self) -> str:
        return f"{self.cells} cells, G = {self.statistic:.1f}, p = {self.p_value:.2g}"


def g_test(counts: Counter[Text], distribution: dict[Text, float]) -> GTest:
    """The likelihood-ratio test of counts against a distribution; rare texts share one cell."""
    total = counts.total()
    cells: list[tuple[float, int]] = []  # expected, observed
    rare_expected, rare_observed = 0.0, 0
    for text, probability in sorted(distribution.items(), key=lambda item: item[1]):
        if total * probability < FEWEST_EXPECTED or 0 < rare_expected < FEWEST_EXPECTED:
            rare_expected += total * probability
            rare_observed += counts[text]
        else:
            cells.append((total * probability, counts[text]))
    if rare_expected:
        cells.append((rare_expected, rare_observed))
    statistic = 2 * sum(observed * math.log(observed / expected) for expected, observed in cells if observed)
    return GTest(statistic, len(cells), chi_square_tail(statistic, len(cells) - 1))


def chi_square_tail(statistic: float, degrees: int) -> float:
    """The probability that a chi-square variate exceeds a value."""
    half = torch.tensor([degrees / 2, max(0.0, statistic / 2)], dtype=torch.float64)
    return float(torch.special.gammaincc(half[0], half[1]))


def holm(p_values: Sequence[float], significance: float) -> list[bool]:
    """Which hypotheses stand: from the smallest p-value on, each is held to the significance shared by those left."""
    stands = [True] * len(p_values)
    for rank, index in enumerate(sorted(range(len(p_values)), key=lambda index: p_values[index])):
        if p_values[index] > significance / (len(p_values) - rank):
            break
        stands[index] = False
    return stands
