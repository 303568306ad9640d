"""What a proposer is: it drafts the next tokens of a sequence. A wrong draft costs time and nothing else."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Items
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from foredraft.types import Commit, Draft, Sequence

if TYPE_CHECKING:  # what only draft models need, and what would bring torch along
    from foredraft.models.checkpoint import Checkpoint
    from foredraft.models.heads.catalog import HeadFiles
    from foredraft.models.tokenizer import Tokenizer
    from foredraft.proposers.draft_models import DraftModels
    from foredraft.runtime.kv import KVCache
    from foredraft.runtime.runner import Runner


@dataclass(frozen=True)
class TargetModel:
    """The model that a proposer drafts for, as far as a proposer may use it."""

    checkpoint: Checkpoint
    tokenizer: Tokenizer
    runner: Runner
    kv: KVCache
    max_model_len: int
    max_num_seqs: int
    dtype: str  # of its weights
    threads: int | None
    draft_models: DraftModels
    heads: Mapping[str, HeadFiles]  # that were loaded with it, by kind; its runner writes the taps that they read


class Proposer(Protocol):
    """Its state is a function of committed tokens. It knows nothing of the scheduler, the verifier or the batch.

    A class may also declare `needs_grammar = True`: it is then queried only for sequences that have a grammar. And an
    `acceptance` by depth, measured before any request: the controller starts with it.
    """

    name: str
    taps: frozenset[int]  # what it reads of the target's residual stream: k is the stream after k layers
    free: bool  # whether a query takes next to no time, so that it may be made even where it may bring nothing
    wants_target_argmax: bool  # whether commits carry the target argmax after every draft token
    num_lookahead_tokens: int  # the most nodes that a draft of its default settings has

    def propose(self, sequences: Items[Sequence], budgets: Items[int]) -> list[Draft]:
        """One draft per sequence, of at most its budget of nodes; an empty one is an ordinary answer."""

    def observe(self, commits: Items[Commit]) -> None:
        """Learn which tokens were committed."""

    def release(self, sequence_ids: Iterable[int]) -> None:
        """Forget sequences that have ended."""

    def close(self) -> None:
        """Give back what it holds of the target, a draft model for instance; it is not used again."""

    def clear(self) -> None:
        """Forget what was learnt from finished sequences: a benchmark that replays a prompt must not profit."""
