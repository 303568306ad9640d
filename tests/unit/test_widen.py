"""benchmarks/widen.py: a wide model says what the small one says."""

from __future__ import annotations

from pathlib import Path

import gguf
import pytest
import torch
from benchmarks.widen import Shape, widen

from tests.gguf_files import convert_to_gguf
from tests.tiny_models import all_logits, random_model

PROMPT = [1, 5, 2, 4, 3, 3, 0, 5]


@pytest.mark.parametrize("architecture", ["llama-tied", "qwen2"])
@pytest.mark.parametrize(("heads", "kv_heads"), [(8, 4), (12, 4)])
def test_a_wide_model_says_what_the_small_one_says(
    architecture: str, heads: int, kv_heads: int, tmp_path: Path
) -> None:
    """Also where a KV head has to be copied, and with more layers."""
    model = random_model(architecture, vocab_size=6)
    config = model.config
    small = convert_to_gguf(model, tmp_path / "small.gguf")
    wide = Shape(
        heads * config.hidden_size // config.num_attention_heads, heads, kv_heads, 3 * config.intermediate_size // 2, 5
    )
    widen(str(small), str(tmp_path / "wide.gguf"), wide, gguf.GGMLQuantizationType.F32)
    expected = all_logits(small, PROMPT, "torch")
    found = all_logits(tmp_path / "wide.gguf", PROMPT, "torch")
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_a_shape_that_is_too_small_is_refused(tmp_path: Path) -> None:
    small = convert_to_gguf(random_model("qwen2", vocab_size=6), tmp_path / "small.gguf")
    with pytest.raises(SystemExit, match="does not fit"):
        widen(str(small), str(tmp_path / "wide.gguf"), Shape(8, 8, 4, 512, 5), gguf.GGMLQuantizationType.F32)
