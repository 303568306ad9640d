"""The draft vocabulary: the tokens that the text has most often."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from foredraft.train.shards import Text

DRAFT_VOCAB_SIZE = 16_384


def frequencies(text: Text, vocab_size: int) -> Tensor:
    """How often the text has each token: [vocab]."""
    return torch.from_numpy(np.bincount(text.tokens, minlength=vocab_size))


def draft_vocabulary(counts: Tensor, size: int = DRAFT_VOCAB_SIZE) -> Tensor:
    """Rising ids [size] of the tokens with the largest counts [vocab], and the first ones where there are too few
    different ones. A size beyond the target's vocabulary means all of it."""
    return counts.argsort(stable=True, descending=True)[:size].sort().values


def coverage(counts: Tensor, token_ids: Tensor) -> float:
    """The share of the text's tokens that the draft vocabulary has."""
    return float(counts[token_ids].sum() / counts.sum())
