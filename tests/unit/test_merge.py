"""Drafts of several proposers as one tree."""

from __future__ import annotations

import random

from foredraft.proposers.merge import merge
from foredraft.types import Draft


def test_merging_keeps_the_best_nodes_and_their_ancestors() -> None:
    chance = random.Random(5)
    for _ in range(200):
        drafts = [random_draft(chance, origin) for origin in ("a", "b", "c")]
        budget = chance.randrange(0, 20)
        merged = merge(drafts, budget)
        whole = merge(drafts, 1000)
        assert len(merged) == min(budget, len(whole))
        assert paths(merged) <= paths(whole) == set().union(*(paths(draft) for draft in drafts))
        if len(merged) < len(whole):
            dropped = sorted(whole.scores, reverse=True)[len(merged) :]
            assert min(merged.scores, default=1.0) >= max(dropped)
        edges = list(zip(merged.parents, merged.tokens, strict=True))
        assert len(set(edges)) == len(edges)


def random_draft(chance: random.Random, origin: str) -> Draft:
    parents: list[int] = []
    scores: list[float] = []
    for node in range(chance.randrange(0, 12)):
        parents.append(chance.randrange(-1, node))
        above = scores[parents[-1]] if parents[-1] >= 0 else 1.0
        scores.append(above * chance.random())
    tokens = tuple(chance.randrange(4) for _ in parents)
    return Draft(tokens, tuple(parents), tuple(scores), (origin,) * len(tokens))


def paths(draft: Draft) -> set[tuple[int, ...]]:
    """Every node as the tokens that lead to it."""
    found: list[tuple[int, ...]] = []
    for token, parent in zip(draft.tokens, draft.parents, strict=True):
        found.append((*(found[parent] if parent >= 0 else ()), token))
    return set(found)
