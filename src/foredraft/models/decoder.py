"""One decoder for the Llama family: how it is loaded, and the run through all layers (a layer: backends/base.py).

Architectures differ only in data: which biases and norms exist, which layers rotate, the multipliers of the config.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property

from torch import Tensor

from foredraft.backends.base import Backend
from foredraft.backends.layers import Experts, Layer, LayerKV, Linear, Stack, Taps
from foredraft.backends.weight import Weight
from foredraft.batch import ForwardBatch
from foredraft.config import ExpertsConfig, ModelConfig
from foredraft.errors import InvalidModel
from foredraft.models.checkpoint import Checkpoint
from foredraft.models.packed_weights import PackedWeights, attention_shape
from foredraft.models.quantise import convert
from foredraft.models.rope import rope_tables

Progress = Callable[[int, int], None]  # how many tensors were read, and how many there are
_EMBEDDING = "model.embed_tokens.weight"


@dataclass(frozen=True)
class DraftVocabulary:
    """The tokens of a model that knows fewer than its target, by the target's ids."""

    token_ids: Tensor  # [draft_vocab] int64: the token of every column of the logits
    rows: Tensor  # [target_vocab] int64: the row of the embedding for every token


@dataclass(frozen=True)
class Decoder:
    """A loaded model: embedding, layers, final norm, head, and the table of rotations."""

    config: ModelConfig
    embedding: Linear
    layers: tuple[Layer, ...]
    norm: Tensor
    head: Linear
    rope: Tensor  # [positions, 2, rotary_dim / 2]: cos, sin
    window_rope: Tensor | None = None  # of layers with a window, where they have rotations of their own
    vocabulary: DraftVocabulary | None = None  # None: tokens are rows of the embedding and columns of the logits

    def run(self, batch: ForwardBatch, kv: list[LayerKV], backend: Backend, taps: Taps | None = None) -> Tensor:
        """All rows through all layers and the final norm. The residual streams that are tapped are written on the
        way."""
        rows = batch.token_ids if self.vocabulary is None else self.vocabulary.rows[batch.token_ids]
        x = backend.embed(rows, self.embedding)
        if self.config.embedding_multiplier != 1:
            x = x * self.config.embedding_multiplier
        return backend.run_layers(x, self._stack, kv, batch, taps)[1]

    @cached_property
    def _stack(self) -> Stack:
        """One object for the life of the decoder: what a backend has found out about it, it need not find out again."""
        multiplier, eps = self.config.residual_multiplier, self.config.rms_norm_eps
        return Stack(self.layers, self.norm, self.rope, multiplier, eps, window_rope=self.window_rope)

    def with_positions(self, count: int) -> Decoder:
        """The same weights, with rotations for so many positions."""
        rope, window_rope = rope_tables(self.config, count, self.rope.device)
        return replace(self, rope=rope, window_rope=window_rope)

    @property
    def linears(self) -> list[Linear]:
        """All linear layers in order, the output head last."""
        return [*(linear for layer in self.layers for linear in layer.linears), self.head]

    @property
    def weight_kinds(self) -> list[tuple[str, ...]]:
        """The kinds of weights that the embedding and every linear layer are made of, in order."""
        return [linear.kinds for linear in (self.embedding, *self.linears)]

    def logits(self, normed: Tensor, backend: Backend) -> Tensor:
        """Float32 logits [rows, vocab] of rows that have gone through `run`."""
        logits = backend.logits(normed, self.head)
        return logits if self.config.logits_divisor == 1 else logits / self.config.logits_divisor


class _ModelWeights(PackedWeights):
    """Of a checkpoint, converted to `dtype` one by one, and told to `progress`."""

    def __init__(
        self, checkpoint: Checkpoint, dtype: str, backend: Backend, progress: Progress | None, rounds_all: bool
    ) -> None:
        super().__init__(backend)
        self._checkpoint, self._dtype, self._rounds_all = checkpoint, dtype, rounds_all
        self._progress, self._names, self._num_read = progress, checkpoint.names(), 0

    def vector(self, name: str) -> Tensor:
        self._tell()
        return self._checkpoint.vector(name).to(self.backend.device)

    def optional(self, name: str) -> Tensor | None:
        return self.vector(name) if name in self._names else None

    def weight(self, name: str, is_head: bool) -> Weight:
        self._tell()
        keeps_more = not self._rounds_all and (is_head or self._checkpoint.precision == "int4")
        return convert(self._checkpoint.weight(name), self._dtype, 8 if keeps_more or name == _EMBEDDING else 4)

    def experts(self, prefix: str, shape: ExpertsConfig) -> Experts:
        name = f"{prefix}.router.weight"
        self._tell()
        router = convert(self._checkpoint.weight(name), "float32")  # few numbers, on which much depends
        bias = self.optional(f"{prefix}.router.bias")
        if not router.values.isfinite().all() or (bias is not None and not bias.isfinite().all()):
            raise InvalidModel(
                f"{self._checkpoint.path}: tensor {name!r} or its bias holds numbers that are not finite, so no expert "
                "can be chosen; download or convert the model again."
            )
        each = (self.mlp(f"{prefix}.experts.{expert}") for expert in range(shape.count))
        return Experts(self.pack([router], bias), tuple(each), shape.num_chosen, shape.normalised)

    def _tell(self) -> None:
        self._num_read += 1
        if self._progress is not None:
            self._progress(self._num_read, len(self._names))


def load_decoder(
    checkpoint: Checkpoint,
    dtype: str,
    max_positions: int,
    backend: Backend,
    progress: Progress | None = None,
    rounds_all: bool = False,
) -> Decoder:
    """Read, convert and pack all weights. `dtype` is one of config.DTYPES.

    For int4, the embedding and the output head stay at 8 bits unless the file has them in 4, and so does every tensor
    that a 4-bit file keeps at more: whoever made that file knew where to spend bits. `rounds_all` is for a model whose
    time is worth more than its accuracy: only the embedding keeps its 8 bits, of which a run reads a few rows.
    """
    config = checkpoint.config
    weights = _ModelWeights(checkpoint, dtype, backend, progress, rounds_all)

    def layer(index: int) -> Layer:
        prefix, experts = f"model.layers.{index}", None
        if config.experts is not None and config.has_experts(index):
            experts = weights.experts(f"{prefix}.mlp", config.experts)
        return weights.layer(prefix, attention_shape(config, index), experts, config.activation)

    embedding = weights.linear(_EMBEDDING)
    rope, window_rope = rope_tables(config, max_positions, backend.device)
    return Decoder(
        config=config,
        embedding=embedding,
        head=embedding if config.tie_word_embeddings else weights.linear("lm_head.weight", is_head=True),
        layers=tuple(layer(index) for index in range(config.num_layers)),
        norm=weights.vector("model.norm.weight"),
        rope=rope,
        window_rope=window_rope,
    )
