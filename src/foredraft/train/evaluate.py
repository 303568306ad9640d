"""How good a student is on text that it has not seen: the steps of a greedy chain, replayed over greedy answers.

While a draft is right, the tokens it has seen are those of the answer. So one pass over the answer gives the drafts at
all its positions, and the steps that an engine would have made can be walked through afterwards.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from foredraft.train.student import Student
from foredraft.train.target_batch import TargetBatch


@dataclass(frozen=True)
class Evaluation:
    """`tokens_per_run` counts the target's own token of each run; `acceptance[j]` is the share of draft tokens j that
    were accepted among those whose chain was right so far. Without a run nothing was measured: there are no rates."""

    tokens_per_run: float
    acceptance: tuple[float, ...]
    runs: int


class Walk:
    """Counts over the steps of many answers."""

    def __init__(self, depth: int) -> None:
        self._reached = np.zeros(depth, np.int64)
        self._accepted = np.zeros(depth, np.int64)
        self._runs = self._tokens = 0

    def add(self, right: NDArray[np.bool_], prompt_len: int, length: int) -> None:
        """One answer: whether draft token j behind position i is the text's: [depth, length]."""
        anchor = prompt_len  # the first token of the answer comes with the prompt's own run
        while anchor < length - 1:
            possible = min(len(right), length - 1 - anchor)
            wrong = np.flatnonzero(~right[:possible, anchor])
            accepted = int(wrong[0]) if len(wrong) else possible
            self._reached[: min(accepted + 1, possible)] += 1
            self._accepted[:accepted] += 1
            emitted = min(accepted + 1, length - 1 - anchor)
            self._runs += 1
            self._tokens += emitted
            anchor += emitted

    def result(self) -> Evaluation:
        if not self._runs:
            return Evaluation(0.0, (), 0)
        rates = self._accepted / np.maximum(1, self._reached)
        return Evaluation(self._tokens / self._runs, tuple(float(rate) for rate in rates), self._runs)


@torch.no_grad()
def evaluate(student: Student, batches: Sequence[TargetBatch]) -> Evaluation:
    walk = Walk(student.depth)
    for seen in batches:
        drafts = student.drafts(seen)
        right = torch.stack([drafts[j] == seen.batch.ahead(1 + j) for j in range(student.depth)], dim=1).cpu().numpy()
        lengths, prompt_lens = seen.batch.lengths.tolist(), seen.batch.prompt_lens.tolist()
        for row, (prompt_len, length) in enumerate(zip(prompt_lens, lengths)):
            walk.add(right[row], prompt_len, length)
    return walk.result()
