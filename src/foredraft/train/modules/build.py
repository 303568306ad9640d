"""From a config to a module."""

from __future__ import annotations

from foredraft.models.heads.config import HeadConfig
from foredraft.train.modules.dflash import DFlashHead
from foredraft.train.modules.eagle import EagleHead
from foredraft.train.modules.medusa import MedusaHead

Head = EagleHead | MedusaHead | DFlashHead


def build_head(config: HeadConfig) -> Head:
    """A head with random weights, and the first tokens of the target's vocabulary as its own."""
    match config.kind:
        case "eagle":
            return EagleHead(config)
        case "medusa":
            return MedusaHead(config)
        case _:
            return DFlashHead(config)
