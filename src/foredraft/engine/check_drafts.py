"""Whether what a proposer has drafted is such that the target can run it, and that no rule is misled by it."""

from __future__ import annotations

from collections.abc import Sequence as Items

from foredraft.types import Draft


def check_drafts(drafts: Items[Draft], budgets: Items[int], vocab_size: int) -> None:
    """Raise ValueError unless there is one draft for each budget, within it and within the target's vocabulary."""
    if len(drafts) != len(budgets):
        raise ValueError(f"{len(drafts)} drafts were proposed for {len(budgets)} sequences")
    for draft, budget in zip(drafts, budgets, strict=True):
        if not draft:
            continue
        if len(draft) > budget:
            raise ValueError(f"{len(draft)} tokens were drafted, but the budget is {budget}")
        if not 0 <= min(draft.tokens) <= max(draft.tokens) < vocab_size:
            raise ValueError(f"a draft token is not in the target's vocabulary of {vocab_size}")
        if not all(0 < score <= 1 for score in draft.scores):
            raise ValueError(f"scores must be probabilities above 0, not {draft.scores}")
        if draft.q is not None:
            _check_q(draft, vocab_size)


def _check_q(draft: Draft, vocab_size: int) -> None:
    """Rules that trust q would accept any token under a q that is no distribution."""
    if tuple(draft.q.shape) != (len(draft), vocab_size):
        raise ValueError(f"q has the shape {tuple(draft.q.shape)}, not {(len(draft), vocab_size)}")
    drawn = draft.q[list(range(len(draft))), list(draft.tokens)]
    if not (drawn > 0).all() or not (draft.q >= 0).all() or not ((draft.q.sum(-1) - 1).abs() < 1e-3).all():
        raise ValueError("q is no distribution from which these tokens can have been drawn")
