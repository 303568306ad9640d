"""What every family of published heads shares: the target's shape, random weights, and files on disk."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

Config = dict[str, Any]
Tensors = dict[str, Tensor]
# streams[k] is [T, hidden]: the residual stream after k layers (0: embeddings) at positions 0 … T-1
Streams = Sequence[Tensor]


@dataclass(frozen=True)
class TargetShape:
    """The shape of a target model, as its config.json says it."""

    hidden: int = 64
    vocab: int = 96
    layers: int = 8  # at least 7: the taps that EAGLE-3 takes by default, 2, n/2 and n-3, are then three
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 16
    intermediate: int = 96
    rope_theta: float = 50_000.0
    eps: float = 1e-5


class Draw:
    """Random weights of a seed. Every value fits bfloat16, so that a file says the same in either type."""

    def __init__(self, seed: int) -> None:
        self._generator = torch.Generator().manual_seed(seed)

    def normal(self, *shape: int, scale: float = 1.0) -> Tensor:
        values = torch.randn(shape, generator=self._generator) * scale
        return values.to(torch.bfloat16).float()

    def matrix(self, rows: int, columns: int) -> Tensor:
        """[rows, columns]; outputs are about as large as inputs."""
        return self.normal(rows, columns, scale=columns**-0.5)

    def norm(self, width: int) -> Tensor:
        return (1.0 + self.normal(width, scale=0.2)).to(torch.bfloat16).float()

    def bias(self, width: int) -> Tensor:
        return self.normal(width, scale=0.2)

    def subset(self, vocab: int, size: int) -> Tensor:
        """[size] ascending target ids: the draft vocabulary."""
        return torch.randperm(vocab, generator=self._generator)[:size].sort().values


def layer_weights(
    draw: Draw,
    name: str,
    shape: TargetShape,
    *,
    inputs: int | None = None,
    biases: tuple[str, ...] = (),
    head_norms: bool = False,
    norms: tuple[str, ...] = ("input_layernorm", "post_attention_layernorm"),
) -> Tensors:
    """A decoder layer with the names of Llama and Qwen files; `inputs` is what q, k and v read, else the width."""
    read = inputs or shape.hidden
    queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    tensors = {
        f"{name}.self_attn.q_proj.weight": draw.matrix(queries, read),
        f"{name}.self_attn.k_proj.weight": draw.matrix(keys, read),
        f"{name}.self_attn.v_proj.weight": draw.matrix(keys, read),
        f"{name}.self_attn.o_proj.weight": draw.matrix(shape.hidden, queries),
        f"{name}.mlp.gate_proj.weight": draw.matrix(shape.intermediate, shape.hidden),
        f"{name}.mlp.up_proj.weight": draw.matrix(shape.intermediate, shape.hidden),
        f"{name}.mlp.down_proj.weight": draw.matrix(shape.hidden, shape.intermediate),
    }
    for part in biases:
        tensors[f"{name}.self_attn.{part}.bias"] = draw.bias(len(tensors[f"{name}.self_attn.{part}.weight"]))
    for part in ("q_norm", "k_norm") if head_norms else ():
        tensors[f"{name}.self_attn.{part}.weight"] = draw.norm(shape.head_dim)
    return tensors | {f"{name}.{part}.weight": draw.norm(shape.hidden) for part in norms}


def vocabulary_maps(ids: Tensor, vocab: int) -> Tensors:
    """`d2t` holds offsets (target id = draft id + d2t[draft id]), `t2d` marks the target ids that can be drafted.

    Source: SafeAILab/EAGLE eagle/model/cnets.py and vllm-project/vllm llama_eagle3.py.
    """
    t2d = torch.zeros(vocab, dtype=torch.bool)
    t2d[ids] = True
    return {"d2t": ids - torch.arange(len(ids)), "t2d": t2d}


def write_files(
    folder: Path,
    config: Config,
    tensors: Tensors,
    dtype: torch.dtype = torch.float32,
    shards: int = 1,
    name: str = "model.safetensors",
) -> None:
    """Write config.json and the tensors: one file, or `shards` files with an index."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    kept = {key: (value.to(dtype) if value.is_floating_point() else value) for key, value in tensors.items()}
    kept = {key: value.contiguous().clone() for key, value in kept.items()}
    if shards == 1:
        save_file(kept, folder / name, metadata={"format": "pt"})
        return
    names = list(kept)
    places: dict[str, str] = {}
    for shard in range(shards):
        file = f"model-{shard + 1:05d}-of-{shards:05d}.safetensors"
        part = names[shard::shards]
        save_file({key: kept[key] for key in part}, folder / file, metadata={"format": "pt"})
        places |= dict.fromkeys(part, file)
    size = sum(value.numel() * value.element_size() for value in kept.values())
    index = {"metadata": {"total_size": size}, "weight_map": dict(sorted(places.items()))}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))


