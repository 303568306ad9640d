"""The acceptance rules leave the target's law as it is: exact enumeration of whole texts, every draft and every coin.

The target and the drafter are tables over a vocabulary of three; a text is three tokens long. A rule is run for each
sequence of random outcomes that it can meet, so the law that comes out is exact, and compared to 1e-12.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from foredraft.sampling import rules
from foredraft.sampling.rules import RULES, Outcome
from foredraft.types import NO_DRAFT, Draft

VOCAB, LENGTH = 3, 3
Distribution = dict[tuple[int, ...], float]
Table = Callable[[tuple[int, ...]], Tensor]


def table(seed: int, sharpness: float = 1.0) -> Table:
    """A random distribution for every context."""

    def row(context: tuple[int, ...]) -> Tensor:
        generator = torch.Generator().manual_seed(hash((seed, *context)) % 2**31)
        return (torch.randn(VOCAB, generator=generator, dtype=torch.float64) * sharpness).softmax(0)

    return row


P, Q = table(1, 1.5), table(2, 1.0)


class TableTarget:
    """The target after a committed context."""

    def __init__(self, p: Table, context: tuple[int, ...]) -> None:
        self.p = p
        self.context = context
        self.script = Script([])  # what a seed draws is up to it, too

    def token(self, node: int, path: list[int]) -> int:
        return self.script.draw(self.distribution(node, path), len(path))

    def distribution(self, node: int, path: list[int]) -> Tensor:
        return self.p((*self.context, *path))


class Script:
    """Chance that follows a script of outcomes, takes the first possible one beyond it, and notes its probability."""

    def __init__(self, outcomes: list[int]) -> None:
        self.outcomes = outcomes
        self.taken: list[tuple[int, list[float]]] = []

    def _take(self, probabilities: list[float]) -> int:
        place = len(self.taken)
        possible = [i for i, probability in enumerate(probabilities) if probability > 0]
        outcome = self.outcomes[place] if place < len(self.outcomes) else possible[0]
        self.taken.append((outcome, probabilities))
        return outcome

    def accepts(self, probability: float, position: int, trial: int) -> bool:
        return self._take([probability, 1 - probability]) == 0

    def draw(self, probabilities: Tensor, position: int) -> int:
        return self._take(probabilities.tolist())


def outcomes(
    rule: Callable[[Draft, TableTarget, Script], Outcome], draft: Draft, target: TableTarget
) -> Iterator[tuple[list[int], float]]:
    """All texts that a rule can emit, with their probabilities."""
    scripts: list[list[int]] = [[]]
    while scripts:
        given = scripts.pop()
        script = target.script = Script(given)
        _, tokens = rule(draft, target, script)
        weight = 1.0
        for place, (outcome, probabilities) in enumerate(script.taken):
            weight *= probabilities[outcome]
            if place >= len(given):
                prefix = [taken for taken, _ in script.taken[:place]]
                scripts += [[*prefix, i] for i, p in enumerate(probabilities) if p > 0 and i != outcome]
        yield tokens, weight


def chains(context: tuple[int, ...], length: int) -> Iterator[tuple[Draft, float]]:
    """All chains that the drafter can sample."""
    for tokens in itertools.product(range(VOCAB), repeat=length):
        rows = [Q((*context, *tokens[:i])) for i in range(length)]
        weight = (
            float(torch.stack([row[token] for row, token in zip(rows, tokens, strict=True)]).prod()) if rows else 1.0
        )
        if weight > 0:  # a drafter under a grammar cannot sample all
            draft = Draft(tokens, tuple(range(-1, length - 1)), (0.5,) * length, ("t",) * length, torch.stack(rows))
            yield draft, weight


def siblings(context: tuple[int, ...], replacement: bool) -> Iterator[tuple[Draft, float]]:
    """Two children of the root, drawn from one distribution, the second with the first put back or not."""
    q = Q(context)
    for first, second in itertools.product(range(VOCAB), repeat=2):
        later = q.clone()
        if not replacement:
            later[first] = 0
            later = later / later.sum()
        if q[first] > 0 and later[second] > 0:
            draft = Draft((first, second), (-1, -1), (0.5,) * 2, ("t",) * 2, torch.stack([q, later]))
            yield draft, float(q[first] * later[second])


def drafts(context: tuple[int, ...]) -> Iterator[tuple[Draft, float]]:
    """A tree of guesses that nobody sampled: the two best tokens, and one below the first."""
    first, second = Q(context).topk(2).indices.tolist()
    below = int(Q((*context, first)).argmax())
    yield Draft((first, second, below), (-1, -1, 0), (0.5,) * 3, ("t",) * 3), 1.0


DRAFTERS: dict[str, Callable[[tuple[int, ...]], Iterator[tuple[Draft, float]]]] = {
    "nothing": lambda context: iter([(NO_DRAFT, 1.0)]),
    "chain of 1": lambda context: chains(context, 1),
    "chain of 2": lambda context: chains(context, 2),
    "siblings, put back": lambda context: siblings(context, replacement=True),
    "siblings, not put back": lambda context: siblings(context, replacement=False),
    "guesses": drafts,
}


def distribution(
    rule: Callable[..., Outcome], drafter: Callable[[tuple[int, ...]], Iterator[tuple[Draft, float]]]
) -> Distribution:
    """The law of the first LENGTH tokens, cycle after cycle."""
    texts: dict[tuple[int, ...], float] = {(): 1.0}
    final: Distribution = defaultdict(float)
    while texts:
        context, weight = texts.popitem()
        for draft, drafted in drafter(context):
            for tokens, chance in outcomes(rule, draft, TableTarget(P, context)):
                text = (*context, *tokens)
                if len(text) >= LENGTH:
                    final[text[:LENGTH]] += weight * drafted * chance
                else:
                    texts[text] = texts.get(text, 0.0) + weight * drafted * chance
    return final


def target_distribution() -> Distribution:
    return {
        text: float(torch.stack([P(text[:i])[token] for i, token in enumerate(text)]).prod())
        for text in itertools.product(range(VOCAB), repeat=LENGTH)
    }


def distance(found: Distribution) -> float:
    return sum(abs(found.get(text, 0.0) - probability) for text, probability in target_distribution().items()) / 2


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_the_distribution_is_the_targets(rule: str, drafter: str) -> None:
    assert distance(distribution(RULES[rule], DRAFTERS[drafter])) < 1e-12


@pytest.mark.parametrize("rule", RULES)
def test_no_coin_is_thrown_for_a_draft_that_nobody_sampled(rule: str) -> None:
    """So the output is a function of the seed, whatever is drafted: a proposer may know how coins fell before."""

    class SeedTarget(TableTarget):
        def token(self, node: int, path: list[int]) -> int:
            return (1, 0, 2)[len(path)]

    class NoChance:
        def accepts(self, probability: float, position: int, trial: int) -> bool:
            raise AssertionError

        def draw(self, probabilities: Tensor, position: int) -> int:
            raise AssertionError

    draft = Draft((2, 1, 0, 1), (-1, -1, 1, 1), (0.5,) * 4, ("t",) * 4)
    assert RULES[rule](draft, SeedTarget(P, ()), NoChance()) == ([1, 2], [1, 0, 2])
    assert RULES[rule](NO_DRAFT, SeedTarget(P, ()), NoChance()) == ([], [1])


@pytest.mark.parametrize("rule", ["rejection", "block"])
@pytest.mark.parametrize("parents", [(-1, 0), (-1, -1)], ids=["chain", "siblings"])
def test_match_accepts_a_draft_that_nobody_sampled_as_often_as_coins_would(rule: str, parents: tuple[int, ...]) -> None:
    unsampled = Draft((2, 1), parents, (0.5,) * 2, ("t",) * 2)
    point_masses = replace(unsampled, q=torch.eye(VOCAB, dtype=torch.float64)[[2, 1]])

    def accepted_of(name: str, draft: Draft) -> float:
        return sum(p * (len(tokens) - 1) for tokens, p in outcomes(RULES[name], draft, TableTarget(P, ())))

    assert accepted_of("match", unsampled) == pytest.approx(accepted_of(rule, point_masses), abs=1e-12)


def accepted(rule: str, length: int) -> float:
    """The expected number of accepted tokens of one cycle."""
    return sum(
        drafted * chance * (len(tokens) - 1)
        for draft, drafted in chains((), length)
        for tokens, chance in outcomes(RULES[rule], draft, TableTarget(P, ()))
    )


def test_acceptance_of_one_draft_is_the_overlap_and_block_accepts_at_least_as_much() -> None:
    overlap = float(torch.minimum(P(()), Q(())).sum())
    assert accepted("rejection", 1) == pytest.approx(overlap, abs=1e-12)
    assert accepted("block", 1) == pytest.approx(overlap, abs=1e-12)
    assert accepted("block", 3) > accepted("rejection", 3) + 1e-4


def resample_from_p(draft: Draft, target: TableTarget, chance: Script) -> Outcome:
    p = target.distribution(-1, [])
    token = draft.tokens[0]
    if chance.accepts(min(1.0, float(p[token] / draft.q[0][token])), 0, 0):
        return [0], [token, chance.draw(target.distribution(0, [token]), 1)]
    return [], [chance.draw(p, 0)]


def no_bonus_after_rejection_but_a_draft_token(draft: Draft, target: TableTarget, chance: Script) -> Outcome:
    """After a refusal the refused guess's distribution is used again."""
    p = target.distribution(-1, [])
    token = draft.tokens[0]
    if chance.accepts(min(1.0, float(p[token] / draft.q[0][token])), 0, 0):
        return [0], [token, chance.draw(target.distribution(0, [token]), 1)]
    return [], [chance.draw(draft.q[0], 0)]


