"""Heads that `foredraft train` has written."""

from __future__ import annotations

from foredraft.heads.base import HeadConfig
from foredraft.heads.files import Tensors, check_target, read_weights
from foredraft.heads.formats.published import Published
from foredraft.models.checkpoint import Checkpoint


def fits(published: Published) -> bool:
    return "target_digest" in published.raw or "kind" in published.raw


def read(published: Published, target: Checkpoint) -> tuple[HeadConfig, Tensors]:
    config = HeadConfig.read(published.folder)
    check_target(published.folder, config, target)
    return config, read_weights(published.folder, config)
