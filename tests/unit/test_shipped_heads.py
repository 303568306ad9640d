"""The heads that come with the package are whole, measured, and small enough to come with it."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from foredraft.heads.base import CONFIG_FILE, HeadConfig
from foredraft.heads.files import read_tensors
from foredraft.heads.kinds import SHIPPED, shipped_kinds
from foredraft.models.known_models import MODELS

HEADS = sorted(file.parent for file in SHIPPED.glob(f"*/*/{CONFIG_FILE}"))
ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("folder", HEADS, ids=lambda folder: f"{folder.parent.name}-{folder.name}")
def test_a_head_is_whole_and_measured(folder: Path) -> None:
    config = HeadConfig.read(folder)
    assert (config.kind, len(config.acceptance) > 0) == (folder.name, True)
    read_tensors(folder, config)


def test_wheels_hold_what_auto_uses() -> None:
    package = ROOT / "src" / "foredraft"
    globs = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]["foredraft"]
    packed = {file for glob in globs for file in package.glob(glob)}
    files = {file for file in SHIPPED.rglob("*") if file.is_file() and file.suffix != ".md"}  # but for their card
    used = {file for file in files if file.parent.name == "eagle"}
    assert used and used == files & packed
    assert sum(file.stat().st_size for file in files) < 80e6
    assert all(file.stat().st_size < 16 << 20 for file in files)


def test_folders_are_named_by_the_catalogue_and_the_kind() -> None:
    """That is how heads of models that are not fetched are known."""
    models = {entry.name: shipped_kinds(entry.name) for entry in MODELS}
    assert models["qwen2.5-coder-1.5b"] == ("eagle",) and models["qwen3-8b"] == ()
    named = {(model, kind) for model, kinds in models.items() for kind in kinds}
    assert named == {(head.parent.name, HeadConfig.read(head).kind) for head in HEADS}
