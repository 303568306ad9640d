"""Tiny heads with random weights for tiny models, written as training writes them."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from foredraft.heads.base import HeadConfig
from foredraft.heads.dflash.module import DFlashModule
from foredraft.heads.eagle.module import EagleModule
from foredraft.heads.files import target_digest, write_head
from foredraft.heads.medusa.module import MedusaModule
from foredraft.heads.module import HeadModule
from foredraft.heads.mtp.module import MtpModule
from foredraft.models.catalog import open_checkpoint

DRAFT_VOCAB = 256
MODULES: dict[str, type[HeadModule]] = {
    "eagle": EagleModule,
    "medusa": MedusaModule,
    "dflash": DFlashModule,
    "mtp": MtpModule,
}
KINDS = tuple(MODULES)
SIZES: dict[str, dict[str, object]] = {
    "eagle": {"block": 5},
    "medusa": {"block": 4, "num_layers": 2},
    "dflash": {"block": 6, "num_layers": 2},
    "mtp": {"block": 3, "shares_output": True},
}


def tiny_config(kind: str, model: Path, correction: str = "none", **changes: object) -> HeadConfig:
    """A head for a tiny model, of its width."""
    checkpoint = open_checkpoint(model)
    target = checkpoint.config
    layers = target.num_layers
    values: dict[str, object] = {
        "kind": kind,
        "target_name": "tiny",
        "target_digest": target_digest(checkpoint),
        "target_hidden_size": target.hidden_size,
        "target_vocab_size": target.vocab_size,
        "target_num_layers": layers,
        "taps": {"eagle": (1, 2, layers), "medusa": (layers,), "dflash": (0, layers), "mtp": (layers,)}[kind],
        "hidden_size": target.hidden_size,
        "intermediate_size": 96,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 16,
        "num_layers": 1,
        "rope_theta": 10000.0,
        "norm_eps": 1e-5,
        "draft_vocab_size": target.vocab_size if kind == "mtp" else DRAFT_VOCAB,
        "correction": correction,
        "rank": 0 if correction == "none" else 32,
        **SIZES[kind],
        **changes,
    }
    return HeadConfig(**values)  # type: ignore[arg-type]


def build_head(config: HeadConfig) -> HeadModule:
    """A module as training starts with it, and the first tokens of the target's vocabulary as its own."""
    return MODULES[config.kind](config)


def random_head(config: HeadConfig, seed: int = 0) -> HeadModule:
    """A module whose every tensor is random, so that a forgotten one shows."""
    torch.manual_seed(seed)
    head = build_head(config)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.requires_grad_(False)
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) * 0.2)
            else:
                parameter.copy_(torch.randn_like(parameter) * 0.15)
    head.set_vocabulary(torch.randperm(config.target_vocab_size)[: config.draft_vocab_size].sort().values)
    return head.eval()


def save_head(head: HeadModule, folder: Path, dtype: torch.dtype = torch.float32, bits: int = 16) -> Path:
    """With fewer than 16 `bits`, matrices are written in so many."""

    def stored(tensor: Tensor) -> Tensor:
        return tensor.to(dtype) if tensor.is_floating_point() else tensor

    tensors = {name: stored(tensor) for name, tensor in head.state_dict().items()}
    write_head(folder, head.config, tensors, dict.fromkeys(tensors, bits))
    return folder


def save_heads(model: Path, folder: Path) -> Path:
    """A folder with a head of every kind for a tiny model."""
    for kind in KINDS:
        correction = "refiner" if kind == "dflash" else "none"
        save_head(random_head(tiny_config(kind, model, correction)), folder / kind)
    return folder
