"""Lab 3: keep a draft token by chance, and leave the distribution as it is.

A model that samples has no single right token: it has a distribution p. A drafter draws a token x from its own
distribution q. Rejection sampling keeps x with probability min(1, p(x) / q(x)). After a rejection it draws from what q
left of p: max(0, p - q), scaled to sum to 1. The claim: the emitted token has exactly the distribution p, for any q.

Small vocabularies let us check that without statistics: go through every draft token and every coin, and add up.
"""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator

import numpy as np
import torch
from lab import arguments, check, heading, say, table

from foredraft.audit.distribution import Case, g_test, sampled_chain, write
from foredraft.sampling import rules
from foredraft.sampling.noise import gumbel, stream_key, uniform
from foredraft.types import NO_DRAFT, Draft

Row = np.ndarray  # a distribution over the vocabulary
# What a rule does with a draft token x: the probability that it stays, and the distribution to draw from otherwise.
Rule = Callable[[Row, Row, int], tuple[float, Row]]

P = np.array([0.50, 0.30, 0.15, 0.05])
Q = np.array([0.25, 0.45, 0.10, 0.20])
EXACT = 1e-12
SIGNIFICANCE = 1e-4
VOCAB = 6


def rejection(p: Row, q: Row, x: int) -> tuple[float, Row]:
    rest = np.maximum(p - q, 0)
    return min(1.0, p[x] / q[x]), rest / rest.sum() if rest.sum() > 0 else p


def redraws_from_p(p: Row, q: Row, x: int) -> tuple[float, Row]:
    """Wrong: tokens that q likes too much get a second chance."""
    return min(1.0, p[x] / q[x]), p


def distribution(rule: Rule, p: Row, stated: Row, drawn: Row | None = None) -> tuple[Row, float]:
    """The exact distribution of the emitted token, and the acceptance. Draft tokens are drawn from `drawn`; the rule
    is told that they were drawn from `stated`."""
    drawn = stated if drawn is None else drawn
    emitted, accepted = np.zeros_like(p), 0.0
    for x in np.flatnonzero(drawn):
        stays, rest = rule(p, stated, x)
        emitted[x] += drawn[x] * stays
        emitted += drawn[x] * (1 - stays) * rest
        accepted += drawn[x] * stays
    return emitted, accepted


def distance(p: Row, q: Row) -> float:
    """Total variation: half the sum of the differences."""
    return float(np.abs(p - q).sum() / 2)


def point(x: int, size: int) -> Row:
    return np.eye(size)[x]


def pairs(count: int) -> Iterator[tuple[Row, Row]]:
    """Random targets and drafters, close ones and far ones, some with tokens that the other never takes."""
    rng = np.random.default_rng(0)
    for index in range(count):
        p, q = (rng.dirichlet(np.full(VOCAB, (0.1, 0.5, 3.0)[index % 3])) for _ in range(2))
        if index % 4 == 0:
            p[0], q[1] = 0.0, 0.0
        yield p / p.sum(), q / q.sum()
    yield P, P
    yield np.array([0.5, 0.5, 0.0, 0.0]), np.array([0.0, 0.0, 0.5, 0.5])


def exact_distributions(count: int) -> None:
    heading("1. Every draft token and every coin")
    emitted, accepted = distribution(rejection, P, Q)
    rows = [
        (x, f"{P[x]:.2f}", f"{Q[x]:.2f}", f"{min(1, P[x] / Q[x]):.2f}", f"{min(P[x], Q[x]):.2f}",
         f"{max(0.0, P[x] - Q[x]):.2f}", f"{emitted[x]:.2f}")
        for x in range(len(P))
    ]  # fmt: skip
    table(("token", "p", "q", "stays with", "min(p, q)", "max(0, p - q)", "comes out with"), rows)
    say("""A token is emitted because it was drafted and stays, q · min(1, p/q) = min(p, q), or because it is drawn
        after a rejection. Rejections have the probability that is missing, the sum of max(0, p - q), and are drawn in
        these proportions. min(p, q) + max(0, p - q) = p. The acceptance is the overlap of p and q, which is the sum of
        min(p, q).""")
    distributions = [(p, q, *distribution(rejection, p, q)) for p, q in pairs(count)]
    check(
        max(distance(p, out) for p, _, out, _ in distributions) < EXACT,
        f"the output distribution is p for {len(distributions)} pairs of p and q",
    )
    check(
        max(abs(share - np.minimum(p, q).sum()) for p, q, _, share in distributions) < EXACT,
        f"the acceptance is the overlap of p and q for all of them ({accepted:.2f} in the table)",
    )

    heading("2. Two rules that look right and are not")
    best = int(Q.argmax())
    wrong, _ = distribution(redraws_from_p, P, Q)
    argmax, _ = distribution(rejection, P, Q, drawn=point(best, len(P)))
    honest, share = distribution(rejection, P, point(best, len(P)))
    rows = [
        ("p itself", *(f"{value:.3f}" for value in P), ""),
        ("after a rejection, draw from p", *(f"{value:.3f}" for value in wrong), f"{distance(P, wrong):.3f}"),
        ("draft q's best, state q", *(f"{value:.3f}" for value in argmax), f"{distance(P, argmax):.3f}"),
        ("draft q's best, state a point mass", *(f"{value:.3f}" for value in honest), f"{distance(P, honest):.3f}"),
    ]
    table(("rule", "0", "1", "2", "3", "distance from p"), rows)
    say("""The second is the subtle one. A token that was picked, not drawn, has all of its q on itself. To state the
        soft q is to claim that other tokens had their turn. With the honest q it stays with probability p(x).""")
    check(distance(P, wrong) > 0.01, "drawing from p after a rejection changes the distribution")
    check(distance(P, argmax) > 0.01, "a picked token with a soft q changes the distribution")
    check(distance(P, honest) < EXACT, "a picked token with a point mass does not")
    check(abs(share - P[best]) < EXACT, "and it is accepted with the probability that p gives it")


