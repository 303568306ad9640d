"""Training text on disk: shards of whole sequences, each a prompt and the target's answer, with their provenance."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from foredraft.errors import InvalidModel
from foredraft.heads.files import read_tensor_file, write_tensor_file

Ids = NDArray[Any]


@dataclass(frozen=True)
class Text:
    """Sequences one after the other in `tokens`; sequence i is `tokens[starts[i]:starts[i + 1]]`."""

    tokens: Ids  # uint16 or uint32
    starts: Ids  # int64 [sequences + 1]
    prompt_lens: Ids  # int32 [sequences]: the answer begins here
    greedy: Ids  # bool [sequences]: every token of the answer is the target argmax

    def __len__(self) -> int:
        return len(self.prompt_lens)

    @property
    def lengths(self) -> Ids:
        return np.diff(self.starts)

    @property
    def num_answer_tokens(self) -> int:
        return int(self.lengths.sum() - self.prompt_lens.sum())


@dataclass(frozen=True)
class Answer:
    prompt: Sequence[int]
    answer: Sequence[int]
    greedy: bool


def shard_file(folder: Path, number: int) -> Path:
    return folder / f"text-{number:05}.safetensors"


def shard_files(folder: Path) -> list[Path]:
    return sorted(folder.glob("text-*.safetensors"))


def write_shard(file: Path, answers: Sequence[Answer], vocab_size: int, provenance: dict[str, str]) -> None:
    kind = np.uint16 if vocab_size <= 1 << 16 else np.uint32
    lengths = [len(each.prompt) + len(each.answer) for each in answers]
    tokens = np.fromiter((token for each in answers for token in (*each.prompt, *each.answer)), kind, sum(lengths))
    arrays = {
        "tokens": tokens,
        "starts": np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
        "prompt_lens": np.array([len(each.prompt) for each in answers], np.int32),
        "greedy": np.array([each.greedy for each in answers], np.bool_),
    }
    write_tensor_file(file, {name: torch.from_numpy(array) for name, array in arrays.items()}, provenance)


def read_shard(file: Path) -> tuple[dict[str, str], Text]:
    """Its provenance and its sequences."""
    provenance, tensors = read_tensor_file(file, "remove it, it is written again")
    return provenance, Text(**{name: tensor.numpy() for name, tensor in tensors.items()})


def num_answer_tokens(folder: Path) -> int:
    """How many answer tokens the shards of a folder have."""
    return sum(read_shard(file)[1].num_answer_tokens for file in shard_files(folder))


def read_text(folder: Path, target_digest: str) -> Text:
    """All shards of a folder, in order; refuses text of another target."""
    shards: list[Text] = []
    for file in shard_files(folder):
        found, shard = read_shard(file)
        if found.get("target_digest") != target_digest:
            raise InvalidModel(
                f"{file} was written by another model ({found.get('target_name', 'unknown')}); give another folder."
            )
        shards.append(shard)
    if not sum(map(len, shards)):
        raise InvalidModel(f"{folder} has no training text; write some with `foredraft train text`.")
    return Text(
        tokens=np.concatenate([shard.tokens for shard in shards]),
        starts=np.concatenate([[0], np.cumsum(np.concatenate([shard.lengths for shard in shards]))]),
        prompt_lens=np.concatenate([shard.prompt_lens for shard in shards]),
        greedy=np.concatenate([shard.greedy for shard in shards]),
    )
