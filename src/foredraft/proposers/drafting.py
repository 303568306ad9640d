"""How a draft model drafts, alone or in stages: another proposer may draft for it, as it drafts for the target."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Items
from dataclasses import dataclass, replace

from foredraft.errors import InvalidSpec
from foredraft.proposers.base import Proposer
from foredraft.proposers.draft_runner import DraftRunner
from foredraft.proposers.draft_trees import Tree, TreeShape
from foredraft.proposers.tree_drafter import TreeDrafter
from foredraft.types import NO_DRAFT, Commit, Work


@dataclass(frozen=True)
class DrafterOptions:
    """The options of all draft models."""

    k: int = 4  # draft tokens, one after the other
    width: int = 1  # branches at every depth; 1 is a chain

    def __post_init__(self) -> None:
        if not (self.k >= 1 and self.width >= 1 and self.k * self.width <= 64):
            raise InvalidSpec(f"k={self.k}, width={self.width}: both must be at least 1, and k times width at most 64.")


class ModelDrafter(TreeDrafter):
    """Drafts with a model. `helper`, if there is one, drafts for the model as the model drafts for the target. The
    draft is the same without it."""

    def __init__(self, name: str, model: DraftRunner, options: DrafterOptions, helper: Proposer | None = None) -> None:
        super().__init__(name, model, TreeShape(options.k, options.width))
        self.runner = model
        self.helper = helper

    def observe(self, commits: Items[Commit]) -> None:
        if self.helper is not None:
            self.helper.observe(commits)

    def release(self, sequence_ids: Iterable[int]) -> None:
        ids = list(sequence_ids)
        super().release(ids)
        if self.helper is not None:
            self.helper.release(ids)

    def close(self) -> None:
        super().close()
        if self.helper is not None:
            self.helper.close()

    def clear(self) -> None:
        if self.helper is not None:
            self.helper.clear()

    def _can_run_ahead(self, tree: Tree) -> bool:
        return self.helper is None and super()._can_run_ahead(tree)

    def _works(self, growing: list[Tree]) -> list[Work]:
        """The works, each with the helper's draft behind its chain; the model adds a token of its own behind that."""
        if self.helper is None:
            return super()._works(growing)
        extended = [replace(g.sequence, token_ids=[*g.sequence.token_ids, *g.tokens]) for g in growing]
        drafts = self.helper.propose(extended, [tree.budget - len(tree.tokens) - 1 for tree in growing], 0.0)
        readable = [draft if self.runner.can_read(draft.tokens) else NO_DRAFT for draft in drafts]
        return [self._work(tree, below) for tree, below in zip(growing, readable, strict=True)]