class Every:
    """Chance for the engine's rules that takes every outcome in turn: it follows a script, then the first possible."""

    def __init__(self, script: list[int]) -> None:
        self.script = script
        self.taken: list[tuple[int, list[float]]] = []

    def _take(self, probabilities: list[float]) -> int:
        place = len(self.taken)
        first = next(i for i, probability in enumerate(probabilities) if probability > 0)
        self.taken.append((self.script[place] if place < len(self.script) else first, probabilities))
        return self.taken[-1][0]

    def accepts(self, probability: float, position: int, trial: int) -> bool:
        return self._take([probability, 1 - probability]) == 0

    def draw(self, probabilities: torch.Tensor, position: int) -> int:
        return self._take(probabilities.tolist())


class Table:
    """A target with a distribution of its own after every token."""

    rows = torch.tensor(np.random.default_rng(1).dirichlet(np.ones(4), size=5))

    def token(self, node: int, path: list[int]) -> int:
        raise NotImplementedError("only the match rule asks for a seed's token")

    def distribution(self, node: int, path: list[int]) -> torch.Tensor:
        return self.rows[path[-1] + 1 if path else 0]


def engine_distribution(rule: Callable[..., rules.Outcome]) -> dict[tuple[int, ...], float]:
    """The exact distribution of the first two tokens when the engine's rule judges one draft token from Q."""
    texts: dict[tuple[int, ...], float] = defaultdict(float)
    for token, probability in enumerate(Q):
        draft = Draft((token,), (-1,), (0.5,), ("lab",), torch.tensor(Q)[None])
        scripts: list[list[int]] = [[]]
        while scripts:
            chance = Every(scripts.pop())
            _, tokens = rule(draft, Table(), chance)
            weight = float(probability)
            for place, (outcome, odds) in enumerate(chance.taken):
                weight *= odds[outcome]
                if place >= len(chance.script):
                    before = [taken for taken, _ in chance.taken[:place]]
                    scripts += [[*before, other] for other, odd in enumerate(odds) if odd > 0 and other != outcome]
            if len(tokens) == 2:
                texts[tuple(tokens)] += weight
            else:  # rejected: the next run emits the second token
                for following, odd in enumerate(Table.rows[tokens[0] + 1].tolist()):
                    texts[tokens[0], following] += weight * odd
    return texts


def engine(names: tuple[str, ...] = ("rejection", "block")) -> None:
    heading("3. The engine's own code")
    say("""The acceptance rules of the engine take their random numbers from outside, so the same method works on
        them: every draft token, every coin, every draw. A text of two tokens shows that the token after an accepted one
        is right too.""")
    wanted = {(a, b): float(Table.rows[0][a] * Table.rows[a + 1][b]) for a, b in itertools.product(range(4), repeat=2)}
    for name in names:
        found = engine_distribution(getattr(rules, name))
        off = sum(abs(found[text] - probability) for text, probability in wanted.items()) / 2
        check(off < EXACT, f"{name}: the exact distribution of two tokens is the target's (distance {off:.0e})")


