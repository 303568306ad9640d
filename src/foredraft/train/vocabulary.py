"""The draft vocabulary: the tokens that the text has most often."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from foredraft.train.shards import Text

DRAFT_VOCAB_SIZE = 16_384


def draft_vocabulary(text: Text, vocab_size: int, size: int = DRAFT_VOCAB_SIZE) -> Tensor:
    """Rising ids [size]: the most frequent tokens, and the first ones where there are too few different ones. A size
    beyond the target's vocabulary means all of it."""
    counts = np.bincount(text.tokens, minlength=vocab_size)
    chosen = np.argsort(-counts, kind="stable")[: min(size, vocab_size)]
    return torch.from_numpy(np.sort(chosen))


def coverage(text: Text, token_ids: Tensor, vocab_size: int) -> float:
    """The share of the text's tokens that the draft vocabulary has."""
    counts = np.bincount(text.tokens, minlength=vocab_size)
    return float(counts[token_ids.numpy()].sum() / counts.sum())
