"""What every model file offers to the decoder, whatever its format: a config, named tensors, a tokenizer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

from torch import Tensor

from foredraft.backends.weight import Weight
from foredraft.config import ModelConfig
from foredraft.errors import InvalidModel
from foredraft.models.fields import shown
from foredraft.models.shapes import check_config, check_shapes, fused_parts, is_mtp
from foredraft.models.tokenizer import Tokenizer


@dataclass(frozen=True)
class StoredTensor:
    """A tensor as a file holds it. `name` is that of the Llama layout, where `qkv_proj` and `gate_up_proj` hold several
    tensors one below the other. `read` gives some of its rows, which are the tensor of the name given first."""

    file: Path
    name: str
    shape: tuple[int, ...]
    precision: str  # one of config.DTYPES
    read: Callable[[str, slice], Weight]
    first_row: int = 0  # of one that is part of another


class Checkpoint:
    """Tensor names are those of the Hugging Face Llama layout (`model.layers.0.self_attn.q_proj.weight`), whatever
    the file calls them; fused tensors (Phi-3) come out split. Opening reads headers only. A tensor's bytes are touched
    when it is asked for."""

    path: Path
    config: ModelConfig
    precision: str  # the class in which most weights of the linear layers are stored: one of config.DTYPES
    generation: dict[str, Any]  # the model's own sampling defaults: temperature, top_p, top_k, ... ; empty means greedy

    def __init__(
        self,
        path: Path,
        config: ModelConfig,
        generation: dict[str, Any],
        stored: Iterable[StoredTensor],
        read_tokenizer: Callable[[], Tokenizer],
    ) -> None:
        """Raises InvalidModel unless the stored tensors are exactly those that `config` describes."""
        self.path, self.config, self.generation = path, config, generation
        self._read_tokenizer = read_tokenizer
        check_config(path, config)
        self._stored: dict[str, StoredTensor] = {}
        for tensor in stored:
            first_row = 0
            for name, num_rows in fused_parts(tensor.file, config, tensor.name, tensor.shape[0]):
                if name in self._stored:
                    raise InvalidModel(f"{tensor.file}: tensor {shown(name)} is there twice; download the model again.")
                shape = (num_rows, *tensor.shape[1:])
                self._stored[name] = replace(tensor, name=name, shape=shape, first_row=first_row)
                first_row += num_rows
        mtp = {name for name in self._stored if is_mtp(config, name)}
        self._mtp = {name: self._stored.pop(name) for name in mtp}
        check_shapes(path, config, {name: tensor.shape for name, tensor in self._stored.items()})
        if config.tie_word_embeddings:
            self._stored.pop("lm_head.weight", None)  # some files repeat the embedding
        weights: Counter[str] = Counter()
        for name, tensor in self._stored.items():
            if name.endswith("_proj.weight"):
                weights[tensor.precision] += prod(tensor.shape)
        self.precision = weights.most_common(1)[0][0]

    def names(self) -> set[str]:
        """The names of all tensors of the model."""
        return set(self._stored)

    def mtp_names(self) -> set[str]:
        """Those of layers for multi-token prediction, which nothing has checked."""
        return set(self._mtp)

    def weight(self, name: str) -> Weight:
        """A matrix in the file's own form (4-bit and 8-bit codes are kept as they are)."""
        tensor = self._stored.get(name) or self._mtp.get(name)
        if tensor is None:
            raise InvalidModel(f"{self.path} has no tensor {name!r}.")
        return tensor.read(name, slice(tensor.first_row, tensor.first_row + tensor.shape[0]))

    def vector(self, name: str) -> Tensor:
        """A norm weight or bias as float32, and not as a view of the file, which may change."""
        return self.weight(name).values.float().flatten().clone()

    def tokenizer(self) -> Tokenizer:
        """The tokenizer that belongs to the file, checked against the width of the logits."""
        tokenizer, num_logits = self._read_tokenizer(), self.config.vocab_size
        if tokenizer.vocab_size > num_logits:
            raise InvalidModel(
                f"{self.path}: the tokenizer has ids up to {tokenizer.vocab_size - 1}, but the model's logits end at "
                f"{num_logits - 1}, so it does not fit the model; use the tokenizer that belongs to it."
            )
        return tokenizer
