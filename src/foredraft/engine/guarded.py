"""A proposer that may fail without harm: it is timed, its drafts are checked, and where it fails it is used no more."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Items
from math import isfinite

from foredraft.proposers.base import Proposer
from foredraft.types import NO_DRAFT, Commit, Draft, Sequence

log = logging.getLogger(__name__)

_MOST_FAILURES = 3  # in a row, after which a proposer is given up for all sequences


class Guarded:
    """Where a proposer fails for a sequence, it is not used for that sequence any more. If the same call, for instance
    `propose`, fails several times in a row, it is given up for all. Other calls that succeed in between do not help."""

    def __init__(self, name: str, proposer: Proposer, vocab_size: int, clock: Callable[[], float]) -> None:
        self.name = name  # with its options, as requests choose it
        self.proposer = proposer
        self._vocab_size = vocab_size  # of the target's logits
        self._clock = clock
        self._observes = type(proposer).observe is not Proposer.observe
        self._is_given_up = False
        self._failed_for: set[int] = set()  # sequences
        self._failures: Counter[str] = Counter()  # by call, since its last success; to delete a missing one is no error

    def has_failed(self, sequence: Sequence) -> bool:
        return self._is_given_up or sequence.id in self._failed_for

    def propose(self, sequences: Items[Sequence], budgets: Items[int], min_score: float) -> tuple[list[Draft], float]:
        """Drafts for all sequences at once, and the seconds that it took. If that fails, each sequence is tried alone,
        so that only those to blame lose their drafts. If none is to blame, the proposer is."""
        started = self._clock()
        try:
            drafts = self._checked(sequences, budgets, min_score)
            if self._failures:
                del self._failures["propose" if len(sequences) == 1 else "propose for several"]
        except Exception as error:
            if len(sequences) == 1:
                self._fail("propose", sequences[0], error)
                drafts = [NO_DRAFT]
            else:
                alone = [self.propose([one], [budget], min_score)[0] for one, budget in zip(sequences, budgets)]
                drafts = [draft for (draft,) in alone]
                if not any(self.has_failed(sequence) for sequence in sequences):
                    what = "failed for several sequences at once, but for none of them alone."
                    self._count_failure("propose for several", what, error)
        return drafts, self._clock() - started

    def observe(self, commits: Items[Commit]) -> None:
        """Tell it every commit by itself: it may fail for one sequence and go on for the others."""
        if self._is_given_up or not self._observes:
            return
        observe, failed_for = self.proposer.observe, self._failed_for
        for commit in commits:
            if commit.sequence.id not in failed_for:
                try:
                    observe((commit,))
                    if self._failures:
                        del self._failures["observe"]
                except Exception as error:
                    self._fail("observe", commit.sequence, error)

    def release(self, sequence_ids: Iterable[int]) -> None:
        """Where it has failed it may still hold the sequence, so it is told too."""
        ids = list(sequence_ids)
        self._failed_for.difference_update(ids)
        self._clean_up(lambda: self.proposer.release(ids))

    def clear(self) -> None:
        self._clean_up(self.proposer.clear)

    def close(self) -> None:
        self._clean_up(self.proposer.close)

    def _clean_up(self, action: Callable[[], None]) -> None:
        """What no sequence waits for. A failure is logged and does not count."""
        try:
            action()
        except Exception as error:
            log.error("The proposer %s failed to clean up.", self.name, exc_info=error)

    def _checked(self, sequences: Items[Sequence], budgets: Items[int], min_score: float) -> list[Draft]:
        drafts = self.proposer.propose(sequences, budgets, min_score)
        if len(drafts) != len(budgets):
            raise ValueError(f"{len(drafts)} drafts were proposed for {len(budgets)} sequences")
        for draft, budget in zip(drafts, budgets, strict=True):
            if draft.tokens:
                check_draft(draft, budget, self._vocab_size)
        return drafts

    def _fail(self, call: str, sequence: Sequence, error: Exception) -> None:
        self._failed_for.add(sequence.id)
        self._count_failure(call, "failed; the sequence it failed for goes on without it.", error)

    def _count_failure(self, call: str, what: str, error: Exception) -> None:
        log.error("The proposer %s %s", self.name, what, exc_info=error)
        self._failures[call] += 1
        if self._failures[call] >= _MOST_FAILURES and not self._is_given_up:
            self._is_given_up = True
            log.error("The proposer %s failed %d times in a row and is given up.", self.name, _MOST_FAILURES)


def check_draft(draft: Draft, budget: int, vocab_size: int) -> None:
    """Raise ValueError unless the target can run a draft, within its budget, and no rule is misled by it."""
    if len(draft) > budget:
        raise ValueError(f"{len(draft)} tokens were drafted, but the budget is {budget}")
    if not 0 <= min(draft.tokens) <= max(draft.tokens) < vocab_size:
        raise ValueError(f"a draft token is not in the target's vocabulary of {vocab_size}")
    if not (min(draft.scores) > 0 and max(draft.scores) <= 1 and isfinite(sum(draft.scores))):
        raise ValueError(f"scores must be probabilities above 0, not {draft.scores}")
    if draft.q is None:
        return
    # Rules that trust q would accept any token under a q that is no distribution.
    if tuple(draft.q.shape) != (len(draft), vocab_size):
        raise ValueError(f"q has the shape {tuple(draft.q.shape)}, not {(len(draft), vocab_size)}")
    drawn = draft.q[list(range(len(draft))), list(draft.tokens)]
    if not (drawn > 0).all() or not (draft.q >= 0).all() or not ((draft.q.sum(-1) - 1).abs() < 1e-3).all():
        raise ValueError("q is no distribution from which these tokens can have been drawn")
