"""Features of sequences that the target has run, kept while there is room: later epochs need not run them again."""

from __future__ import annotations

import torch
from torch import Tensor

from foredraft.train.batches import Batch
from foredraft.train.features import Features, FrozenTarget


class KeptFeatures:
    """`_rows` [rows, taps + 1, hidden] has the taps of a token, and what came out of the final norm. The tokens of a
    sequence lie one behind the other."""

    def __init__(self, target: FrozenTarget, taps: frozenset[int], num_rows: int) -> None:
        self._target, self._taps = target, tuple(sorted(taps))
        shape = num_rows, len(taps) + 1, target.config.hidden_size
        self._rows = torch.empty(shape, dtype=target.dtype, device=target.device)
        self._starts: dict[int, int] = {}  # the first row of a sequence, by its number
        self._used = 0  # rows

    def run(self, batch: Batch) -> Features:
        """The features of a batch that lies in the host's memory."""
        new = torch.tensor([number not in self._starts for number in batch.sequences])
        found = self._rows.new_empty(*batch.tokens.shape, *self._rows.shape[1:])
        if not new.all():
            found[~new] = self._read(batch.chosen(~new))
        if new.any():
            found[new] = self._compute(batch.chosen(new))
        *streams, normed = found.unbind(2)
        return Features(dict(zip(self._taps, streams)), normed)

    def _read(self, batch: Batch) -> Tensor:
        starts = torch.tensor([self._starts[number] for number in batch.sequences])
        # Padding takes the last row of its sequence: nothing depends on its values, but they must be finite.
        within = torch.arange(batch.tokens.shape[1]).minimum(batch.lengths[:, None] - 1)
        return self._rows[(starts[:, None] + within).to(self._rows.device)]

    def _compute(self, batch: Batch) -> Tensor:
        features = self._target.run(batch.tokens.to(self._rows.device), frozenset(self._taps))
        streams = [features.streams[tap] for tap in self._taps]
        found = torch.stack([*streams, features.normed], dim=2)
        for number, length, rows in zip(batch.sequences, batch.lengths.tolist(), found):
            end = self._used + length
            if end <= len(self._rows):
                self._rows[self._used : end] = rows[:length]
                self._starts[number], self._used = self._used, end
        return found


def affordable_rows(target: FrozenTarget, taps: frozenset[int], num_bytes: int) -> int:
    """How many rows of features so many bytes hold."""
    return num_bytes // ((len(taps) + 1) * target.config.hidden_size * target.dtype.itemsize)
