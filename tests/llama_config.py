"""The config.json of a small model, and what changes to it mean."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from foredraft.config import ModelConfig
from foredraft.models.safetensors.config import config_from_json

BASE: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 40,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "bos_token_id": 0,
    "eos_token_id": 1,
}


def parse(**changes: Any) -> ModelConfig:
    return config_from_json(Path("config.json"), {**BASE, **changes})