def read_config(folder: Path) -> Config:
    config: Config = json.loads((folder / "config.json").read_text())
    return config


def read_tensors(folder: Path) -> Tensors:
    """Every tensor of every safetensors file in the folder; floating-point tensors as float32."""
    tensors: Tensors = {}
    for file in sorted(folder.glob("*.safetensors")):
        tensors |= load_file(file)
    return {key: (value.float() if value.is_floating_point() else value) for key, value in tensors.items()}


@dataclass
class Given:
    """What a head is given beside its own files: the target's shape and its shared weights."""

    folder: Path
    target: TargetShape
    embedding: Tensor  # [vocab, hidden]
    lm_head: Tensor  # [vocab, hidden]
    final_norm: Tensor  # [hidden], the factor itself: a target whose files hold the factor less one has it added


class Reference(ABC):
    """One head, read from its files. A subclass is one of the three kinds below."""

    def __init__(
        self, folder: Path, target: TargetShape, embedding: Tensor, lm_head: Tensor, final_norm: Tensor
    ) -> None:
        self.given = Given(folder, target, embedding.float(), lm_head.float(), final_norm.float())
        self.load()

    @abstractmethod
    def load(self) -> None:
        """Read the files."""


class PathReference(Reference):
    """An autoregressive head."""

    @abstractmethod
    def path_logits(self, streams: Streams, tokens: Sequence[int], drafted: Sequence[int]) -> Tensor:
        """[len(drafted) + 1, vocab]: row i is what follows `tokens + drafted[:i]`.

        `tokens` has T + 1 ids for streams of T positions: the last one is the anchor, which the target has not run.
        A token outside the draft vocabulary has -inf.
        """


class BlockReference(Reference):
    """A head that drafts a block at once."""

    @abstractmethod
    def block_logits(self, streams: Streams, tokens: Sequence[int], previous: Sequence[int] | None = None) -> Tensor:
        """[rows, vocab]: row i drafts the i-th token behind the anchor, `tokens[-1]`.

        With a Markov term `previous[i]` is the token before that one, so `previous[0]` is the anchor; without
        `previous` each row follows the best token of the row before.
        """


class OffsetReference(Reference):
    """A head with one output for each offset."""

    @abstractmethod
    def offset_logits(self, streams: Streams, tokens: Sequence[int]) -> Tensor:
        """[offsets, vocab]: row i drafts the i-th token behind the anchor, `tokens[-1]`."""


@dataclass(frozen=True)
class Layout:
    """How one publisher writes heads of one kind, and what such a head computes."""

    write: Callable[[Path, TargetShape, int], None]  # folder, target, seed
    reference: type[Reference]


def scatter_logits(logits: Tensor, ids: Tensor | None, vocab: int) -> Tensor:
    """Draft logits [rows, draft vocab] at the target's ids [rows, vocab]; `ids` None is the identity."""
    if ids is None:
        assert logits.shape[1] == vocab, (logits.shape, vocab)
        return logits
    scattered = torch.full((len(logits), vocab), -torch.inf)
    scattered[:, ids] = logits
    return scattered
