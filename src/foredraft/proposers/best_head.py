"""Which of a model's heads `auto` uses on this machine, decided before any is loaded."""

from __future__ import annotations

from collections.abc import Mapping

from foredraft.config import ModelConfig
from foredraft.control.economics import VerifyCurve, best_length
from foredraft.control.records import UNKNOWN
from foredraft.heads.base import HeadConfig
from foredraft.heads.catalog import HeadFiles
from foredraft.proposers.registry import ProposerChoice

# What a whole draft takes on a GPU, however small the head, by its kind: measured on an H200.
DEVICE_DRAFTS_S = {"eagle": 0.7e-3, "dflash": 1.1e-3}
# What drafts were measured to take on a Xeon in bfloat16, in units of what their weights would take in the target:
# those of an EAGLE head, and of a block with a correction along it (1.7 to 2.3 on a Neoverse-N1).
_EAGLE, _CORRECTED = 0.65, 2.1


def best_head(
    heads: Mapping[str, HeadFiles], target: ModelConfig, least_s: Mapping[str, float], curve: VerifyCurve
) -> ProposerChoice | None:
    """The head that promises the highest speed for one sequence; None where plain decoding is as fast.

    A promise is made of the head's measured acceptance, the cost of the target's runs by their rows, and the weights
    that a draft reads: a head is taken to run as fast as the target for each of its weights, and no faster than
    `least_s` of its kind. A kind that is not in `least_s` is taken to be as slow as the slowest that is.
    """
    slowest_s = max(least_s.values(), default=0.0)
    speeds = {
        kind: _speedup(files.config, target, least_s.get(kind, slowest_s), curve) for kind, files in heads.items()
    }
    best = max(speeds, key=speeds.__getitem__, default=None)
    return None if best is None or speeds[best] <= 1 else ProposerChoice(best)


def _speedup(config: HeadConfig, target: ModelConfig, least_s: float, curve: VerifyCurve) -> float:
    """With chains of the best length. EAGLE heads and draft models run one row per token, the others run a block of
    rows once."""
    acceptance = config.acceptance or (UNKNOWN,) * config.block
    share = _weights(config) / _target_weights(target) * (_EAGLE if config.kind == "eagle" else 1.0)
    runs_per_token = config.kind in ("eagle", "draft_model")
    block = curve.relative(config.block) * (_CORRECTED if config.correction != "none" else 1.0)
    per_token, per_draft = (share, 0.0) if runs_per_token else (0.0, share * block)

    def cost(rows: int) -> float:
        """Of a chain and its verification, in plain steps."""
        draft = max((rows - 1) * per_token + per_draft, least_s / curve.seconds_at(1))
        return curve.relative(rows) + (draft if rows > 1 else 0.0)

    return best_length(acceptance, 0.0, cost).speedup


def _weights(config: HeadConfig) -> int:
    """That one run of a head reads."""
    per_layer = config.block * config.hidden_size**2 if config.kind == "medusa" else _layer(config)
    return config.num_layers * per_layer + config.draft_vocab_size * config.hidden_size


def _target_weights(config: ModelConfig) -> int:
    return config.num_layers * _layer(config) + config.vocab_size * config.hidden_size


def _layer(config: HeadConfig | ModelConfig) -> int:
    attention = 2 * config.head_dim * (config.num_heads + config.num_kv_heads)
    return config.hidden_size * (attention + 3 * config.intermediate_size)
