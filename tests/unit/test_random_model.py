"""benchmarks/random_model.py: small ones of the same make are read, and say something."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from benchmarks.random_model import SHAPES, write

from foredraft.models.gguf.checkpoint import GGUFCheckpoint
from tests.backends import BACKENDS
from tests.tiny_models import all_logits


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", SHAPES)
def test_a_small_one_runs(name: str, backend: str, tmp_path: Path) -> None:
    small = {"hidden": 256, "heads": 4, "kv_heads": 2, "head_dim": 64, "experts": 9, "ffn": 256}
    shape = replace(SHAPES[name], **small)  # type: ignore[arg-type]
    path = tmp_path / "model.gguf"
    write(shape, layers=2, vocab=40, path=str(path))
    checkpoint = GGUFCheckpoint(path)
    assert checkpoint.config.experts is not None and checkpoint.config.experts.num_chosen == SHAPES[name].chosen
    kinds = {checkpoint.weight(f"model.layers.1.mlp.experts.8.{part}_proj.weight").kind for part in ("up", "down")}
    assert kinds == ({"mx4"} if shape.is_gpt_oss else {"q4k", "q6"})
    logits = all_logits(path, [3, 9, 27, 1, 30], backend)
    assert logits.isfinite().all() and 0.1 < logits.std() < 10
