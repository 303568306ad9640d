"""A target whose text can be learnt within seconds: after token v it mostly writes token v + 1.

Token v's embedding is that of token 0, rotated v times; the output head rotates once more. The layers add a little that
depends on the context.
"""

from __future__ import annotations

import json
import random
from pathlib import Path

import torch

from tests.tiny_models import random_model, save_model

_LOGIT_SCALE = 1.5
_LAYER_SCALE = 0.15


def save_toy_target(folder: Path) -> Path:
    model = random_model("llama")
    embedding = model.model.embed_tokens.weight
    vocab, hidden = embedding.shape
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                parameter.mul_(_LAYER_SCALE)
        model.model.norm.weight.fill_(1.0)
        planes = torch.linalg.qr(torch.randn(hidden, hidden))[0]
        speeds = torch.linspace(0.3, 2.9, hidden // 2)
        angles = torch.arange(vocab + 1)[:, None] * speeds  # [vocab + 1, planes]
        orbit = torch.cat([angles.cos(), angles.sin()], dim=1) * 2**0.5 @ planes
        embedding.copy_(orbit[:vocab])
        # logits[v] = <R x, e[v]> = <x, R^-1 e[v]> = <x, e[v - 1]>
        model.lm_head.weight.copy_(torch.cat([orbit[vocab - 1 : vocab], orbit[: vocab - 1]]) * (_LOGIT_SCALE / 8))
    return save_model(model, folder)


def write_prompts(file: Path, count: int) -> Path:
    """Words of random letters."""
    letters = random.Random(0)
    lines = [
        "".join(letters.choices("abcdefghijklmnopqrstuvwxyz0123456789", k=letters.randint(2, 8))) for _ in range(count)
    ]
    file.write_text("".join(json.dumps({"prompt": line}) + "\n" for line in lines))
    return file
