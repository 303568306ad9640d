"""docs/models.md names every architecture and every type of weights that is read."""

from __future__ import annotations

import re
from pathlib import Path

from foredraft.config import ModelConfig
from foredraft.models.architectures import GGUF_ARCHITECTURES, MODEL_TYPES
from foredraft.models.gguf import blocks

PAGE = (Path(__file__).parents[2] / "docs" / "models.md").read_text(encoding="utf-8")


def test_every_architecture_has_its_row() -> None:
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in PAGE.splitlines() if line.startswith("|")]
    rows = [row for row in cells if len(row) == 4 and row[1].startswith("`") and row[2].startswith("`")]
    in_folders, in_files = ({row[column].strip("`") for row in rows} for column in (1, 2))
    assert in_folders - {"model_type` (safetensors)"} == set(MODEL_TYPES)
    assert in_files - {"general.architecture` (GGUF)"} == set(GGUF_ARCHITECTURES)


def test_the_figures_of_the_kv_cache() -> None:
    """Two bytes a number; the first layers have the windows, which makes no difference."""
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in PAGE.splitlines() if " × " in line]
    figures = [re.findall(r"\d+", " ".join(row[1:]).replace(",", "")) for row in rows if row[0] != "model"]
    assert len(figures) == 9
    for figure in figures:
        layers, windowed, window, heads, width, *stated = map(int, figure)
        sizes = {"vocab_size": 1, "hidden_size": 1, "intermediate_size": 1, "num_heads": heads}
        config = ModelConfig(
            "", num_layers=layers, num_kv_heads=heads, head_dim=width, max_position_embeddings=8192, **sizes,
            sliding_window=window or None, sliding_layers=tuple(range(windowed)),
        )  # fmt: skip
        kv, everything = config.kv_bytes(itemsize=2), 2 * 2 * layers * heads * width * 8192
        kept = kv.per_token * 8192 + kv.per_window
        assert stated == [kv.per_token, kv.per_window, round(kept / 1e6), round(everything / 1e6)]


def test_every_type_is_listed() -> None:
    (listed,) = (line for line in PAGE.splitlines() if line.startswith("| GGUF |"))
    assert {kind.name for kind in blocks.PRECISION} == set(listed[9:].split(";")[0].split(", "))