def with_q(change: Callable[[Tensor], Tensor]) -> Callable[[tuple[int, ...]], Iterator[tuple[Draft, float]]]:
    """Chains that state another q than the one they were drawn from."""

    def drafter(context: tuple[int, ...]) -> Iterator[tuple[Draft, float]]:
        for draft, weight in chains(context, 1):
            yield replace(draft, q=change(draft.q)), weight

    return drafter


def argmax_with_soft_q(context: tuple[int, ...]) -> Iterator[tuple[Draft, float]]:
    """The drafter's best token, stated as if it had been sampled."""
    q = Q(context)
    yield Draft((int(q.argmax()),), (-1,), (0.5,), ("t",), q[None]), 1.0


def drops_unlikely_samples(context: tuple[int, ...]) -> Iterator[tuple[Draft, float]]:
    """Samples, looks at the token, and keeps quiet when it is unlikely."""
    for draft, weight in chains(context, 1):
        yield (draft if draft.q[0][draft.tokens[0]] > 0.3 else NO_DRAFT), weight


MUTANTS = {
    "resamples from p": (resample_from_p, DRAFTERS["chain of 1"]),
    "draws from q after a refusal": (no_bonus_after_rejection_but_a_draft_token, DRAFTERS["chain of 1"]),
    "untempered q": (rules.rejection, with_q(lambda q: (q.log() / 2).softmax(-1))),
    "q not renormalised": (rules.rejection, with_q(lambda q: q * 0.8)),
    "argmax with a soft q": (rules.rejection, argmax_with_soft_q),
    "drops a sample after seeing it": (rules.rejection, drops_unlikely_samples),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_what_is_known_to_be_wrong_shows(name: str) -> None:
    rule, drafter = MUTANTS[name]
    assert distance(distribution(rule, drafter)) > 1e-3
