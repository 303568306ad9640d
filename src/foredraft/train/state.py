"""The state of a training run on disk, beside the heads it makes: weights in float32, the optimiser's tensors and
counters. A run that finds it goes on as if it had never stopped."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from foredraft.errors import InvalidModel
from foredraft.heads.base import T2D
from foredraft.train.optimizer import Optimizer
from foredraft.train.student import Student

_WEIGHTS, _OPTIMIZER = "weights.", "optimizer."


@dataclass
class Counters:
    """How far a run has come."""

    steps: int = 0
    tokens: int = 0
    seconds: float = 0.0


def state_file(folder: Path, student: Student) -> Path:
    return folder / f"{student.name}.safetensors"


def save_state(folder: Path, student: Student, optimizer: Optimizer, counters: Counters) -> None:
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    tensors = {
        **{_WEIGHTS + name: tensor for name, tensor in student.module.state_dict().items()},
        **{_OPTIMIZER + name: tensor for name, tensor in optimizer.state().items()},
    }
    file = state_file(folder, student)
    partial = file.with_suffix(".partial")
    facts = {"steps": counters.steps, "tokens": counters.tokens, "seconds": counters.seconds, "own": optimizer.steps}
    save_file(
        {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()},
        partial,
        metadata={name: repr(value) for name, value in facts.items()},
    )
    partial.replace(file)


def load_state(folder: Path, student: Student, optimizer: Optimizer) -> Counters:
    """Raises InvalidModel for a file that is damaged or of a student of another shape."""
    from safetensors import SafetensorError, safe_open

    file = state_file(folder, student)
    shard: Any  # the library's own type is not annotated
    try:
        with safe_open(file, framework="pt") as shard:
            facts = shard.metadata() or {}
            tensors: dict[str, Tensor] = {name: shard.get_tensor(name) for name in shard.keys()}  # noqa: SIM118
        counters = Counters(int(facts["steps"]), int(facts["tokens"]), float(facts["seconds"]))
        student.module.load_state_dict(_under(_WEIGHTS, tensors))
        optimizer.load_state(_under(_OPTIMIZER, tensors), int(facts["own"]))
    except (SafetensorError, OSError, KeyError, RuntimeError) as error:
        raise InvalidModel(
            f"{file} cannot be continued ({str(error).splitlines()[0]}); give the same options as before, or remove "
            "the file to start again."
        ) from error
    return counters


def saved_vocabulary(folders: Sequence[Path]) -> Tensor | None:
    """The draft vocabulary of the states and heads in some folders: rising ids; None where there are none."""
    from safetensors import SafetensorError, safe_open

    shard: Any
    for file in (file for folder in folders for file in sorted(folder.glob("*.safetensors"))):
        try:
            with safe_open(file, framework="pt") as shard:
                for name in {_WEIGHTS + T2D, T2D} & set(shard.keys()):
                    ids: Tensor = shard.get_tensor(name).nonzero()[:, 0]
                    return ids
        except (SafetensorError, OSError) as error:
            raise InvalidModel(f"{file} is damaged ({error}); remove it to start again.") from error
    return None


def _under(prefix: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}


def seeded(generator: torch.Generator, *numbers: int) -> torch.Generator:
    """The generator, set to a state that the numbers alone decide."""
    mixed = 0x9E3779B97F4A7C15
    for number in numbers:
        mixed = (mixed ^ number) * 0xBF58476D1CE4E5B9 % (1 << 63)
        mixed ^= mixed >> 31
    return generator.manual_seed(mixed)
