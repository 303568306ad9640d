"""The state of a training run on disk, beside the heads it makes: weights in float32, the optimiser's tensors and
counters. A run that finds it goes on as if it had never stopped."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor

from foredraft.errors import InvalidModel
from foredraft.heads.base import T2D
from foredraft.heads.files import read_tensor_file, write_tensor_file
from foredraft.train.optimizer import Optimizer
from foredraft.train.student import Student

_WEIGHTS, _OPTIMIZER = "weights.", "optimizer."
_REMEDY = "remove the file to start again"


@dataclass
class Counters:
    """How far a run has come."""

    steps: int = 0
    tokens: int = 0
    seconds: float = 0.0


def state_file(folder: Path, student: Student) -> Path:
    return folder / f"{student.name}.safetensors"


def save_state(folder: Path, student: Student, optimizer: Optimizer, counters: Counters) -> None:
    tensors = {
        **{_WEIGHTS + name: tensor for name, tensor in student.module.state_dict().items()},
        **{_OPTIMIZER + name: tensor for name, tensor in optimizer.state().items()},
    }
    facts = {**asdict(counters), "own": optimizer.steps}
    write_tensor_file(state_file(folder, student), tensors, {name: repr(value) for name, value in facts.items()})


def load_state(folder: Path, student: Student, optimizer: Optimizer) -> Counters:
    """Raises InvalidModel for a file that is damaged or of a student of another shape."""
    file = state_file(folder, student)
    facts, tensors = read_tensor_file(file, _REMEDY)
    try:
        counters = Counters(int(facts["steps"]), int(facts["tokens"]), float(facts["seconds"]))
        student.module.load_state_dict(_under(_WEIGHTS, tensors))
        optimizer.load_state(_under(_OPTIMIZER, tensors), int(facts["own"]))
    except (KeyError, RuntimeError) as error:
        problem = str(error).splitlines()[0]
        raise InvalidModel(f"{file} cannot be continued ({problem}); give the same options, or {_REMEDY}.") from error
    return counters


def saved_vocabulary(folders: Sequence[Path]) -> Tensor | None:
    """The draft vocabulary of the states and heads in some folders: rising ids; None where there are none. A student
    beside others may know all tokens."""
    found: list[Tensor] = []
    for file in (file for folder in folders for file in sorted(folder.glob("*.safetensors"))):
        tensors = read_tensor_file(file, _REMEDY)[1]
        found += [tensors[name].nonzero()[:, 0] for name in (_WEIGHTS + T2D, T2D) if name in tensors]
    return min(found, key=len, default=None)


def _under(prefix: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}


def seeded(generator: torch.Generator, *numbers: int) -> torch.Generator:
    """The generator, set to a state that the numbers alone decide."""
    mixed = 0x9E3779B97F4A7C15
    for number in numbers:
        mixed = (mixed ^ number) * 0xBF58476D1CE4E5B9 % (1 << 63)
        mixed ^= mixed >> 31
    return generator.manual_seed(mixed)
