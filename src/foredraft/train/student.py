"""What the training loop knows of a student, whatever its kind; what a student starts from, and its options."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor, nn

from foredraft.heads.base import HeadConfig
from foredraft.heads.module import Linear
from foredraft.models.tokenizer import Tokenizer
from foredraft.train.features import FrozenTarget
from foredraft.train.target_batch import TargetBatch

Facts = dict[str, str | int | float]
MAX_WIDTH = 1 << 20  # that an option may ask for


class Student(ABC):
    """A module in training. Randomness comes from the generator it is given, so that a step can be repeated."""

    name: str  # of its folder
    depth: int  # draft tokens of a chain in evaluations
    taps: frozenset[int]  # residual streams that it reads
    module: nn.Module

    @abstractmethod
    def loss(self, seen: TargetBatch, generator: torch.Generator) -> Tensor:
        """The mean loss of a batch."""

    @abstractmethod
    def drafts(self, seen: TargetBatch) -> Tensor:
        """Greedy chains behind every position i, while the text is what they draft: int64 [depth, batch, length]. Draft
        token j behind i is for position i + 1 + j, and has seen the true tokens before that."""

    @abstractmethod
    def save(self, folder: Path, acceptance: Sequence[float], provenance: Facts) -> None:
        """Writes what the engine loads."""

    @abstractmethod
    def load(self, folder: Path) -> None:
        """Takes the weights that `save` wrote."""

    def trunk(self) -> list[str]:
        """The names of the matrices between layers; tables, output heads, norms and biases are not among them."""
        between = (name for name, each in self.module.named_modules() if isinstance(each, Linear) and name != "lm_head")
        return sorted(f"{name}.weight" for name in between)


@dataclass(frozen=True)
class Start:
    """What a student is made for, whatever its kind."""

    name: str  # of the student
    shape: HeadConfig  # a head with the sizes of the target's own layers
    target: FrozenTarget
    token_ids: Tensor  # [draft_vocab]: the target's ids, rising
    frequencies: Tensor  # [draft_vocab]: how often the text has each
    tokenizer: Tokenizer

    def spread_taps(self, *shares: float) -> tuple[int, ...]:
        """Taps at these shares of the target's layers; small models have fewer of them."""
        return tuple(sorted({max(1, round(self.shape.target_num_layers * share)) for share in shares}))


def whole(default: int, most: int) -> int:
    """An option that is a whole number from 1 on; a default of 0 says that the target decides."""
    return field(default=default, metadata={"most": most})


def one_of(default: str, choices: tuple[str, ...]) -> str:
    """An option that is one of some words."""
    return field(default=default, metadata={"choices": choices})
