"""docs/models.md names every architecture and every type of weights that is read."""

from __future__ import annotations

from pathlib import Path

from foredraft.models.architectures import GGUF_ARCHITECTURES, MODEL_TYPES
from foredraft.models.gguf import blocks

PAGE = (Path(__file__).parents[2] / "docs" / "models.md").read_text(encoding="utf-8")


def test_every_architecture_has_its_row() -> None:
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in PAGE.splitlines() if line.startswith("|")]
    rows = [row for row in cells if len(row) == 4 and row[1].startswith("`") and row[2].startswith("`")]
    in_folders, in_files = ({row[column].strip("`") for row in rows} for column in (1, 2))
    assert in_folders - {"model_type` (safetensors)"} == set(MODEL_TYPES)
    assert in_files - {"general.architecture` (GGUF)"} == set(GGUF_ARCHITECTURES)


def test_every_type_is_listed() -> None:
    (listed,) = (line for line in PAGE.splitlines() if line.startswith("| GGUF |"))
    assert {kind.name for kind in blocks.PRECISION} == set(listed[9:].split(";")[0].split(", "))
