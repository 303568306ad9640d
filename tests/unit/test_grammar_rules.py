"""Under a grammar the acceptance rules keep the target's masked distribution: the exact enumeration of test_rules.py,
with masks that depend on the path, applied to the target and to the drafter by the same pipeline."""

from __future__ import annotations

from collections.abc import Sequence as Items

import pytest
import torch
from torch import Tensor

from foredraft.params import SamplingParams
from foredraft.sampling.pipeline import adjust_after
from foredraft.sampling.pipeline import distribution as drawn_from
from foredraft.sampling.rules import RULES
from foredraft.types import Sequence
from tests.unit import test_rules
from tests.unit.test_rules import DRAFTERS, VOCAB, Table, distance, distribution


class NoRepeats:
    """No token twice in a row, and 2 never in the first place."""

    num_accepted = 0
    error = None

    def mask(self, path: Items[int]) -> Tensor:
        allowed = torch.ones(VOCAB, dtype=torch.bool)
        allowed[path[-1] if path else 2] = False
        return allowed

    def accept(self, tokens: Items[int]) -> None: ...

    def num_valid(self, path: Items[int]) -> int:
        return len(path)

    def forced(self, path: Items[int]) -> list[int]:
        return []

    def is_complete(self, path: Items[int]) -> bool:
        return False


class Forgetful(NoRepeats):
    """A mutant: every node gets the mask of the root."""

    def mask(self, path: Items[int]) -> Tensor:
        return super().mask(())


def masked(table: Table, constraint: NoRepeats) -> Table:
    params = SamplingParams(temperature=1.0, top_k=0).resolved({})

    def row(context: tuple[int, ...]) -> Tensor:
        sequence = Sequence(0, "", 0, [0], 1, params, seed=0, max_tokens=9, constraint=constraint)
        return drawn_from(adjust_after(table(context).log().float(), sequence, context), params)

    return row


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_the_distribution_is_the_targets_under_the_mask(
    rule: str, drafter: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    p, q = test_rules.P, test_rules.Q
    monkeypatch.setattr(test_rules, "P", masked(p, NoRepeats()))
    monkeypatch.setattr(test_rules, "Q", masked(q, NoRepeats()))
    found = distribution(RULES[rule], DRAFTERS[drafter])
    assert distance(found) < 1e-12
    repeating = [text for text, weight in found.items() if weight and (text[0] == 2 or text[0] == text[1])]
    assert not repeating
    monkeypatch.setattr(test_rules, "P", masked(p, Forgetful()))
    assert distance(found) > 0.1, "a mask that ignores the path makes another distribution"
