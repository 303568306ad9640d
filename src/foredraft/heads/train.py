"""What the training of every kind of head has in common: where it starts from, and how it is written and read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Generic, TypeVar

import torch
from torch import Tensor

from foredraft.errors import InvalidModel
from foredraft.heads.base import HeadConfig
from foredraft.heads.files import read_tensors, write_head
from foredraft.heads.module import HeadModule
from foredraft.train.features import FrozenTarget
from foredraft.train.student import Facts, Student

Module = TypeVar("Module", bound=HeadModule)


class HeadStudent(Student, Generic[Module]):
    module: Module

    def __init__(self, name: str, head: Module, target: FrozenTarget, token_ids: Tensor, depth: int) -> None:
        """The output head, unless it is the target's, and the norm before it start as those of the target, over the
        draft vocabulary."""
        self.name, self.depth = name, depth
        self.taps = frozenset(head.config.taps)
        head.set_vocabulary(token_ids)
        with torch.no_grad():
            if head.config.hidden_size == target.config.hidden_size:
                if not head.config.shares_output:
                    rows = target.head[head.own_ids.to(target.device)]
                    head.lm_head.weight.copy_(rows / target.config.logits_divisor)
                head.norm.weight.copy_(target.norm)
        self.module = head.to(target.device)

    def save(self, folder: Path, acceptance: Sequence[float], provenance: Facts) -> None:
        config: HeadConfig = replace(
            self.module.config, acceptance=tuple(round(rate, 4) for rate in acceptance), provenance=provenance
        )
        tensors = {
            name: tensor.bfloat16() if tensor.is_floating_point() else tensor
            for name, tensor in self.module.state_dict().items()
        }
        write_head(folder, config, tensors)

    def load(self, folder: Path) -> None:
        config = HeadConfig.read(folder)
        # The target is known by its digest, whatever its file is called.
        own = replace(
            self.module.config,
            target_name=config.target_name,
            acceptance=config.acceptance,
            provenance=config.provenance,
        )
        tensors = read_tensors(folder, config)
        if config != own or not torch.equal(tensors["t2d"], self.module.t2d.cpu()):
            raise InvalidModel(
                f"{folder} holds another head than the one to be trained; give its options, or another folder."
            )
        self.module.load_state_dict(tensors)
