"""What a proposer is: something that guesses the next tokens of a text, and may be wrong at no cost but time."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Items
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from foredraft.types import Commit, Draft, Sequence

if TYPE_CHECKING:  # what only drafting models need, and what would bring torch along
    from foredraft.models.checkpoint import Checkpoint
    from foredraft.models.tokenizer import Tokenizer
    from foredraft.proposers.draft_models import DraftModels
    from foredraft.runtime.kv import KVCache
    from foredraft.runtime.runner import Runner


@dataclass(frozen=True)
class TargetModel:
    """The model that is guessed for, as far as a proposer may use it."""

    checkpoint: Checkpoint
    tokenizer: Tokenizer
    runner: Runner
    kv: KVCache
    max_model_len: int
    threads: int | None
    draft_models: DraftModels


class Proposer(Protocol):
    """Its state is a function of committed tokens. It knows nothing of the scheduler, the verifier or the batch."""

    name: str
    taps: frozenset[int]  # target layers whose residual stream it wants to see
    free: bool  # whether asking takes next to no time, so that it may be asked even where nothing may come of it
    wants_target_argmax: bool  # whether commits are to tell what the target said after every guess
    num_lookahead_tokens: int  # the most nodes that a draft of its default settings has

    def propose(self, sequences: Items[Sequence], budgets: Items[int]) -> list[Draft]:
        """One draft per sequence, of at most its budget of nodes; an empty one is an ordinary answer."""

    def observe(self, commits: Items[Commit]) -> None:
        """Learn what the texts really said."""

    def release(self, sequence_ids: Iterable[int]) -> None:
        """Forget sequences that have ended."""

    def close(self) -> None:
        """Give back what it holds of the target, a drafting model for instance; it is not used again."""

    def clear(self) -> None:
        """Forget what was learnt from texts that have ended: a benchmark that replays a prompt must not profit."""
