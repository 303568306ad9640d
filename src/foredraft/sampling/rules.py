"""The acceptance rules: which of a draft's tokens the target keeps, and the one token that it adds.

Each rule sees the draft as a tree and asks for the target's distribution at the nodes that it reaches; it never knows
who proposed. Chance comes from outside: keyed noise in the engine, every outcome in turn where a test enumerates the
distribution.

Coins are for drafts that were sampled. Every rule judges others by `match`: it accepts a token that nobody sampled with
the same probability, p(x), and its output does not depend on the draft. So a proposer may remember whatever it likes,
even an answer that the same seed gave before.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from foredraft.types import Draft

Outcome = tuple[list[int], list[int]]  # accepted nodes from the root down; their tokens and the target's own


class Target(Protocol):
    """The target at the nodes of a draft; node -1 is the last committed token. `path` is the tokens between."""

    def token(self, node: int, path: list[int]) -> int:
        """The token that the request's seed draws there (the match rule)."""

    def distribution(self, node: int, path: list[int]) -> Tensor:
        """What the request's sampling parameters make of the logits there: float64 [vocab], sums to 1."""


class Chance(Protocol):
    """Independent random outcomes. `position` counts from 0 at the first token after the committed ones."""

    def accepts(self, probability: float, position: int, trial: int) -> bool:
        """A coin for the `trial`-th decision at a position."""

    def draw(self, probabilities: Tensor, position: int) -> int:
        """A token for a position whose draft tokens were all rejected, or that had none."""


def match(draft: Draft, target: Target, chance: Chance) -> Outcome:
    """Accept a draft token if it is the token that the target draws itself. The output does not depend on the draft."""
    path: list[int] = []
    tokens: list[int] = []
    node = -1
    while True:
        tokens.append(target.token(node, tokens))
        node = draft.child(node, tokens[-1])
        if node < 0:
            return path, tokens
        path.append(node)


def rejection(draft: Draft, target: Target, chance: Chance) -> Outcome:
    """Accept a sampled token x with probability min(1, p(x) / q(x)); after a rejection go on with what q left of p.
    Siblings are tried in turn."""
    if draft.q is None:
        return match(draft, target, chance)
    path: list[int] = []
    tokens: list[int] = []
    node = -1
    while True:
        p = target.distribution(node, tokens)
        for trial, child in enumerate(draft.children(node)):
            token, q = draft.tokens[child], draft.q[child]
            if chance.accepts(min(1.0, float(p[token] / q[token])), len(tokens), trial):
                node = child
                break
            p = _residual(p, q)
        else:
            return path, [*tokens, chance.draw(p, len(tokens))]
        path.append(node)
        tokens.append(draft.tokens[node])


def block(draft: Draft, target: Target, chance: Chance) -> Outcome:
    """Judge a chain as a whole: keep the longest prefix whose coin falls, with the odds of the whole prefix in view.

    A draft that is not a chain is judged node by node.
    """
    if draft.q is None:
        return match(draft, target, chance)
    if draft.parents != tuple(range(-1, len(draft) - 1)):
        return rejection(draft, target, chance)
    drafts = list(draft.tokens)
    odds = 1.0  # the weight of the prefix under the target, relative to the drafter
    kept = 0
    for length in range(len(drafts) + 1):
        p = target.distribution(length - 1, drafts[:length])
        if length == len(drafts):
            chances, rest = odds, p
        else:
            rest = torch.clamp(odds * p - draft.q[length], min=0)
            mass = float(rest.sum())
            chances = 1.0 if mass + 1 - odds == 0 else mass / (mass + 1 - odds)
        # All coins belong to the first position: a later draft, which starts further on, must not meet them again.
        if length == 0 or chance.accepts(chances, 0, length):
            kept, left = length, rest
        if length < len(drafts):
            token = drafts[length]
            odds = min(1.0, odds * float(p[token] / draft.q[length][token]))
    total = left.sum()
    token = chance.draw(left / total if total > 0 else target.distribution(kept - 1, drafts[:kept]), kept)
    return list(range(kept)), [*drafts[:kept], token]


def _residual(p: Tensor, q: Tensor) -> Tensor:
    """What is left of p once q has had its turn; p itself where nothing is, for then only rounding rejected the
    token."""
    rest = torch.clamp(p - q, min=0)
    mass = rest.sum()
    return rest / mass if mass > 0 else p


RULES: dict[str, Callable[[Draft, Target, Chance], Outcome]] = {"match": match, "rejection": rejection, "block": block}
