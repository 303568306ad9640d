"""What several unit tests need: sequences without a model, draft trees, and a chi-square test without scipy."""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Mapping
from typing import Any

from foredraft.params import SamplingParams
from foredraft.types import Draft, Sequence


def make_sequence(
    prompt: Iterable[int],
    output: Iterable[int] = (),
    *,
    id: int = 0,
    seed: int = 1,
    max_tokens: int = 64,
    priority: int = 0,
    **params: Any,
) -> Sequence:
    """A sequence as the engine makes it; further keywords are sampling parameters."""
    prompt, resolved = list(prompt), SamplingParams(max_tokens=max_tokens, **params).resolved({})
    return Sequence(
        id, f"request-{id}", 0, [*prompt, *output], len(prompt), resolved, seed, max_tokens, priority=priority
    )


def make_draft(tokens: Iterable[int], parents: Iterable[int] | None = None, origin: str = "guess") -> Draft:
    """A draft tree; without parents it is a chain."""
    tokens = tuple(tokens)
    parents = tuple(range(-1, len(tokens) - 1)) if parents is None else tuple(parents)
    return Draft(tokens, parents, (0.5,) * len(tokens), (origin,) * len(tokens))


def random_tree(random: random.Random, size: int, tokens: int) -> Draft:
    """Half of all trees are chains; siblings may carry the same token, because nothing forbids it."""
    parents = None if random.random() < 0.5 else [random.randrange(-1, node) for node in range(size)]
    return make_draft([random.randrange(tokens) for _ in range(size)], parents)


def path_to(draft: Draft, node: int) -> tuple[int, ...]:
    """The nodes from the root of the draft down to this one."""
    return (*path_to(draft, draft.parents[node]), node) if node >= 0 else ()


def chi_square_p(observed: Mapping[int, int], expected: Mapping[int, float]) -> float:
    """The probability of a worse fit by chance. Every expected count must be at least 5; a stray one is fatal."""
    assert min(expected.values()) >= 5, "too few draws for a chi-square test"
    if not observed.keys() <= expected.keys():
        return 0.0
    statistic = sum((observed.get(key, 0) - mean) ** 2 / mean for key, mean in expected.items())
    return upper_gamma((len(expected) - 1) / 2, statistic / 2)


def upper_gamma(a: float, x: float) -> float:
    """The regularised upper incomplete gamma function at a multiple of one half, by its recurrence."""
    order, value = (1.0, math.exp(-x)) if a == int(a) else (0.5, math.erfc(math.sqrt(x)))
    while order < a:
        value += math.exp(order * math.log(x) - x - math.lgamma(order + 1)) if x else 0.0
        order += 1
    return value
