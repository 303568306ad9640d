"""What every model file offers to the decoder, whatever its format: a config, named tensors, a tokenizer."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from foredraft.backends.base import Weight
from foredraft.config import ModelConfig
from foredraft.models.tokenizer import Tokenizer


class Checkpoint(Protocol):
    """Tensor names are those of the Hugging Face Llama layout (`model.layers.0.self_attn.q_proj.weight`), whatever
    the file calls them; fused tensors (Phi-3) come out split. Tensors are read when asked for, one at a time."""

    path: Path
    config: ModelConfig
    precision: str  # the file's precision class: one of config.DTYPES
    generation: dict[str, Any]  # the model's own sampling defaults: temperature, top_p, top_k, ... ; empty means greedy

    def names(self) -> set[str]:
        """All tensor names that the file offers."""

    def weight(self, name: str) -> Weight:
        """A matrix in the file's own form (4-bit and 8-bit codes are kept as they are)."""

    def vector(self, name: str) -> Tensor:
        """A norm weight or bias as float32."""

    def tokenizer(self) -> Tokenizer:
        """The tokenizer that belongs to the file, checked against the width of the logits."""
