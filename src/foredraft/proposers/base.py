"""What a proposer is: it drafts the next tokens of a sequence. A wrong draft costs time and nothing else."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Items
from typing import Any

from foredraft.types import Commit, Draft, Sequence


class Proposer:
    """Its state is a function of committed tokens. It knows nothing of the scheduler, the verifier or the batch.

    A proposer inherits from this class and says what differs: `name`, `Options`, `num_lookahead_tokens`, and `draft` or
    `propose`, in any case. It is made with `__init__(options, target)`: its options, as a speculation string gives
    them, and the target (see target.py).
    """

    name: str
    Options: type[Any]  # a dataclass whose fields have defaults; those named in its `owner_only` no request may choose
    num_lookahead_tokens: int  # the most nodes that a draft of its settings has
    taps: frozenset[int] = frozenset()  # what it reads of the target's residual stream: k is the stream after k layers
    free: bool = True  # whether a query takes next to no time: such proposers are queried before the others
    wants_target_argmax: bool = False  # whether commits carry the target argmax after every draft token
    is_head: bool = False  # whether it was trained for one target, and drafts hardly anything that fits another
    needs: str | None = None  # the field of SamplingParams without which it has nothing to draft from
    acceptance: tuple[float, ...] = ()  # by depth, measured before any request; the controller starts with it

    def propose(self, sequences: Items[Sequence], budgets: Items[int], min_score: float) -> list[Draft]:
        """One draft per sequence, of at most its budget of nodes; an empty one is an ordinary answer. To draft a node
        that is accepted with a probability below `min_score` is not worth the time; 0 wants whole drafts, and a
        proposer that takes next to no time may ignore it. The last tokens of a sequence may be another proposer's
        draft: the next call may see others in their place, at most 64 (`Occurrences.follow` copes with that)."""
        return [self.draft(sequence, budget) for sequence, budget in zip(sequences, budgets, strict=True)]

    def draft(self, sequence: Sequence, budget: int) -> Draft:
        """`propose` for one sequence, of a proposer that looks at each by itself."""
        raise NotImplementedError

    def num_missing(self, sequence: Sequence) -> int:
        """How many tokens of a sequence it must run before it can draft, beyond those that cost next to nothing."""
        return 0

    def observe(self, commits: Items[Commit]) -> None:
        """Learn which tokens were committed: of every step and every sequence, whoever drafted. The prompt is not among
        them. `release` comes after the last commit of a sequence."""

    def release(self, sequence_ids: Iterable[int]) -> None:
        """Forget sequences that have ended."""

    def close(self) -> None:
        """Give back what it holds of the target, a draft model for instance; it is not used again."""

    def clear(self) -> None:
        """Forget what was learnt from finished sequences: a benchmark that replays a prompt must not profit."""
