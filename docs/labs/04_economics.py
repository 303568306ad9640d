"""Lab 4: when speculation pays.

A cycle drafts k tokens, verifies them in one run, and emits the accepted ones and one more. All times are in plain
steps: a draft token costs c, a run of r rows costs v(r), and v(1) = 1. If a draft token is accepted with probability
alpha, a cycle brings E = 1 + alpha + ... + alpha^k tokens in k * c + v(k + 1) steps, and the quotient is the speed-up.

The lab throws dice for all of this and compares them with the formulas of foredraft.control.economics, which also stand
behind `foredraft plan`. No model is loaded.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from lab import arguments, check, heading, say, table

from foredraft.control import economics
from foredraft.control.economics import VerifyCurve

K_MAX = 8
ERRORS = 5  # standard errors within which dice and formula must agree
# An invented machine with room for about eight rows: up to there a run waits for the weights, beyond it for arithmetic.
MACHINE = VerifyCurve((1, 2, 4, 8, 16, 64), (0.012, 0.0125, 0.013, 0.016, 0.024, 0.08))


def cycles(rng: np.random.Generator, acceptances: list[float], count: int) -> np.ndarray:
    """The tokens of `count` cycles: draft tokens are accepted until the first rejection, and one token is added."""
    accepted = rng.random((count, len(acceptances))) < np.array(acceptances)
    return 1 + np.cumprod(accepted, axis=1).sum(axis=1)


def off_by(tokens: np.ndarray, expected: float) -> float:
    """The distance of a mean from its expectation, in standard errors."""
    return abs(tokens.mean() - expected) / max(1e-12, tokens.std() / len(tokens) ** 0.5)


def dice_and_formula(count: int) -> None:
    heading(f"1. Tokens per run: {count} cycles of dice against the formula")
    rng = np.random.default_rng(0)
    lengths = (1, 2, 4, 8)
    rows, worst = [], 0.0
    for alpha in (0.3, 0.6, 0.8, 0.9):
        cells = []
        for k in lengths:
            tokens, expected = cycles(rng, [alpha] * k, count), economics.expected_tokens(alpha, k)
            worst = max(worst, off_by(tokens, expected))
            cells.append(f"{tokens.mean():.3f} / {expected:.3f}")
        rows.append((alpha, *cells, f"{1 / (1 - alpha):.2f}"))
    table(("alpha", *(f"k = {k}" for k in lengths), "limit"), rows)
    check(worst < ERRORS, f"dice and formula agree within {ERRORS} standard errors (the worst is {worst:.1f} off)")
    by_depth = [0.9, 0.7, 0.5]
    tokens, expected = cycles(rng, by_depth, count), economics.expected_tokens_by_depth(by_depth)
    check(off_by(tokens, expected) < ERRORS, f"so they do with acceptance {by_depth} by depth: {expected:.3f} tokens")


def best_k(count: int) -> None:
    heading("2. The best k")
    say("""E levels off, because a draft token counts only if all before it were accepted; the time goes on growing.
        So there is a best k. Here a draft token is accepted with 0.8 and costs 0.1 plain steps, and a run costs one
        step at any size.""")
    rng = np.random.default_rng(1)
    alpha, cost = 0.8, 0.1
    rows, thrown = [], {}
    for k in range(K_MAX + 1):
        thrown[k] = cycles(rng, [alpha] * k, count).mean() / (k * cost + 1)
        rows.append((k, f"{thrown[k]:.3f}x", f"{economics.speedup(alpha, cost, k):.3f}x"))
    table(("k", "dice", "formula"), rows)
    best = economics.best_length([alpha] * K_MAX, cost)
    check(thrown[best.k] > 0.98 * max(thrown.values()), f"k = {best.k} is the best by the dice too, within 2 %")
    check(0 < best.k < K_MAX, "neither no draft nor the longest draft is best")

    heading("3. When the answer is 0")
    say("""One draft token brings alpha tokens more and takes c steps more. If alpha is not above c, that is a loss,
        and longer drafts only lose more. Good planning has 0 among its answers.""")
    grid = (0.1, 0.3, 0.5, 0.7, 0.9)
    best_of = {(a, c): economics.best_length([a] * K_MAX, c).k for a in grid for c in grid}
    table(("alpha \\ c", *grid), [(alpha, *(best_of[alpha, cost] for cost in grid)) for alpha in grid])
    check(all((k == 0) == (a <= c) for (a, c), k in best_of.items()), "k = 0 is best exactly where alpha <= c")
    even = economics.break_even_alpha(0.3, K_MAX)
    check(even is not None and abs(even - 0.3) < 1e-9, "the break-even of c = 0.3 is an acceptance of 0.3")
    loses = cycles(rng, [0.3] * 4, count).mean() / (4 * 0.5 + 1)
    check(loses < 1, f"dice: four draft tokens of acceptance 0.3 and cost 0.5 give {loses:.2f}x")


def large_batches(count: int) -> None:
    heading("4. Large batches turn it around")
    say("""With B requests a plain step has B rows already, and drafts of k make B (k + 1) of them. While the machine
        waits for its weights these rows are free; once it computes without pause, each costs its share. The curve v
        has to be measured; this one is of an invented machine with room for about eight rows. Acceptance 0.8, c =
        0.02.""")
    rng = np.random.default_rng(2)
    alpha, cost = 0.8, 0.02
    rows, thrown = [], {}
    for batch in (1, 2, 4, 8, 16, 32):
        best = economics.best_at_batch(MACHINE, alpha, cost, K_MAX, batch)
        verify = MACHINE.at_batch(batch)
        thrown[batch] = cycles(rng, [alpha] * 4, count).mean() / (4 * cost + verify(5))
        rows.append((batch, best.k, f"{best.speedup:.2f}x", f"{thrown[batch]:.2f}x"))
    table(("requests at once", "best k", "its speed-up", "k = 4 by dice"), rows)
    flip = economics.flip_batch(MACHINE, alpha, cost, K_MAX, batch_max=64)
    check(flip is not None, f"from {flip} requests on, no draft is best")

    def fastest(batch: int) -> float:
        return max(economics.speedup(alpha, cost, k, MACHINE.at_batch(batch)) for k in range(1, K_MAX + 1))

    check(all(fastest(batch) > 1 for batch in range(1, flip)), "with fewer requests some length pays at every batch")
    check(fastest(flip) <= 1, f"with {flip} no length pays")
    check(thrown[1] > 1 > thrown[32], "dice: k = 4 gains alone, and loses with 32 requests")


@dataclass(frozen=True)
class Request:
    alpha: float  # how often a draft token is accepted; no policy but the oracle knows it
    tokens: int
    seed: int


Policy = Callable[[Request], "Chooser"]
COST = 0.15
CODE, CHAT, CODE_SHARE = (12.0, 2.5), (1.5, 12.0), 0.7  # Beta distributions of acceptance within each kind


@lru_cache(maxsize=1024)
def planned(percent: int) -> int:
    """The best k for an acceptance in percent, alone on the machine."""
    return economics.best_length([percent / 100] * K_MAX, COST, MACHINE.relative).k


class Chooser:
    """Chooses k before a cycle and learns afterwards how many draft tokens were accepted. This one is fixed."""

    def __init__(self, k: int) -> None:
        self.k = k

    def choose(self) -> int:
        return self.k

    def learn(self, accepted: int, rejected: int) -> None: ...


class Adaptive(Chooser):
    """Counts accepted and rejected draft tokens of this request on top of a prior, and plans with their ratio. While
    the plan is 0 it probes with one draft token now and then, because texts change."""

    every = 32  # cycles between probes

    def __init__(self, mean: float, weight: float = 2.0) -> None:
        self.accepted, self.rejected, self.idle = mean * weight, (1 - mean) * weight, 0

    def choose(self) -> int:
        k = planned(round(100 * self.accepted / (self.accepted + self.rejected)))
        self.idle = 0 if k else self.idle + 1
        return int(self.idle % self.every == 0) if k == 0 else k

    def learn(self, accepted: int, rejected: int) -> None:
        self.accepted += accepted
        self.rejected += rejected


def steps(request: Request, chooser: Chooser) -> float:
    """The time of one request in plain steps."""
    rng = np.random.default_rng(request.seed)
    coins = iter(rng.random((request.tokens * 2 + K_MAX) * 2).tolist())
    written, time = 0, 0.0
    while written < request.tokens:
        k = min(chooser.choose(), request.tokens - written - 1)
        accepted = 0
        while accepted < k and next(coins) < request.alpha:
            accepted += 1
        chooser.learn(accepted, int(accepted < k))
        written += accepted + 1
        time += k * COST + MACHINE.relative(k + 1)
    return time


def workload(rng: np.random.Generator, count: int) -> list[Request]:
    """Code mostly repeats itself and is easy to predict; chat is not."""
    requests = []
    for _ in range(count):
        alpha = rng.beta(*(CODE if rng.random() < CODE_SHARE else CHAT))
        requests.append(Request(float(alpha), int(rng.integers(60, 240)), int(rng.integers(2**31))))
    return requests


def mixed_workload(count: int) -> None:
    heading("5. 70 % code and 30 % chat: one k for all, or one for each?")
    say(f"""Every request has its own acceptance: around {CODE[0] / sum(CODE):.2f} for code, around
        {CHAT[0] / sum(CHAT):.2f} for chat. A draft token costs {COST}. The average is no request's acceptance, so one
        k for all is wrong for nearly everybody. The adaptive policy starts every request from a prior (the average of
        earlier requests) and learns from its own drafts; nobody tells it what is code. The oracle knows every
        acceptance.""")
    prior = float(np.mean([request.alpha for request in workload(np.random.default_rng(99), 400)]))
    average = planned(round(100 * prior))
    policies: dict[str, Policy] = {
        "off for all": lambda request: Chooser(0),
        **{f"k = {k} for all": (lambda request, k=k: Chooser(k)) for k in range(1, K_MAX + 1)},
        "adaptive": lambda request: Adaptive(prior),
        "oracle per request": lambda request: Chooser(planned(round(100 * request.alpha))),
    }
    requests = workload(np.random.default_rng(3), count)
    tokens = sum(request.tokens for request in requests)
    times = {
        name: np.array([steps(request, policy(request)) for request in requests]) for name, policy in policies.items()
    }
    plain = np.array([request.tokens for request in requests])
    rows = []
    for name, each in times.items():
        note = "planned for the average" if name == f"k = {average} for all" else ""
        slowed = np.mean(each > plain * 1.1)
        rows.append((name, f"{tokens / each.sum():.3f}x", f"{slowed:.0%}", f"{(plain / each).min():.2f}x", note))
    table(("policy", "speed-up of the whole", "slowed by over 10 %", "the worst off", ""), rows)
    total = {name: float(each.sum()) for name, each in times.items()}
    fixed = min(time for name, time in total.items() if name.startswith("k ="))
    check(total["adaptive"] <= total["off for all"], "adaptive is at least as fast as off for all")
    check(total["adaptive"] <= fixed, "adaptive is at least as fast as the best single k for all, chosen afterwards")
    check(total["oracle per request"] <= total["adaptive"] * 1.01, "nothing beats knowing the acceptance, within 1 %")
    check(total["adaptive"] <= total["oracle per request"] * 1.1, "learning costs less than 10 % of the time")
    say("""The requests that lose tell more than the average: whoever has one of those gains nothing from the others'
        speed. The adaptive policy pays for a few wrong drafts to find out, and then stops.""")


def main() -> None:
    options = arguments(__doc__).parse_args()
    print(__doc__)
    count, requests = (20_000, 120) if options.small else (400_000, 1_000)
    dice_and_formula(count)
    best_k(count)
    large_batches(count)
    mixed_workload(requests)


if __name__ == "__main__":
    main()
