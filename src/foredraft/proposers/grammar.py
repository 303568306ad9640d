"""Drafts the tokens that the request's grammar forces: names of properties, brackets, the rest of an enum's value.
Costs a few steps of the parser, and the draft is always right.
Shines on JSON schemas with many fixed names; without a grammar it drafts nothing."""

from __future__ import annotations

from dataclasses import dataclass

from foredraft.errors import InvalidSpec
from foredraft.proposers.base import Proposer
from foredraft.proposers.target import TargetModel
from foredraft.types import NO_DRAFT, Draft, Sequence


@dataclass(frozen=True)
class GrammarOptions:
    k: int = 16  # draft tokens

    def __post_init__(self) -> None:
        if not 1 <= self.k <= 64:
            raise InvalidSpec(f"grammar: k={self.k} must be from 1 to 64.")


class Grammar(Proposer):
    """Reads the sequence's constraint, and has no state of its own."""

    name = "grammar"
    needs = "grammar"
    Options = GrammarOptions

    def __init__(self, options: GrammarOptions, target: TargetModel | None = None) -> None:
        self.num_lookahead_tokens = options.k

    def draft(self, sequence: Sequence, budget: int) -> Draft:
        length = min(budget, self.num_lookahead_tokens)
        if sequence.constraint is None or length < 1:
            return NO_DRAFT
        return Draft.chain(sequence.constraint.forced(sequence.constrained_path(()))[:length], 1.0, self.name)
