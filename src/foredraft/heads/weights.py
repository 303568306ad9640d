"""The tensors of a head as a backend runs them, and the rows of the target's taps that it reads."""

from __future__ import annotations

import torch
from torch import Tensor

from foredraft.backends.base import Backend
from foredraft.backends.layers import AttentionShape, Entry, Layer, Linear, Stack, Taps
from foredraft.backends.weight import Weight, plain_weight
from foredraft.batch import ForwardBatch
from foredraft.config import ModelConfig
from foredraft.errors import InvalidModel
from foredraft.heads.base import D2T, MAPPED, OUTPUT_MAP, HeadConfig
from foredraft.heads.coding import decoded
from foredraft.heads.files import Tensors
from foredraft.models.decoder import Decoder
from foredraft.models.packed_weights import PackedWeights, attention_shape
from foredraft.models.quantise import convert
from foredraft.models.rope import rope_table

_DTYPES = {"f32": "float32", "bf16": "bfloat16", "q8": "int8", "q4": "int4"}  # of the kinds of weights that heads have


class HeadWeights(PackedWeights):
    """Converts the tensors of a head to `dtype`, one of config.DTYPES, and packs them. With `keeps_codes`, what the
    file has in 8 or 4 bits stays so: wider weights take longer to read and say no more."""

    def __init__(self, config: HeadConfig, tensors: Tensors, dtype: str, keeps_codes: bool, backend: Backend) -> None:
        super().__init__(backend)
        self.config, self._dtype, self._keeps_codes = config, dtype, keeps_codes
        self._tensors = tensors
        self.linears: list[Linear] = []  # that were made of them

    @property
    def token_ids(self) -> Tensor:
        """The target's ids of the draft vocabulary, in the order of the output head's rows: [draft_vocab] int64."""
        return torch.cat(self._own_and_mapped()).to(self.backend.device)

    def vector(self, name: str) -> Tensor:
        return decoded(self._tensors[name]).float().clone().to(self.backend.device)

    def optional(self, name: str) -> Tensor | None:
        return self.vector(name) if name in self._tensors else None

    def matrix(self, name: str) -> Tensor:
        """Dense float32, for what is computed once."""
        return decoded(self._tensors[name]).float()

    def embedding(self, target: Decoder) -> Linear:
        """The head's own, or the one that it shares."""
        return target.embedding if self.config.shares_embedding else self.linear("embed_tokens.weight", is_head=True)

    def output(self, target: Decoder) -> Linear:
        """The head's own output head, with rows for mapped tokens below its own; or the one that it shares."""
        if self.config.shares_output:
            return target.head
        if not self.config.mapped_vocab_size:
            return self.linear("lm_head.weight", is_head=True)
        mapped = self._own_and_mapped()[1].to(self.backend.device)
        rows = self.backend.embed(mapped, target.head).float().cpu()  # where weights are converted
        return self.extended("lm_head.weight", rows @ self.matrix(OUTPUT_MAP).T)

    def _own_and_mapped(self) -> tuple[Tensor, Tensor]:
        """The target's ids of the tokens with own rows in the output head, and those of mapped tokens."""
        offsets = decoded(self._tensors[D2T])
        ids, none = offsets + torch.arange(len(offsets)), torch.zeros(len(offsets), dtype=torch.bool)
        mapped = decoded(self._tensors[MAPPED]) if self.config.mapped_vocab_size else none
        return ids[~mapped], ids[mapped]

    def extended(self, name: str, rows: Tensor) -> Linear:
        """A table with further rows below those of a tensor, in the precision of these."""
        own = self.weight(name, is_head=True)
        further = convert(Weight("f32", rows), _DTYPES[own.kind])
        return self.pack([own, further])

    def pack(self, weights: list[Weight], bias: Tensor | None = None) -> Linear:
        self.linears.append(super().pack(weights, bias))
        return self.linears[-1]

    def weight(self, name: str, is_head: bool) -> Weight:
        tensor = self._tensors[name]
        if isinstance(tensor, Weight) and self._keeps_codes:
            return tensor
        weight = tensor if isinstance(tensor, Weight) else plain_weight(tensor)
        return convert(weight, self._dtype, least_bits=8 if is_head else 4)

    def stack(self, layers: tuple[Layer, ...], max_positions: int, entry: Entry | None = None) -> Stack:
        """The layers with the final norm; without one, what comes out of it has no meaning."""
        device, norm = self.backend.device, self.optional("norm.weight")
        rope = rope_table(layer_config(self.config), max_positions).to(device)
        norm = torch.ones(self.config.hidden_size, device=device) if norm is None else norm
        return Stack(layers, norm, rope, 1.0, self.config.norm_eps, entry)


def layer_config(config: HeadConfig) -> ModelConfig:
    """The layers of a head, as those of a model."""
    return ModelConfig(
        architecture=config.kind,
        vocab_size=config.draft_vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_layers=config.num_layers,
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        max_position_embeddings=0,
        rms_norm_eps=config.norm_eps,
        rope_theta=config.rope_theta,
        rope_scaling=config.rope_scaling,
        sliding_window=config.sliding_window or None,
        sliding_layers=config.sliding_layers,
    )


def layer_shape(config: HeadConfig, layer: int = 0) -> AttentionShape:
    return attention_shape(layer_config(config), layer)


def norm_each(taps: Tensor, norms: list[Tensor], eps: float, backend: Backend) -> Tensor:
    """Taps side by side [rows, taps × width], each after a norm of its own; as they are where there are no norms."""
    if not norms:
        return taps
    parts = zip(taps.chunk(len(norms), dim=1), norms, strict=True)
    return torch.cat([backend.rms_norm(tap.contiguous(), norm, eps) for tap, norm in parts], dim=1)


class TapReader:
    """The taps that a head reads, of those that the target writes."""

    def __init__(self, config: HeadConfig, taps: Taps, backend: Backend) -> None:
        missing = [tap for tap in config.taps if tap not in taps.layers]
        if missing:
            written = ", ".join(map(str, taps.layers))
            raise InvalidModel(
                f"The {config.kind} head reads the residual stream after layer {missing[0]}, but the target writes "
                f"those after {written}; load the head together with the model (head=PATH)."
            )
        self.cache, self._backend = taps.cache.view(len(taps.cache), len(taps.layers), -1), backend
        places = [taps.layers.index(tap) for tap in config.taps]
        self.places = None if places == list(range(len(taps.layers))) else torch.tensor(places, device=backend.device)

    def rows(self, slots: Tensor) -> Tensor:
        """[rows, taps × target_hidden]"""
        return self._backend.read(self.cache, self.places, slots)

    def previous(self, batch: ForwardBatch) -> Tensor:
        """The same at the key before each row's own: [rows, taps × target_hidden]"""
        return self._backend.read_previous(self.cache, self.places, batch)
