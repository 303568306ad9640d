"""Medusa: a block of residual layers per offset on the target's last hidden state, all with one output head."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional

from foredraft.heads.base import HeadConfig
from foredraft.heads.module import HeadModule, Linear, RMSNorm


class MedusaModule(HeadModule):
    """From the state of position t, block h gives what the output head reads for token t+2+h. The state is the residual
    stream after the target's last layer, after `norm`, which is the target's final norm."""

    def __init__(self, config: HeadConfig) -> None:
        super().__init__(config)
        self.norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.norm.weight.requires_grad_(False)
        self.blocks = nn.ModuleList(MedusaBlock(config.hidden_size, config.num_layers) for _ in range(config.block))
        self.lm_head = Linear(config.hidden_size, config.draft_vocab_size)


class MedusaBlock(nn.Module):
    """Layers of the form y = x + silu(W·x + b). The last one starts as y = x, the others near it, each elsewhere."""

    def __init__(self, hidden_size: int, num_layers: int) -> None:
        super().__init__()
        scales = [0.1] * (num_layers - 1) + [0.0]
        self.layers = nn.ModuleList(Linear(hidden_size, hidden_size, bias=True, scale=scale) for scale in scales)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + functional.silu(layer(x))
        return x
