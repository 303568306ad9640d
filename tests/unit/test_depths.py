"""Whole drafts on a device are as deep as the last drafts of a sequence were worth."""

from __future__ import annotations

import pytest

from foredraft.proposers.model.depths import FEW, Depths
from foredraft.proposers.model.tree import TreeShape
from foredraft.types import Draft

SHAPE = TreeShape(depth=5, width=4, prunes=True, nodes=16)
WORTH = 0.2  # what a level must promise to be gone on from


def chain(*scores: float) -> Draft:
    size = len(scores)
    return Draft(tuple(range(size)), tuple(range(-1, size - 1)), scores, ("eagle",) * size)


@pytest.fixture
def depths() -> Depths:
    return Depths(SHAPE, SHAPE.shallower)


def test_shallower_shapes_have_half_the_depth_each() -> None:
    assert [shape.depth for shape in SHAPE.shallower] == [3, 2, 1]
    assert TreeShape(1, 4).shallower == []


def test_a_sequence_begins_with_all_levels(depths: Depths) -> None:
    assert depths.choose([1], WORTH) is SHAPE


@pytest.mark.parametrize(
    ("scores", "depth"),
    [((0.1,), 1), ((0.5, 0.1), 2), ((0.7, 0.4, 0.1, 0.05), 3), ((0.8, 0.6, 0.4, 0.3, 0.25), 5)],
)
def test_levels_that_were_not_worth_it_are_not_run_again(depths: Depths, scores: tuple[float, ...], depth: int) -> None:
    depths.learn(1, chain(*scores), SHAPE)
    assert depths.choose([1], WORTH).depth == depth


def test_branches_of_a_level_count_together(depths: Depths) -> None:
    """A level is one run, however many of its nodes it goes on from."""
    depths.learn(1, Draft((1, 2, 3), (-1, -1, 0), (0.15, 0.15, 0.1), ("eagle",) * 3), SHAPE)
    assert depths.choose([1], WORTH).depth == 2


def test_a_shallow_draft_that_promises_more_is_followed_by_a_deeper_one(depths: Depths) -> None:
    depths.learn(1, chain(0.5, 0.1), SHAPE)
    two = depths.choose([1], WORTH)
    for _ in range(8):
        depths.learn(1, chain(0.9, 0.8), two)
    assert depths.choose([1], WORTH).depth > 2


def test_whole_drafts_are_made_where_they_are_wanted(depths: Depths) -> None:
    """For fixed settings, and where the deepest of many sequences decides."""
    depths.learn(1, chain(0.1), SHAPE)
    assert depths.choose([1], 0.0) is SHAPE
    assert depths.choose([1, 2], WORTH) is SHAPE  # nothing is known of 2
    for each in range(FEW + 1):
        depths.learn(each, chain(0.1), SHAPE)
    assert depths.choose(range(FEW), WORTH).depth == 1
    assert depths.choose(range(FEW + 1), WORTH) is SHAPE


def test_what_has_ended_is_forgotten(depths: Depths) -> None:
    depths.learn(1, chain(0.1), SHAPE)
    depths.release([1])
    assert depths.choose([1], WORTH) is SHAPE
