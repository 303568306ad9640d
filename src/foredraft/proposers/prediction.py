"""Drafts from the text that the request predicts as its answer: `prediction`, the client's own draft.
Costs a few look-ups per step; the text is tokenised once.
Shines where a client has the answer but for some changes: a file that is to be edited."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Items
from dataclasses import dataclass

from foredraft.errors import InvalidSpec
from foredraft.proposers.base import Proposer
from foredraft.proposers.occurrences import Occurrences
from foredraft.proposers.target import TargetModel
from foredraft.types import NO_DRAFT, Draft, Sequence

_BEGINNING = 0.9  # the confidence of a prediction before anything of it was seen


@dataclass(frozen=True)
class PredictionOptions:
    k: int = 16  # draft tokens
    max_n: int = 8  # longest end of the output that is looked up

    def __post_init__(self) -> None:
        if not 1 <= self.k <= 64:
            raise InvalidSpec(f"prediction: k={self.k} must be from 1 to 64.")
        if not 1 <= self.max_n <= 16:
            raise InvalidSpec(f"prediction: max_n={self.max_n} must be from 1 to 16.")


class Prediction(Proposer):
    """One index of the predicted tokens per sequence. Where the output has left the prediction, it is looked for where
    the output's last tokens occur in it: the longest match, and of several the one at about the same distance from the
    beginning."""

    name = "prediction"
    needs = "prediction"
    Options = PredictionOptions

    def __init__(self, options: PredictionOptions, target: TargetModel | None = None) -> None:
        self.num_lookahead_tokens = options.k
        self._lengths = tuple(range(1, options.max_n + 1))
        self._target = target
        self._indexes: dict[int, Occurrences] = {}

    def draft(self, sequence: Sequence, budget: int) -> Draft:
        length = min(budget, self.num_lookahead_tokens)
        if sequence.params.prediction is None or length < 1:
            return NO_DRAFT
        index = self._indexes.get(sequence.id)
        if index is None:
            index = self._indexes[sequence.id] = Occurrences(self._lengths)
            index.extend(self._predicted(sequence.params.prediction))
        place, confidence = self._place(index, sequence)
        return Draft.chain(index.tokens[place : place + length], confidence, self.name)

    def release(self, sequence_ids: Iterable[int]) -> None:
        for sequence_id in sequence_ids:
            self._indexes.pop(sequence_id, None)

    def _predicted(self, prediction: str | Items[int]) -> Items[int]:
        if not isinstance(prediction, str):
            return prediction
        assert self._target is not None
        return self._target.tokenizer.encode(prediction, add_special_tokens=False)

    def _place(self, index: Occurrences, sequence: Sequence) -> tuple[int, float]:
        """Where the output goes on in the prediction, and how sure that is; its end if nowhere."""
        count = sequence.num_output_tokens
        if not count:
            return 0, _BEGINNING
        output = sequence.token_ids[-min(count, self._lengths[-1]) :]
        for n in range(len(output), 0, -1):
            # An n-gram at the very end of the prediction has nothing behind it, and is not among the places.
            if places := index.places(output, n):
                return min(places, key=lambda place: abs(place - count)), 1 - 0.5 ** (1 + n / 2)
        return len(index.tokens), 0.0
