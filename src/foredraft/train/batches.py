"""Batches of training text: sequences of about equal length side by side, padded on the right."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from zlib import crc32

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from foredraft.errors import InvalidModel
from foredraft.train.shards import Text

_LENGTH_STEP = 64  # lengths of batches are multiples of this, so that few shapes are met
_WINDOW = 8192  # sequences that are sorted by length at once
_HELD_OUT_EVERY = 32  # one prompt of so many, about, is never trained on
_SHORTEST = 8


@dataclass(frozen=True)
class Batch:
    """Padding is token 0 at the end of a row: no position before it sees it."""

    tokens: Tensor  # int64 [batch, length]
    lengths: Tensor  # int64 [batch]
    prompt_lens: Tensor  # int64 [batch]
    sequences: tuple[int, ...]  # their numbers in the text

    def to(self, device: torch.device) -> Batch:
        tokens, lengths, prompt_lens = (
            part.to(device, non_blocking=True) for part in (self.tokens, self.lengths, self.prompt_lens)
        )
        return Batch(tokens, lengths, prompt_lens, self.sequences)

    def chosen(self, rows: Tensor) -> Batch:
        """Those of its sequences where `rows` [batch] is true."""
        numbers = (number for number, wanted in zip(self.sequences, rows.tolist()) if wanted)
        return Batch(self.tokens[rows], self.lengths[rows], self.prompt_lens[rows], tuple(numbers))

    def ahead(self, count: int) -> Tensor:
        """The tokens `count` positions later, 0 beyond the end: [batch, length]."""
        return torch.nn.functional.pad(self.tokens[:, count:], (0, min(count, self.tokens.shape[1])))


class Batches:
    """The order in which a text is trained on: a function of the seed and the step alone."""

    def __init__(self, text: Text, tokens_per_batch: int, seed: int) -> None:
        self._text, self._tokens, self._seed = text, tokens_per_batch, seed
        usable = np.flatnonzero((text.lengths >= _SHORTEST) & (text.lengths > text.prompt_lens))
        held_out = np.array([_is_held_out(text, int(index)) for index in usable], np.bool_)
        self._train, self._held_out = usable[~held_out], usable[held_out]

    def from_step(self, step: int) -> Iterator[Batch]:
        """The batches of step, step + 1, … without an end."""
        if not len(self._train):
            raise InvalidModel("The training text has no sequence to train on; write more of it.")
        epoch = 0
        while True:
            groups = self._epoch(epoch)
            for group in groups[step:]:
                yield self._batch(group)
            step = max(0, step - len(groups))
            epoch += 1

    def held_out(self, most: int) -> list[Batch]:
        """Greedy answers that are never trained on, at most so many."""
        greedy = self._held_out[self._text.greedy[self._held_out]][:most]
        return [self._batch(group) for group in self._groups(greedy)]

    def _epoch(self, epoch: int) -> list[NDArray[np.int64]]:
        rng = np.random.default_rng((self._seed, epoch))
        order = rng.permutation(self._train)
        windows = [order[start : start + _WINDOW] for start in range(0, len(order), _WINDOW)]
        groups = [group for window in windows for group in self._groups(window)]
        return [groups[place] for place in rng.permutation(len(groups))]

    def _groups(self, indices: NDArray[np.int64]) -> list[NDArray[np.int64]]:
        """Sequences of similar length whose padded rows have at most the tokens of a batch."""
        groups: list[list[int]] = []
        lengths = self._text.lengths
        for index in indices[np.argsort(lengths[indices], kind="stable")]:
            if not groups or (len(groups[-1]) + 1) * _padded(lengths[index]) > self._tokens:
                groups.append([])
            groups[-1].append(index)
        return [np.array(group) for group in groups]

    def _batch(self, group: NDArray[np.int64]) -> Batch:
        text = self._text
        lengths = text.lengths[group]
        tokens = np.zeros((len(group), _padded(lengths.max())), np.int64)
        for row, index in enumerate(group):
            tokens[row, : lengths[row]] = text.tokens[text.starts[index] : text.starts[index + 1]]
        prompts = torch.from_numpy(text.prompt_lens[group].astype(np.int64))
        return Batch(
            torch.from_numpy(tokens), torch.from_numpy(lengths.astype(np.int64)), prompts, tuple(group.tolist())
        )


def _is_held_out(text: Text, index: int) -> bool:
    """By the prompt alone: more text never moves a sequence from one side to the other."""
    start = text.starts[index]
    return crc32(text.tokens[start : start + text.prompt_lens[index]].tobytes()) % _HELD_OUT_EVERY == 0


def _padded(length: int) -> int:
    return -(-int(length) // _LENGTH_STEP) * _LENGTH_STEP
