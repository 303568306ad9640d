"""A small Llama with tied embeddings; its tensors have the names that transformers gives them."""

from __future__ import annotations

from torch import Tensor, nn

from foredraft.heads.base import HeadConfig
from foredraft.heads.module import DecoderLayer, Module, RMSNorm, Table


class Llama(Module):
    """`shape` gives the sizes of its layers; its vocabulary is the target's."""

    def __init__(self, shape: HeadConfig) -> None:
        super().__init__()
        self.model = LlamaModel(shape)

    def forward(self, tokens: Tensor, positions: Tensor, like: Tensor) -> Tensor:
        """Tokens [batch, length] → rows after the final norm [batch, length, hidden], computed in the dtype of
        `like`."""
        x = self.model.embed_tokens(tokens).to(like.dtype)
        for layer in self.model.layers:
            x = layer(x, positions, [], None)
        return self.model.norm(x)

    @property
    def output_weight(self) -> Tensor:
        return self.model.embed_tokens.weight


class LlamaModel(nn.Module):
    def __init__(self, shape: HeadConfig) -> None:
        super().__init__()
        self.embed_tokens = Table(shape.target_vocab_size, shape.hidden_size, scale=0.02)
        self.layers = nn.ModuleList(DecoderLayer(shape, qk_norm=False) for _ in range(shape.num_layers))
        self.norm = RMSNorm(shape.hidden_size, shape.norm_eps)
