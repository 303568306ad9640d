"""What a layer for multi-token prediction (MTP) is on disk: `fc` makes one row of the embedding of a token and the
target's last state, each after a norm of its own, and a whole decoder layer follows. One that is trained here shares
the target's output head."""

from __future__ import annotations

from foredraft.heads.base import HeadConfig, Rules, Shapes, layer_tensors


def _tensors(config: HeadConfig) -> Shapes:
    hidden = config.hidden_size
    norms: Shapes = {f"{name}.weight": (hidden,) for name in ("enorm", "hnorm", "norm")}
    return {"fc.weight": (hidden, 2 * hidden), **norms, **layer_tensors("midlayer", config, hidden, config.qk_norm)}


RULES = Rules(
    _tensors,
    as_wide_as_target=True,
    max_layers=1,
    variants=frozenset(
        {
            *("shares_embedding", "shares_output", "rope_scaling", "sliding_window", "sliding_layers", "biases"),
            "qk_norm",
        }
    ),
)
