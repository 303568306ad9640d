"""A small Llama with tied embeddings; its tensors have the names that transformers gives them."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional

from foredraft.heads.base import HeadConfig
from foredraft.heads.module import Attention, Mlp, RMSNorm, Table


class Llama(nn.Module):
    """`shape` gives the sizes of its layers; its vocabulary is the target's."""

    def __init__(self, shape: HeadConfig) -> None:
        super().__init__()
        self.model = LlamaModel(shape)

    def forward(self, tokens: Tensor, positions: Tensor, like: Tensor) -> Tensor:
        """Tokens [batch, length] → rows after the final norm [batch, length, hidden], computed in the dtype of
        `like`."""
        x = self.model.embed_tokens(tokens).to(like.dtype)
        for layer in self.model.layers:
            x = layer(x, positions)
        y: Tensor = self.model.norm(x)
        return y

    def logits(self, y: Tensor) -> Tensor:
        return functional.linear(y, self.output_weight.to(y.dtype))

    @property
    def output_weight(self) -> Tensor:
        return self.model.embed_tokens.weight


class LlamaModel(nn.Module):
    def __init__(self, shape: HeadConfig) -> None:
        super().__init__()
        self.embed_tokens = Table(shape.target_vocab_size, shape.hidden_size, scale=0.02)
        self.layers = nn.ModuleList(LlamaLayer(shape) for _ in range(shape.num_layers))
        self.norm = RMSNorm(shape.hidden_size, shape.norm_eps)


class LlamaLayer(nn.Module):
    def __init__(self, shape: HeadConfig) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(shape.hidden_size, shape.norm_eps)
        self.post_attention_layernorm = RMSNorm(shape.hidden_size, shape.norm_eps)
        self.self_attn = Attention(shape, shape.hidden_size, qk_norm=False)
        self.mlp = Mlp(shape)

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        normed = self.input_layernorm(x)
        keys = self.self_attn.keys_values(normed, positions)
        x = x + self.self_attn.attend(normed, positions, [keys], None)
        y: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return y