def sampled(samples: int) -> None:
    heading(f"4. The same by sampling, {samples} tokens each")
    say("""Enumeration proves a formula. For a whole machine one can only count tokens and compare them with p. The
        G-test says how often chance alone would be at least this far off; below 1e-4 we call it a difference.""")
    rng = np.random.default_rng(2)
    best = int(Q.argmax())
    cases: dict[str, tuple[Rule, Row, bool]] = {
        "rejection": (rejection, Q, True),
        "after a rejection, draw from p": (redraws_from_p, Q, False),
        "draft q's best, state q": (rejection, point(best, len(Q)), False),
    }
    rows, p_values = [], {}
    for name, (rule, drawn, _) in cases.items():
        verdicts = [rule(P, Q, x) for x in range(len(P))]
        drafts = rng.choice(len(P), size=samples, p=drawn)
        stays = rng.random(samples) < np.array([probability for probability, _ in verdicts])[drafts]
        redrawn = np.array([rng.choice(len(P), size=samples, p=rest) for _, rest in verdicts])
        tokens = np.where(stays, drafts, redrawn[drafts, np.arange(samples)])
        test = g_test(Counter((int(token),) for token in tokens), {(x,): float(P[x]) for x in range(len(P))})
        p_values[name] = test.p_value
        rows.append((name, f"{test.statistic:.1f}", f"{test.p_value:.2g}", f"{stays.mean():.3f}"))
    table(("rule", "G", "p-value", "accepted"), rows)
    for name, (_, _, right) in cases.items():
        wanted = "passes" if right else "is caught by"
        check((p_values[name] > SIGNIFICANCE) == right, f"{name}: {wanted} the G-test")


def same_noise(p: Row, q: Row) -> float:
    """How often the two draw the same token with the same noise, exactly. Drawing argmax(log p + Gumbel noise) is a
    race: token y finishes at E_y / p_y, with E_y exponential. Both races are won by x when every E_y is above
    E_x · max(p_y / p_x, q_y / q_x), and that has probability 1 over the sum of these."""
    both = [x for x in range(len(p)) if p[x] > 0 and q[x] > 0]
    return float(sum(1 / np.maximum(p / p[x], q / q[x]).sum() for x in both))


def nothing_proposed(text: tuple[int, ...], seed: int) -> Draft:
    return NO_DRAFT


def standard_error(share: float, samples: int) -> float:
    return max(0.0, share * (1 - share) / samples) ** 0.5


def match(samples: int, count: int) -> None:
    heading("5. The match rule: the same noise for both")
    say("""The engine's default draws the target's token as argmax(log p + noise), where the noise of a token depends
        on the seed and the place only, and keeps a draft token if it is that token. The text then does not depend on
        the drafts at all. What does it cost? If the drafter uses the same noise, they agree at least as often as
        (1 - TV) / (1 + TV), where TV is the total variation of p and q, and never more often than 1 - TV, which is
        what rejection accepts. Two independent draws would agree far less often.""")
    rng = np.random.default_rng(3)
    rows, measured = [], []
    logits, change = rng.normal(size=(2, VOCAB))
    for change_by in (0.0, 0.1, 0.2, 0.4, 0.8):
        p, q = (np.exp(each) / np.exp(each).sum() for each in (logits, logits + change_by * change))
        ids = torch.arange(samples * VOCAB)
        noise = gumbel(uniform(stream_key(len(rows), 0), ids)).view(samples, VOCAB).numpy()
        target, drafted = ((np.log(each) + noise).argmax(1) for each in (p, q))
        agreed = float((target == drafted).mean())
        test = g_test(Counter((int(token),) for token in target), {(x,): float(p[x]) for x in range(VOCAB)})
        tv, exact = distance(p, q), same_noise(p, q)
        measured.append((tv, exact, agreed, test.p_value))
        row = (tv, (1 - tv) / (1 + tv), agreed, exact, 1 - tv, float(p @ q))
        rows.append([f"{value:.3f}" for value in row])
    table(("TV", "lower bound", "match, measured", "match, exact", "rejection", "independent draws"), rows)
    check(
        all(
            abs(agreed - exact) <= 5 * (exact * (1 - exact) / samples) ** 0.5 + EXACT
            for _, exact, agreed, _ in measured
        ),
        "the measured agreement is the exact one, within five standard errors",
    )
    texts = [
        [write(Case("lab", rules.match, drafter), seed) for drafter in (sampled_chain, nothing_proposed)]
        for seed in range(50)
    ]
    check(
        all(drafted == plain for drafted, plain in texts) and len({plain for _, plain in texts}) > 5,
        "the engine's match rule writes the same text with drafts and without, for 50 seeds",
    )
    check(
        all(value > SIGNIFICANCE for *_, value in measured),
        "the target's tokens have the distribution p: the G-test passes",
    )
    bounds = [(distance(p, q), same_noise(p, q)) for p, q in pairs(count)]
    check(
        all((1 - tv) / (1 + tv) - EXACT <= exact <= 1 - tv + EXACT for tv, exact in bounds),
        f"for {len(bounds)} pairs of p and q the match rule lies between the bound and rejection",
    )


def main() -> None:
    options = arguments(__doc__).parse_args()
    print(__doc__)
    count, samples = (60, 20_000) if options.small else (3_000, 400_000)
    exact_distributions(count)
    engine()
    sampled(samples)
    match(samples, count)


if __name__ == "__main__":
    main()
