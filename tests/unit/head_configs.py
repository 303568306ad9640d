"""Small heads of every kind for tests."""

from __future__ import annotations

from foredraft.config import RopeScaling
from foredraft.heads.base import HeadConfig

COMMON = {
    "target_name": "tiny",
    "target_digest": "0",
    "target_hidden_size": 32,
    "target_vocab_size": 50,
    "target_num_layers": 4,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 8,
    "num_layers": 1,
    "rope_theta": 10000.0,
    "norm_eps": 1e-5,
    "draft_vocab_size": 20,
}


def head_config(kind: str, correction: str = "none", **changes: object) -> HeadConfig:
    own: dict[str, object] = {
        "eagle": {"taps": (1, 2, 3), "block": 5},
        "medusa": {"taps": (4,), "block": 3, "num_layers": 2},
        "dflash": {"taps": (1, 3), "block": 4, "num_layers": 2},
        "mtp": {"taps": (4,), "block": 3, "shares_output": True, "draft_vocab_size": 50},
        "draft_model": {"taps": (), "block": 4, "num_layers": 2},
    }[kind]
    if correction != "none":
        own |= {"correction": correction, "rank": 6}
    return HeadConfig(**{"kind": kind, **COMMON, **own, **changes})  # type: ignore[arg-type]


EVERY_KIND = (
    head_config("eagle"),
    head_config("eagle", mapped_vocab_size=8),
    head_config("medusa"),
    head_config("mtp"),
    head_config("mtp", qk_norm=True, rope_scaling=RopeScaling("llama3", 8.0, original_max_position_embeddings=64)),
    head_config("dflash"),
    head_config("dflash", "markov"),
    head_config("dflash", "refiner"),
    head_config("dflash", "markov", block_input="masked", mask_token_id=7),
)
