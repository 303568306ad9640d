"""Which of a model's heads `auto` uses: the one that promises the most tokens for what it reads."""

from __future__ import annotations

from collections.abc import Mapping

from foredraft.config import ModelConfig
from foredraft.control.economics import expected_tokens_by_depth
from foredraft.models.heads.catalog import HeadFiles
from foredraft.models.heads.config import HeadConfig
from foredraft.proposers.registry import ProposerChoice


def best_head(heads: Mapping[str, HeadFiles], target: ModelConfig) -> ProposerChoice | None:
    """The head with the most expected tokens per weight that a cycle reads, by its measured acceptance."""

    def rate(kind: str) -> float:
        config = heads[kind].config
        return expected_tokens_by_depth(config.acceptance) / (1 + _weights(config) / _target_weights(target))

    return ProposerChoice(max(heads, key=rate)) if heads else None


def _weights(config: HeadConfig) -> int:
    """That one draft reads. An EAGLE head runs once per depth, the others once."""
    blocks = config.block * config.hidden_size**2 if config.kind == "medusa" else config.num_layers * _layer(config)
    return (blocks + config.draft_vocab_size * config.hidden_size) * (config.block if config.kind == "eagle" else 1)


def _target_weights(config: ModelConfig) -> int:
    return config.num_layers * _layer(config) + config.vocab_size * config.hidden_size


def _layer(config: HeadConfig | ModelConfig) -> int:
    attention = 2 * config.head_dim * (config.num_heads + config.num_kv_heads)
    return config.hidden_size * (attention + 3 * config.intermediate_size)
