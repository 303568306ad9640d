"""Draft trees as a host grows them, beside all candidates that there could be."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foredraft.proposers.model.tree import Tree, TreeShape
from tests.tree_reference import add_level
from tests.unit.unit_helpers import make_sequence

DEPTH, WIDTH = 3, 2
Path = tuple[int, ...]  # ranks of tokens from the root down
Shares = dict[Path, float]


def grown(shares: Shares, budget: int, min_score: float = 0.0) -> tuple[Tree, int]:
    """The tree whose candidates behind a path have these probabilities, and how many nodes were run for it."""
    shape = TreeShape(DEPTH, WIDTH, prunes=True, nodes=budget)
    tree, num_run = Tree(make_sequence([1, 2]), shape, budget, 2, 16, min_score), 0
    while tree.grows:
        new = [-1] if not tree.depth else list(range(tree.num_run, len(tree.tokens)))
        tree.num_run = len(tree.tokens)
        num_run += sum(node >= 0 for node in new)
        add_level(tree, new[0], [[(rank, shares[*tree.path(node), rank]) for rank in range(WIDTH)] for node in new])
    return tree, num_run


@st.composite
def all_shares(draw: st.DrawFn) -> Shares:
    """Probabilities of all candidates; those behind one path do not add up to more than 1."""
    shares: Shares = {}
    for depth in range(DEPTH):
        for path in product(range(WIDTH), repeat=depth):
            first = draw(st.floats(0.05, 0.9))
            shares[*path, 0], shares[*path, 1] = first, (1 - first) * draw(st.floats(0.1, 0.9))
    return shares


@given(all_shares(), st.integers(1, 6))
@settings(max_examples=100, deadline=None)
def test_what_is_not_run_would_not_have_changed_the_draft(shares: Shares, budget: int) -> None:
    """A beam of two nodes at every depth, all of which are run, finds no better draft."""
    beam, scores = [()], dict[Path, float]()
    for _ in range(DEPTH):
        found = {(*path, rank): scores.get(path, 1.0) * shares[*path, rank] for path in beam for rank in range(WIDTH)}
        scores |= found
        beam = sorted(found, key=lambda path: -found[path])[:WIDTH]
    best = sorted(scores.values(), reverse=True)[:budget]
    tree, _ = grown(shares, budget)
    assert sorted(tree.draft("head", None).scores, reverse=True) == pytest.approx(best)


@pytest.mark.parametrize(("budget", "num_run"), [(1, 0), (2, 1), (3, 3)])
def test_only_nodes_are_run_whose_children_could_be_drafted(budget: int, num_run: int) -> None:
    sure = {path: 0.8 if path[-1] == 0 else 0.1 for depth in (1, 2, 3) for path in product((0, 1), repeat=depth)}
    tree, ran = grown(sure, budget)
    assert (len(tree.draft("head", None)), ran) == (budget, num_run)


@pytest.mark.parametrize(
    ("min_score", "num_run"),
    [(0.0, 4), (0.5, 2), (0.7, 1), (0.8, 0)],
)
def test_a_tree_ends_where_going_on_is_not_worth_it(min_score: float, num_run: int) -> None:
    """Of a chain with scores 0.8, 0.64 and 0.512, and its siblings."""
    sure = {path: 0.8 if path[-1] == 0 else 0.1 for depth in (1, 2, 3) for path in product((0, 1), repeat=depth)}
    tree, ran = grown(sure, 8, min_score)
    assert ran == num_run
    assert {0.8, 0.1} <= {round(score, 3) for score in tree.draft("head", None).scores}  # what is known is drafted
